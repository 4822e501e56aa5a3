"""The contract of an ordering policy."""

from serve_app.scheduling.policies.partition import Partition
from serve_app.scheduling.policies.settings import EwsjfSettings
from serve_app.scheduling.request import ScheduledRequest


class OrderingPolicy:
    """Orders requests inside length queues, and queues' heads among each other; by default FCFS.

    The waiting room keeps the queues; a policy holds no requests. Requests that come back from a replica go
    before all others of their queue, whatever the policy says. Equal keys and equal scores keep the order of
    arrival. A *round* is one call of the scheduler, in which it may dispatch several requests.
    """

    isolates: bool = False
    """Whether long prefills are kept apart under this policy (`scheduling.isolation`)."""

    promotes: bool = False
    """Whether those who have waited too long go first (`scheduling.promotion`)."""

    learns_queues: bool = False
    """Whether its length queues are those of the learned partition (`replace_partition`)."""

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        """Name of the length queue that `scheduled` waits in. Asked once when it is queued."""
        return "all"

    def key(self, scheduled: ScheduledRequest) -> float:
        """Place inside its length queue, lowest first. Must not change while it waits."""
        return scheduled.request.arrived_at

    def score(self, head: ScheduledRequest, now: float) -> float:
        """Urgency of a queue's head at `now` (seconds); the highest goes first."""
        return now - head.request.arrived_at

    def rank(self, heads: list[ScheduledRequest], now: float) -> None:
        """Sort the heads that could go now, most urgent first."""
        heads.sort(key=lambda head: (-self.score(head, now), head.sequence))

    def on_round_start(self) -> None:
        """A new round of dispatch begins."""

    def on_dispatch(self, scheduled: ScheduledRequest) -> None:
        """`scheduled` is being dispatched."""

    def on_round_end(self, waiting_queues: set[str]) -> None:
        """The round is over; `waiting_queues` are the queues that are not empty."""

    def retune(self, settings: EwsjfSettings) -> None:
        """Score with other weights from now on. Keys, and with them places inside a queue, stay."""

    def replace_partition(self, partition: Partition) -> bool:
        """Take over newly learned queues; True when requests must be queued anew."""
        return False
