"""A discrete-event simulator that drives the production scheduler.

Read `timeline` (events in a written total order), `replica` (an engine model with a control channel), then
`simulation` (requests in, decisions and records out). The simulator decides nothing: every decision is
`serve_app.scheduling.Scheduler`'s.

`run.simulate` composes one run from a `fleet`, a `workload`, `scheduler_settings` and a source of length
queues (`partitions`). `scaled` scales the pools while they run. `load` defines load 1.0. `disturbances` adds
bursts, a changing mix and wrong estimates. `direct` is the baseline without a gateway, `baselines` holds
research policies. `batch` plays many runs in several processes, and `command` is `python -m serve_app
simulate`.
"""
