"""Dispatch: selects the next request and its replica, and tracks requests in flight.

In reading order:

- `dispatcher`: order of service, capacity reservations, choice of the replica, and requests that bypass the
  scheduler.
- `in_flight`: capacity held until the end of a request, put-backs, suspended replicas, and overdue requests.
- `backpressure`: limits on the requests sent to an engine.
- `promotion`: starvation bounds, class floors, and priorities for engines' own queues.
- `backfill`: batch work in what others leave and its revocation, and headroom for light tenants.
"""
