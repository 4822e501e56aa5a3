"""What a gateway asks of the scheduler of a model, and what it hears back.

The gateway's handler is written against `SchedulerClient`; the control channel implements it.
"""

from dataclasses import dataclass, field
from typing import Protocol

from serve_app.errors import Outcome
from serve_app.request import PriorityClass, PromptShape, Usage
from serve_app.scheduling.events import DispatchFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request as the gateway hands it over: like `Request`, without the scheduler's clock.

    Attributes:
        request_id: unique among all gateways (the gateway's own id and a counter, not the client's header).
        queue_timeout_s: how long it may wait in the queue, from the moment it came in; None for the class
            default.
    """

    request_id: str
    model: str
    shape: PromptShape
    tenant: str = "default"
    priority: PriorityClass = PriorityClass.DEFAULT
    max_output_tokens: int | None = None
    choices: int = 1
    queue_timeout_s: float | None = None
    no_wait: bool = False
    streamed: bool = True
    prefix: tuple[int, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Leave to send a request to one replica.

    Attributes:
        host: address of the replica's own HTTP port.
        token: secret that the replica asks for in the header `x-replica-token`.
        queue_wait_s: time in the queue, as the scheduler counts it.
        engine_priority: what to write into the body's `priority`; None leaves the body as it is.
    """

    request_id: str
    replica_id: str
    host: str
    port: int
    token: str
    pool: str
    length_queue: str
    estimated_tokens: int
    queue_wait_s: float
    engine_priority: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The scheduler ended the request before any replica answered it."""

    request_id: str
    outcome: Outcome
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """Where a replica listens; for requests that need no scheduling (`/tokenize`)."""

    replica_id: str
    pool: str
    host: str
    port: int
    token: str


class SchedulerClient(Protocol):
    """One model's scheduler, as seen from one gateway.

    All methods except `acquire` and `put_back` return at once and never raise: what cannot be sent
    now is sent after the next reconnect. Cancelling the task that awaits `acquire` or `put_back` cancels the
    request itself: its place in the queue, or the reservation of a grant on its way, is given back.
    """

    async def acquire(self, submission: Submission) -> Grant | Refusal:
        """Queue a request and wait for its turn."""
        ...

    async def put_back(
        self, request_id: str, replica_id: str, failure: DispatchFailure, message: str = ""
    ) -> Grant | Refusal:
        """Return a granted request that got no first byte, and wait for another turn at the front."""
        ...

    def first_token(self, request_id: str) -> None:
        """The first byte of the engine's streamed answer has come."""
        ...

    def finish(self, request_id: str, outcome: Outcome, usage: Usage | None = None) -> None:
        """The request is over and its place is free."""
        ...

    def replicas(self) -> tuple[ReplicaAddress, ...]:
        """All replicas that take requests now; empty when none, or while the scheduler is unknown."""
        ...

    async def exposition(self) -> str:
        """The scheduler's metrics in the Prometheus text format; empty when none come within a second."""
        ...
