"""The contract of an ordering policy, and its inputs."""

from dataclasses import dataclass, field

from serve_app.core.policies.length_queues import LengthQueue, Partition
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.prefill_cost import PrefillCosts
from serve_app.core.settings import EwsjfSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """The learned cost of prefills, shared with the scheduler, and the settings of EWSJF."""

    prefill_costs: PrefillCosts = field(default_factory=PrefillCosts)
    ewsjf: EwsjfSettings = field(default_factory=EwsjfSettings)


class OrderingPolicy:
    """Orders requests within length queues, and the heads of queues among each other. FCFS by default.

    The request queue holds the requests; a policy holds none. Its measure of length is
    `ScheduledRequest.prefill_tokens`. Requests put back for a fault of their replica precede all others of
    their queue, whatever the policy. Requests with equal keys or scores remain in order of arrival. A
    *round* is one event of the scheduler, in which it may dispatch several requests.
    """

    isolates: bool = False
    """True if prefill isolation applies (`core.isolation`)."""

    promotes: bool = False
    """True if requests beyond their starvation bound are promoted (`dispatch.promotion`)."""

    bounds_delay: bool = False
    """True if the delay of long prompts by the score is bounded (`queueing.delay_bound`)."""

    omits_heads: bool = False
    """True if `rank` may remove heads because of others; else it only sorts, each head independently."""

    learns_queues: bool = False
    """True if its length queues are those of the learned partition (`replace_partition`)."""

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        """Return the name of the length queue for `scheduled`. Called whenever it is queued."""
        return "all"

    def queue_bounds(self) -> tuple[LengthQueue, ...]:
        """Return the current length queues by rising length, empty if they have no bounds."""
        return ()

    def key(self, scheduled: ScheduledRequest) -> float:
        """Return the order within its length queue, lowest first. Must not change while it is queued."""
        return scheduled.request.arrived_at

    def score(self, head: ScheduledRequest, now: float) -> float:
        """Return the urgency of a queue's head at `now` (seconds); the highest is dispatched first."""
        return now - head.request.arrived_at

    def rank(self, heads: list[ScheduledRequest], now: float) -> None:
        """Sort the heads that could be dispatched now, most urgent first."""
        heads.sort(key=lambda head: (-self.score(head, now), head.sequence))

    def on_round_start(self) -> None:
        """Start a new round of dispatches."""

    def on_dispatch(self, scheduled: ScheduledRequest) -> None:
        """Observe the dispatch of a request."""

    def on_round_end(self, waiting_queues: set[str]) -> None:
        """End the round; `waiting_queues` are the names of the non-empty queues."""

    def retune(self, settings: EwsjfSettings) -> None:
        """Apply other weights to the score. Keys, and therefore the order within a queue, do not change."""

    def replace_partition(self, partition: Partition) -> bool:
        """Apply newly learned queues. Return True if queued requests must be queued again."""
        return False
