"""The scheduler process: one actor per model.

`actor` is what Ray supervises, `live_scheduler` drives the pure core with a clock and sockets, `metrics`
counts, `tuning_endpoint` serves the tuner, `decision_log` writes the log file, `learned_state` and
`learned_queues` are what outlives a restart.
"""
