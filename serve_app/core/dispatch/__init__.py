"""Dispatch: selects the next request and its replica, and tracks requests in flight.

Read `dispatcher` (order of service, choice of the replica, and requests that bypass the scheduler) first,
then `in_flight` (capacity held until the end of a request; failed and overdue ones) and `backpressure`
(limits on the requests sent to an engine). `promotion` bounds starvation, and `backfill` runs batch work in
what others leave.
"""
