"""Events: what can happen to a scheduler. Each is a plain value; time is given beside it, never inside it."""

import enum
from dataclasses import dataclass

from serve_app.core.policies.length_queues import Partition
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.core.settings import SchedulerSettings
from serve_app.errors import Outcome
from serve_app.request import Request, Usage


@dataclass(frozen=True, slots=True)
class Arrived:
    """A gateway submits a request, or submits it again after a new scheduler took over."""

    request: Request


@dataclass(frozen=True, slots=True)
class Resumed:
    """A gateway tells a new scheduler of a request that runs on a replica already."""

    request: Request
    replica_id: str
    started: bool


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The engine sent the first byte of its answer, so the request no longer waits in the engine."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A dispatched request is over.

    Attributes:
        outcome: COMPLETED, FAILED, CANCELLED, or REJECTED_* when the engine refused the request itself.
        usage: the engine's own count, None when it gave none.
    """

    request_id: str
    outcome: Outcome
    usage: Usage | None = None


class DispatchFailure(enum.StrEnum):
    """Why a dispatched request came back before its first byte."""

    UNREACHABLE = "unreachable"
    """No connection, a replica that drains, or one that refuses the gateway: no engine saw the request."""
    LOST = "lost"
    """The connection broke, or the engine died, after the request was sent."""
    ENGINE_ERROR = "engine_error"
    """The engine answered with an error of its own (500), and lives."""
    BUSY = "busy"
    """The engine refused for lack of room (429, 503)."""
    TOO_LONG = "too_long"
    """The engine's context limit is below the request's real length."""


@dataclass(frozen=True, slots=True)
class DispatchFailed:
    """A dispatched request came back before the first byte reached the client: it waits again.

    Attributes:
        stated_context: of an engine that found it too long: the context limit that the engine names, in
            tokens; None where it names none.
    """

    request_id: str
    replica_id: str
    failure: DispatchFailure
    message: str = ""
    stated_context: int | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client went away, while the request was waiting or running."""

    request_id: str


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """A gateway cannot be heard any more: its waiting requests are gone with it.

    What runs stays charged until it is cancelled: an engine may still be at work on it.
    """

    gateway_id: str


@dataclass(frozen=True, slots=True)
class ReplicaJoined:
    """A replica is ready to take requests, or joins again with other limits."""

    spec: ReplicaSpec


@dataclass(frozen=True, slots=True)
class ReplicaReported:
    """A report has come in."""

    replica_id: str
    report: ReplicaReport


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """A replica is gone. Its requests come back one by one, as `DispatchFailed` from their gateways."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class PartitionChanged:
    """Queues have been learned anew; waiting requests are queued again, and keep their time of arrival."""

    partition: Partition


@dataclass(frozen=True, slots=True)
class Retuned:
    """Some settings have other values from now on, and no request loses its place by it.

    Attributes:
        settings: of which only what `retuning.RETUNABLE` names may differ from those in force.
    """

    settings: SchedulerSettings


@dataclass(frozen=True, slots=True)
class ActiveShareChanged:
    """Another share of the requests is scheduled from now on; those that wait are not concerned.

    Attributes:
        active_share: 0 for none, 1 for all.
    """

    active_share: float


@dataclass(frozen=True, slots=True)
class Woke:
    """The time asked for by `next_wakeup` has come."""


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
