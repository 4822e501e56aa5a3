"""The contract of an ordering policy."""

from typing import Protocol

from serve_app.scheduling.entry import Entry


class OrderingPolicy(Protocol):
    """Orders requests inside length queues, and the queues' heads among each other.

    The waiting room keeps the queues; a policy holds no requests. Requests that come back from a replica go
    before all others of their queue, whatever the policy says. Equal keys and equal scores keep the order of
    arrival.
    """

    isolates: bool
    """Whether long prefills are kept apart under this policy (`scheduling.isolation`)."""

    def queue_of(self, entry: Entry) -> str:
        """Name of the length queue that `entry` waits in. Must not change while it waits."""
        ...

    def key(self, entry: Entry) -> float:
        """Place inside its length queue, lowest first. Must not change while it waits."""
        ...

    def score(self, head: Entry, now: float) -> float:
        """Urgency of a queue's head at `now` (seconds); the highest goes first."""
        ...
