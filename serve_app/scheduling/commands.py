"""Commands: what the scheduler wants done. Events and commands together are the decision log."""

from dataclasses import dataclass

from serve_app.errors import Conclusion
from serve_app.routing.adaptive_b_short import BShortChanged


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Send a request to a replica; its place is already reserved.

    Attributes:
        pool: the pool that the replica belongs to; may differ from the request's home pool (spill).
        length_queue: name of the queue it was taken from.
        estimated_tokens: its token budget (prompt and output), as estimated.
        queue_wait_s: time since it arrived.
        engine_priority: its place in the engine's own queue, lower is served first; None where engines are
            not told one.
    """

    request_id: str
    gateway_id: str
    replica_id: str
    pool: str
    length_queue: str
    estimated_tokens: int
    queue_wait_s: float
    engine_priority: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclude:
    """A request has reached its one outcome.

    Attributes:
        dispatched: it had been sent to a replica, so its gateway knows already how it ended, unless
            the conclusion was reached here after a put-back.
    """

    request_id: str
    gateway_id: str
    conclusion: Conclusion
    dispatched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportStale:
    """A replica has not reported for longer than the limit; it counts as saturated until it does."""

    replica_id: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFresh:
    """A replica that was stale has reported again."""

    replica_id: str


Command = Dispatch | Conclude | ReportStale | ReportFresh | BShortChanged
