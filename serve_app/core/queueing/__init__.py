"""Queueing: the sub-queues of waiting requests, and fair shares among tenants.

`request_queue` holds the sub-queues (priority class x tenant x length queue) and their heads. `fairness`
holds the shares of tenants and the work ahead of a request under them, `delay_bound` the bound on the delay
of long prompts, and `expiry` the heap of deadlines.
"""
