"""Dispatch: which request is sent next, and to which replica.

Read `dispatcher` (the order of service) first, then `placement` (which replica), `in_flight` (what is held
there until the end) and `backpressure` (what an engine may be sent). `promotion`, `class_floors` and
`capacity_reservations` prevent starvation. `engine_priority` is for engines that order their own queue.
"""
