"""A discrete-event simulator that drives the production scheduler.

Read `simulation`: events in a written total order, replicas with a control channel, requests in, decisions
and records out. The simulator decides nothing: every decision is `serve_app.core.Scheduler`'s.

`run.simulate` composes one run from a `fleet`, a `workload`, `scheduler_settings` and a source of length
queues (`partitions`). `batch` defines load 1.0 and plays many runs in several processes. `direct` is the
baseline without a gateway, `baselines` holds research policies. `arguments`, `command` and `report` are
`python -m serve_app simulate`, and `replay_command` is `replay`.
"""
