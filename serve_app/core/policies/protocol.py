"""The contract of an ordering policy, and what a policy is given."""

from dataclasses import dataclass, field

from serve_app.core.policies.length_queues import Partition
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.prefill_cost import PrefillCosts
from serve_app.core.settings import EwsjfSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """The learned cost of prefills, shared with the scheduler, and the settings of EWSJF."""

    prefill_costs: PrefillCosts = field(default_factory=PrefillCosts)
    ewsjf: EwsjfSettings = field(default_factory=EwsjfSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBounds:
    """The lengths of one length queue.

    Attributes:
        name: as `OrderingPolicy.queue_of` names it.
        min_tokens: shortest prompt in it.
        max_tokens: longest prompt in it; inclusive.
        bubble: it is for lengths in a gap of the learned queues.
    """

    name: str
    min_tokens: int
    max_tokens: int
    bubble: bool = False


class OrderingPolicy:
    """Orders requests inside length queues, and the heads of queues among each other; by default FCFS.

    The request queue keeps the queues; a policy holds no requests. Its measure of length is
    `ScheduledRequest.prefill_tokens`. Requests that a replica returned are dispatched before all others of
    their queue, whatever the policy. Equal keys and equal scores keep the order of arrival. A *round* is one
    event of the scheduler, in which it may dispatch several requests.
    """

    isolates: bool = False
    """Whether prefill isolation applies (`scheduling.isolation`)."""

    promotes: bool = False
    """Whether requests that have waited too long are promoted (`dispatch.promotion`)."""

    bounds_delay: bool = False
    """Whether long prompts that the score put last for too long go first (`queueing.delay_bound`)."""

    leaves_out_heads: bool = False
    """Whether `rank` may leave heads out because of others; without that it only sorts, each on its own."""

    learns_queues: bool = False
    """Whether its length queues are those of the learned partition (`replace_partition`)."""

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        """Name of the length queue for `scheduled`. Called once when it is queued."""
        return "all"

    def queue_bounds(self) -> tuple[QueueBounds, ...]:
        """The length queues of now, the shortest lengths first; none where they have no bounds."""
        return ()

    def key(self, scheduled: ScheduledRequest) -> float:
        """Order inside its length queue, lowest first. Must not change while it waits."""
        return scheduled.request.arrived_at

    def score(self, head: ScheduledRequest, now: float) -> float:
        """Urgency of a queue's head at `now` (seconds); the highest is dispatched first."""
        return now - head.request.arrived_at

    def rank(self, heads: list[ScheduledRequest], now: float) -> None:
        """Sort the heads that could be dispatched now, most urgent first."""
        heads.sort(key=lambda head: (-self.score(head, now), head.sequence))

    def on_round_start(self) -> None:
        """A new round of dispatch begins."""

    def on_dispatch(self, scheduled: ScheduledRequest) -> None:
        """`scheduled` is being dispatched."""

    def on_round_end(self, waiting_queues: set[str]) -> None:
        """The round has ended; `waiting_queues` are the queues that are not empty."""

    def retune(self, settings: EwsjfSettings) -> None:
        """Score with other weights from now on; keys, and with them the order inside a queue, stay."""

    def replace_partition(self, partition: Partition) -> bool:
        """Use newly learned queues; True when requests must be queued again."""
        return False
