"""The scheduler process: one actor per model.

In reading order:

- `live_scheduler`: drives the pure core with a clock and sockets; `live_scaling` decides numbers of replicas.
- `actor`: the process, supervised by Ray, and the answers to admins' queries.
- `journal`: distributes an entry per event to its subscribers: the file of decisions and the history of
  requests, which are there as well, `metrics`, `usage`, queue updates and the `tuning_endpoint`.
- `metrics`, `gauges`: counters of events, and figures that are read at each scrape.
- `receipts`, `documents`, `findings`: documents for operators, and what is wrong.
"""
