"""The scheduler process: one actor per model.

`actor` is supervised by Ray, and answers admins with `receipts`, `documents` and `findings`. `live_scheduler`
drives the pure core with a clock and sockets. `journal` distributes an entry per event to its subscribers:
the `decision_log` file, `metrics`, the `history` of requests, `usage`, the queue updates of `receipts` and
the `tuning_endpoint`.
"""
