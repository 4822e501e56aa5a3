"""Dispatch: selects the next request and its replica, and tracks requests in flight.

Read `dispatcher` (order of service, and choice of the replica) first, then `in_flight` (capacity held until
the end of a request; failed and overdue ones) and `backpressure` (limits on the requests sent to an engine).
`promotion` bounds starvation, `backfill` runs batch work in what others leave, and `pass_through` is for
requests that bypass the scheduler.
"""
