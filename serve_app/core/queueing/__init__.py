"""Queueing: where requests wait, and how tenants share.

`request_queue` holds the sub-queues (`sub_queue`: priority class x tenant x length queue), `fairness` the
tenants' shares, `expiry` the heap of deadlines.
"""
