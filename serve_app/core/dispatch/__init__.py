"""Dispatch: which request is sent next, and to which replica.

Read `dispatcher` (the order of service, and the choice of a replica) first, then `in_flight` (what is held
there until the end) and `backpressure` (what an engine may be sent). `starvation` has promotion, capacity
reservations and class floors. `engine_priority` is for engines that order their own queue, and `pass_through`
for requests that bypass the scheduler.
"""
