"""Commands: what the scheduler wants done. Events and commands together are the decision log."""

from dataclasses import dataclass

from serve_app.core.accounting.wait_causes import WaitBreakdown
from serve_app.core.accounting.waits import wait_breakdown
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.adaptive_b_short import BShortChanged
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.errors import Conclusion
from serve_app.request import RateLimitStatus, Request


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
        rate_limits: how the limits of its key stand; None when it has none.
        passed: it was not scheduled (`dispatch.pass_through`).
        waited: what it has waited for since it arrived; None when it did not wait.
    """

    request_id: str
    gateway_id: str
    replica_id: str
    pool: str
    length_queue: str
    estimated_tokens: int
    queue_wait_s: float
    engine_priority: int | None = None
    rate_limits: RateLimitStatus | None = None
    passed: bool = False
    waited: WaitBreakdown | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclude:
    """A request has reached its one outcome.

    Attributes:
        dispatched: it had been sent to a replica, so its gateway knows already how it ended, unless
            the conclusion was reached here after a put-back.
        waited: what it has waited for, where it was concluded in the queue.
    """

    request_id: str
    gateway_id: str
    conclusion: Conclusion
    dispatched: bool = False
    waited: WaitBreakdown | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportStale:
    """A replica has not reported for longer than the limit; it counts as saturated until it does."""

    replica_id: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFresh:
    """A replica that was stale has reported again."""

    replica_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSilent:
    """An engine that owes answers hangs, as far as can be told, or goes on.

    Attributes:
        silent_s: for how long it has given no sign; 0 when it goes on.
    """

    replica_id: str
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLearned:
    """The context limit of a replica that does not tell it has been learned, or has turned out otherwise.

    Attributes:
        context_tokens: the limit; None where nothing is known of it any more.
    """

    replica_id: str
    context_tokens: int | None


def dispatch_of(
    scheduled: ScheduledRequest, replica: ReplicaSpec, now: float, rate_limits: RateLimitStatus | None
) -> Dispatch:
    """The command for a request whose place on a replica is reserved."""
    return Dispatch(
        request_id=scheduled.request.request_id,
        gateway_id=scheduled.request.gateway_id,
        replica_id=replica.replica_id,
        pool=replica.pool,
        length_queue=scheduled.length_queue,
        estimated_tokens=scheduled.estimate.budget_tokens,
        queue_wait_s=now - scheduled.request.arrived_at,
        engine_priority=scheduled.engine_priority,
        rate_limits=rate_limits,
        passed=scheduled.passed,
        waited=wait_breakdown(scheduled, now),
    )


def conclude_of(
    request: Request, conclusion: Conclusion, *, dispatched: bool, waited: WaitBreakdown | None = None
) -> Conclude:
    """The command for a request that is over."""
    return Conclude(
        request_id=request.request_id,
        gateway_id=request.gateway_id,
        conclusion=conclusion,
        dispatched=dispatched,
        waited=waited,
    )


Command = Dispatch | Conclude | ReportStale | ReportFresh | EngineSilent | BShortChanged | ContextLearned
