"""Discrete-event simulator that drives the production scheduler.

Read `simulation`: it processes events in a total order and replicas with a control channel, receives requests
and returns decisions and records. The simulator decides nothing: every decision is
`serve_app.core.Scheduler`'s.

`run.simulate` composes one run from a fleet, a workload, settings and a source of length queues, or the
baseline without a gateway; `run` also defines load 1.0, and plays many runs in several processes. `baselines`
has policies for comparisons, and `report` writes results.
"""
