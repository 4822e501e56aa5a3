"""Dispatch: selects the next request and its replica, and tracks requests in flight.

Read `dispatcher` (order of service) and `placement` (choice of the replica) first, then `in_flight` (capacity
held until the end of a request) and `backpressure` (limits on the requests sent to an engine). `promotion`,
`capacity_reservations` and `class_floors` bound starvation. `put_backs` and `suspensions` handle failed
dispatches: the first for the request, the second for its replica. `slow_starts` moves requests whose first
token is overdue. `engine_priority` is for engines that order
their own queue, and `pass_through` for requests that bypass the scheduler.
"""
