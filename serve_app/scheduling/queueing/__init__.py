"""Where requests wait, and whose turn it is.

`request_queue` holds the sub-queues (priority class x tenant x length queue), `fairness` the tenants'
shares, `expiry` the heap of deadlines.
"""
