"""A discrete-event simulator that drives the production scheduler.

Read `timeline` (what happens when, in a written total order), `replica` (an engine model with a control
channel), then `world` (requests in, decisions and records out). Nothing here decides: every decision is
`serve_app.scheduling.Scheduler`'s.
"""
