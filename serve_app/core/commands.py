"""Commands: the actions that the scheduler requests. Events and commands together form the decision log."""

import msgspec

from serve_app.core.accounting.wait_causes import WaitBreakdown
from serve_app.errors import Conclusion
from serve_app.request import RateLimitStatus


class _Command(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of all commands; `gc=False` because none can be part of a reference cycle."""


class Dispatch(_Command, frozen=True, kw_only=True):
    """Send a request to a replica, which already holds its capacity.

    Attributes:
        pool: pool of the replica; differs from the request's home pool after a spill.
        estimated_tokens: its estimated token budget (prompt and output).
        engine_priority: its position in the engine's own queue, lower is served first; None if engines get no
            priorities.
        rate_limits: status of its key's limits; None if it has none.
        passed: whether it bypassed the scheduler (`dispatch.dispatcher`).
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


class Conclude(_Command, frozen=True, kw_only=True):
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


class Revoke(_Command, frozen=True, kw_only=True):
    """Stop a running request and put it back (`DispatchFailure.REVOKED`).

    Others need its capacity, or its first token is overdue.

    A gateway ignores it if the request has ended in the meantime.
    """

    request_id: str
    gateway_id: str
    replica_id: str


class ReportStale(_Command, frozen=True, kw_only=True):
    """The report of a replica is stale. The replica counts as saturated until the next report."""

    replica_id: str
    age_s: float


class ReportFresh(_Command, frozen=True, kw_only=True):
    """A stale replica has reported again."""

    replica_id: str


class EngineSilent(_Command, frozen=True, kw_only=True):
    """An engine with outstanding answers appears to hang. `silent_s` is 0 once it has recovered."""

    replica_id: str
    silent_s: float


class ContextLearned(_Command, frozen=True, kw_only=True):
    """The learned context limit of a replica has changed; None if it is unknown again."""

    replica_id: str
    context_tokens: int | None


Command = Dispatch | Conclude | Revoke | ReportStale | ReportFresh | EngineSilent | ContextLearned
