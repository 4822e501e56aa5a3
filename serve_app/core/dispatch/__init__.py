"""Dispatch: selects the next request and its replica, and tracks requests in flight.

Read `dispatcher` (order of service and choice of the replica) first, then `in_flight` (capacity held until
the end of a request) and `backpressure` (limits on the requests sent to an engine). `starvation` implements
promotion, capacity reservations and class floors. `engine_priority` is for engines that order their own
queue, and `pass_through` for requests that bypass the scheduler.
"""
