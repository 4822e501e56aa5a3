"""The scheduler process: one actor per model.

`actor` is supervised by Ray, and answers admins with `receipts`, `documents` and `findings`. `live_scheduler`
drives the pure core with a clock and sockets. `journal` distributes an entry per event to its subscribers:
the file of decisions and the history of requests, which are there as well, `metrics`, `usage`, the queue
updates of `receipts` and the `tuning_endpoint`.
"""
