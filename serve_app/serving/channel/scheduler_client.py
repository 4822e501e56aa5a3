"""The scheduler of a model as a gateway sees it: what it is asked, and what it answers.

The gateway's handler is written against `SchedulerClient`; the control channel implements it.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from serve_app.core.commands import Dispatch
from serve_app.core.events import DispatchFailure
from serve_app.errors import Conclusion, Outcome
from serve_app.request import Submission, Usage


class ServerAddress(NamedTuple):
    """What a connection is made with; `scheme` and `name` (of the server) as in `ReplicaAddress`."""

    host: str
    port: int
    scheme: Literal["", "http", "https"] = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """Where a replica listens: one of ours on its own port, or an endpoint that runs elsewhere.

    Attributes:
        host: name or address of its HTTP port.
        token: secret that a replica of ours asks for in the header `x-replica-token`; empty for an endpoint.
        scheme: `http` or `https` for an endpoint; empty for a replica of ours, whose connections are as the
            channel's.
        server_name: the name that an endpoint is known by, where `host` is an address.
        path: what stands before the paths of an endpoint's API, without a slash at its end.
        api_key: what an endpoint asks for as a bearer token; empty for none.
        names_responses: its engine lets requests name their responses (`request_id` in the body).
    """

    replica_id: str
    pool: str
    host: str
    port: int
    token: str = field(repr=False)
    scheme: Literal["", "http", "https"] = ""
    server_name: str = ""
    path: str = ""
    api_key: str = field(default="", repr=False)
    names_responses: bool = False

    @property
    def server(self) -> ServerAddress:
        """What a connection to it is made with."""
        return ServerAddress(self.host, self.port, self.scheme, self.server_name)


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to send a request to one replica: the scheduler's decision, and where that replica listens."""

    dispatch: Dispatch
    address: ReplicaAddress


class EngineTimes(NamedTuple):
    """What an engine tells of the time of one request inside it, in seconds; None for what it does not tell.

    Attributes:
        queue_s: it waited for its turn.
        prefill_s: from its turn to its first token.
        generation_s: from its first token to its last.
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    generation_s: float | None = None


class RequestTimes(NamedTuple):
    """How long the parts of a request took at its gateway, in seconds, for its receipt.

    Attributes:
        endpoint: the path that it was sent to.
        read_s: from its arrival until the scheduler was asked.
        grant_s: from there to the last grant, or to its end without one.
        first_token_s: from that grant to the first token; None where the answer is not streamed.
        engine_s: from that grant to the end in the engine; None where it ended in the queue.
        engine: as the engine itself tells; None where it does not.
    """

    endpoint: str
    read_s: float
    grant_s: float
    first_token_s: float | None
    engine_s: float | None
    engine: EngineTimes | None = None

    def stages(self, wait_s: float) -> Iterator[tuple[str, float]]:
        """Its stages; see `stages`."""
        return stages(
            wait_s,
            read_s=self.read_s,
            grant_s=self.grant_s,
            first_token_s=self.first_token_s,
            engine_s=self.engine_s,
        )


def stages(
    wait_s: float,
    *,
    read_s: float | None = None,
    grant_s: float | None = None,
    first_token_s: float | None = None,
    engine_s: float | None = None,
) -> Iterator[tuple[str, float]]:
    """Yield the stages of a request's time in their order, in seconds, as far as they are known.

    Their sum is the whole time from its arrival at the gateway.

    Args:
        wait_s: in the queue, as the scheduler knows.
        read_s, grant_s, first_token_s, engine_s: as in `RequestTimes`; None where not known, or not over.
    """
    if read_s is not None and grant_s is not None:
        yield "gateway", read_s
        yield "channel", grant_s - wait_s
    yield "queue", wait_s
    if first_token_s is not None:
        yield "until_first_token", first_token_s
        if engine_s is not None:
            yield "generation", engine_s - first_token_s
    elif engine_s is not None:
        yield "engine", engine_s


class RequestOutlook(NamedTuple):
    """What a waiting request may expect; see `core.accounting`.

    Attributes:
        position: 1 for the request that is expected to go next of those at home in its pool.
        expected_s: until it starts; None, and the bounds with it, while nothing is known of that.
        earliest_s, latest_s: bounds of the interval in which it starts with 80 %.
    """

    request_id: str
    position: int
    expected_s: float | None
    earliest_s: float | None
    latest_s: float | None


class SchedulerClient(Protocol):
    """One model's scheduler, as seen from one gateway.

    All methods except `acquire` and `put_back` return at once and never raise: what cannot be sent
    now is sent after the next reconnect. Cancelling the task that awaits `acquire` or `put_back` cancels the
    request itself: its place in the queue, or the reservation of a grant on its way, is given back.
    """

    @property
    def is_connected(self) -> bool:
        """Whether a scheduler hears us now."""
        ...

    async def acquire(self, submission: Submission, client_request_id: str = "") -> Grant | Conclusion:
        """Queue a request and wait for its turn; its client's own id, if it has one, is for its receipt."""
        ...

    async def put_back(
        self, request_id: str, replica_id: str, failure: DispatchFailure, message: str = ""
    ) -> Grant | Conclusion:
        """Return a granted request that got no first byte, and wait for another turn at the front."""
        ...

    def watch(self, request_id: str, on_outlook: Callable[[RequestOutlook | None], None]) -> None:
        """Be told how a request of ours stands in the queue, now and whenever that changes, while it waits.

        Args:
            on_outlook: called with None while no scheduler is there.
        """
        ...

    def first_token(self, request_id: str) -> None:
        """The first byte of the engine's streamed answer has come."""
        ...

    def finish(
        self,
        request_id: str,
        outcome: Outcome,
        usage: Usage | None = None,
        times: RequestTimes | None = None,
    ) -> None:
        """The request is over and its place is free."""
        ...

    def note_end(self, request_id: str, outcome: Outcome, times: RequestTimes) -> None:
        """A request has ended in the queue: tell what its receipt should say, if it can be told now."""
        ...

    def replicas(self) -> tuple[ReplicaAddress, ...]:
        """The open replicas of the model, which take requests now; empty also while the scheduler is unknown.

        A replica is open while its engine answers, its reports are fresh and it does not drain. The scheduler
        sends every change at once, so the answer is about as old as one message.
        """
        ...

    def all_replicas(self) -> tuple[ReplicaAddress, ...]:
        """All replicas as they were last told of: also those that take no requests now, or have just left."""
        ...

    def adapters(self) -> Mapping[str, frozenset[str]]:
        """The LoRA adapters that replicas list, each with the ids of those replicas."""
        ...

    async def exposition(self) -> str:
        """The metrics of the scheduler and of all other gateways in the Prometheus text format.

        Empty when none come within a second.
        """
        ...

    def show(self, own_page: Callable[[], Awaitable[str]]) -> None:
        """Give other gateways the page of this one when they are scraped."""
        ...
