"""Commands: the actions that the scheduler requests. Events and commands together form the decision log."""

from dataclasses import dataclass

from serve_app.core.accounting.wait_causes import WaitBreakdown
from serve_app.core.accounting.waits import wait_breakdown
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.errors import Conclusion
from serve_app.request import RateLimitStatus, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Send a request to a replica, which already holds its capacity.

    Attributes:
        pool: pool of the replica; differs from the request's home pool after a spill.
        estimated_tokens: its estimated token budget (prompt and output).
        engine_priority: its position in the engine's own queue, lower is served first; None if engines get no
            priorities.
        rate_limits: status of its key's limits; None if it has none.
        passed: whether it bypassed the scheduler (`dispatch.pass_through`).
        waited: causes of its wait since its arrival; None if it did not wait.
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
    """Report the outcome of a request.

    Attributes:
        dispatched: whether it was sent to a replica. Its gateway then knows its outcome already, unless the
            scheduler concluded it after a put-back.
        waited: causes of its wait if it was concluded in the queue.
    """

    request_id: str
    gateway_id: str
    conclusion: Conclusion
    dispatched: bool = False
    waited: WaitBreakdown | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke:
    """Stop a running request, whose capacity others need, and put it back (`DispatchFailure.REVOKED`).

    A gateway ignores it if the request has ended in the meantime.
    """

    request_id: str
    gateway_id: str
    replica_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportStale:
    """The report of a replica is stale. The replica counts as saturated until the next report."""

    replica_id: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFresh:
    """A stale replica has reported again."""

    replica_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSilent:
    """An engine with outstanding answers appears to hang. `silent_s` is 0 once it has recovered."""

    replica_id: str
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLearned:
    """The learned context limit of a replica has changed; None if it is unknown again."""

    replica_id: str
    context_tokens: int | None


def dispatch_of(
    scheduled: ScheduledRequest, replica: ReplicaSpec, now: float, rate_limits: RateLimitStatus | None
) -> Dispatch:
    """Return the command for a request whose capacity a replica already holds."""
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
        passed=scheduled.bypassed,
        waited=wait_breakdown(scheduled, now),
    )


def conclude_of(
    request: Request, conclusion: Conclusion, *, dispatched: bool, waited: WaitBreakdown | None = None
) -> Conclude:
    """Return the command for a request that has ended."""
    return Conclude(
        request_id=request.request_id,
        gateway_id=request.gateway_id,
        conclusion=conclusion,
        dispatched=dispatched,
        waited=waited,
    )


Command = Dispatch | Conclude | Revoke | ReportStale | ReportFresh | EngineSilent | ContextLearned
