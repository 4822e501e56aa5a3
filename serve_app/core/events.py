"""Events: the inputs of a scheduler, as plain values. Their time is passed separately.

Events that a gateway reports completely are also messages of the control channel (`Message`): new fields are
appended, as `serving.channel.messages` describes.
"""

import enum

import msgspec

from serve_app.core.policies.length_queues import Partition
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.core.settings import SchedulerSettings
from serve_app.errors import Outcome
from serve_app.request import DecodeGap, Request, RequestTimes, Usage


class _Event(msgspec.Struct, frozen=True, gc=False):
    """Base of events that are no messages; `gc=False` because none can be part of a reference cycle."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=str.lower, gc=False):
    """Base of all messages of the control channel; `gc=False` as above."""


class Arrived(_Event, frozen=True):
    """A gateway submits a request, or resubmits it to a new scheduler."""

    request: Request


class Resumed(_Event, frozen=True):
    """A gateway reports to a new scheduler a request that already runs on a replica."""

    request: Request
    replica_id: str
    started: bool


class FirstToken(Message, frozen=True, tag="first"):
    """The engine sent the first output of its answer, so the request no longer waits in the engine."""

    request_id: str


class Finished(Message, frozen=True, tag="finish"):
    """A dispatched request has ended.

    Attributes:
        outcome: COMPLETED, FAILED, CANCELLED, or REJECTED_* if the engine rejected the request itself.
        usage: the engine's token counts; None if it sent none.
        times: the gateway's stage times, for the receipt. Gateways also report those of requests that were
            rejected or cancelled while they waited, which the scheduler no longer knows.
        gap: the longest gap of a streamed answer; None with fewer than two pieces.
        seen_tokens: output tokens that the gateway has seen, about one for each event of a stream; 0 before
            the first token.
    """

    request_id: str
    outcome: Outcome
    usage: Usage | None = None
    times: RequestTimes | None = None
    gap: DecodeGap | None = None
    seen_tokens: int = 0


class DispatchFailure(enum.StrEnum):
    """The reason why a dispatched request was put back: before its first byte, or to be continued."""

    UNREACHABLE = "unreachable"
    """No connection, a draining replica, or one that rejects the gateway: no engine received the request."""
    LOST = "lost"
    """The connection broke, or the engine died, after the request was sent."""
    ENGINE_ERROR = "engine_error"
    """The engine answered with an internal error (500), and is alive."""
    BUSY = "busy"
    """The engine rejected the request for lack of capacity (429, 503)."""
    TOO_LONG = "too_long"
    """The engine's context limit is below the request's actual length."""
    REVOKED = "revoked"
    """The scheduler has revoked the grant, so the gateway stopped the request."""

    def is_after_service(self, generated_tokens: int) -> bool:
        """Return whether the replica has served the request in part; see `DispatchFailed`."""
        return self is DispatchFailure.REVOKED or generated_tokens > 0


class DispatchFailed(_Event, frozen=True):
    """A dispatched request is put back before the first byte reached the client, or can be continued.

    Attributes:
        stated_context: context limit in tokens that the engine states when it rejects a request as too long;
            None if it states none.
        generated_tokens: output tokens so far with which the request continues; 0 if it starts again.
        retry_after_s: pause that a busy engine asks for; None if it asks for none.
    """

    request_id: str
    replica_id: str
    failure: DispatchFailure
    message: str = ""
    stated_context: int | None = None
    generated_tokens: int = 0
    retry_after_s: float | None = None


class Cancelled(Message, frozen=True, tag="cancel"):
    """The client disconnected while the request was queued, or its gateway no longer knows it."""

    request_id: str


class GatewayLost(_Event, frozen=True):
    """A gateway is lost, and its queued requests with it.

    Running requests keep their holds until they are cancelled, because an engine may still process them.
    """

    gateway_id: str


class ReplicaJoined(_Event, frozen=True):
    """A replica is ready to accept requests, or joins again with other limits."""

    spec: ReplicaSpec


class ReplicaReported(_Event, frozen=True):
    """A replica has reported its load."""

    replica_id: str
    report: ReplicaReport


class ReplicaLost(_Event, frozen=True):
    """A replica is lost. The gateways report its requests one by one, as `DispatchFailed`."""

    replica_id: str


class PartitionChanged(_Event, frozen=True):
    """New length queues have been learned. Queued requests are queued again, with their time of arrival."""

    partition: Partition


class Retuned(_Event, frozen=True):
    """Settings in `retuning.RETUNABLE` change. They apply to all further decisions; no queue is rebuilt."""

    settings: SchedulerSettings


class ActiveShareChanged(_Event, frozen=True):
    """The share of scheduled requests changes, 0 to 1. Queued requests are not affected."""

    active_share: float


class Woke(_Event, frozen=True):
    """The time returned by `next_wakeup` has been reached."""


Event = (
    Arrived
    | Resumed
    | FirstToken
    | Finished
    | DispatchFailed
    | Cancelled
    | GatewayLost
    | ReplicaJoined
    | ReplicaReported
    | ReplicaLost
    | PartitionChanged
    | Retuned
    | ActiveShareChanged
    | Woke
)
