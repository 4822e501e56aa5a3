"""A discrete-event simulator that drives the production scheduler.

Read `timeline` (what happens when, in a written total order), `replica` (an engine model with a control
channel), then `world` (requests in, decisions and records out). Nothing here decides: every decision is
`serve_app.scheduling.Scheduler`'s.

What is simulated: `run.simulate` composes one run from `fleet`, `workload` and `scheduler_settings`; `direct`
is the world without a gateway, `estimate_noise` and `disturbance` make life harder, `load` says what load 1.0
is. Many runs: `batch`, `experiment`, `results`, `plots`, and `command` for the command line.
"""
