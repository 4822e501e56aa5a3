"""Interface of a model's scheduler towards gateways.

The gateway's handlers use `SchedulerClient`; the control channel implements it.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from serve_app.core.commands import Dispatch
from serve_app.core.events import DispatchFailure
from serve_app.errors import Conclusion, Outcome
from serve_app.request import DecodeGap, RequestTimes, Submission, Usage


class ServerAddress(NamedTuple):
    """Key of a connection; `scheme` and `name` (of the server) as in `ReplicaAddress`."""

    host: str
    port: int
    scheme: Literal["", "http", "https"] = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """Address of a replica: one of this application on its own port, or a remote endpoint.

    Attributes:
        host: name or address of its HTTP port.
        token: secret for the header `x-replica-token`; empty for an endpoint.
        scheme: `http` or `https` for an endpoint; empty for a replica of this application, whose connections
            use the channel's TLS.
        server_name: an endpoint's host name, if `host` is an address.
        path: prefix of an endpoint's API, without a trailing slash.
        api_key: bearer token for an endpoint; empty for none.
        names_responses: its engine accepts names for responses (`request_id` in the body).
        max_model_len: context limit of its engine, as in `ReplicaSpec`: `UNREPORTED_CONTEXT` if the engine
            reports none. `ReplicaClient` sets it; None in an address that is not registered.
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
    max_model_len: int | None = None

    @property
    def server(self) -> ServerAddress:
        """Key of connections to it."""
        return ServerAddress(self.host, self.port, self.scheme, self.server_name)


class RequestOutlook(NamedTuple):
    """Queue outlook of a waiting request; see `core.outlook`.

    Attributes:
        position: 1 for the request expected to be dispatched next among those of its home pool.
        expected_s: time until its expected start; None, like the bounds, while unknown.
        earliest_s, latest_s: bounds of the 80 % interval of its start.
    """

    request_id: str
    position: int
    expected_s: float | None
    earliest_s: float | None
    latest_s: float | None


class ChannelRequest(ABC):
    """A request of a gateway as its scheduler client sees it.

    Its hooks are called on the event loop and must not raise.

    Attributes:
        submission: what the scheduler knows about it.
    """

    submission: Submission

    @property
    def id_of_client(self) -> str:
        """Id chosen by the client; empty for none."""
        return ""

    @property
    def seen_tokens(self) -> int:
        """Output tokens that the gateway has seen."""
        return 0

    @abstractmethod
    def on_grant(self, dispatch: Dispatch, address: ReplicaAddress) -> None:
        """Handle a grant: the permission to send the request to one replica."""

    @abstractmethod
    def on_rejection(self, rejection: Conclusion) -> None:
        """Handle the end of a waiting request, which is not pending any more."""

    @abstractmethod
    def on_revocation(self) -> None:
        """Handle the revocation of the current grant, which may be repeated."""

    @abstractmethod
    def on_outlook(self, outlook: RequestOutlook | None) -> None:
        """Handle a changed outlook; None while no scheduler is connected."""


class SchedulerClient(Protocol):
    """One model's scheduler, as used by a gateway.

    Its methods return at once; messages that cannot be sent are replaced by the snapshot after the next
    reconnect. A request is pending from `submit` until `finish`, `cancel` or its rejection. The callbacks of
    requests must not raise, because they are called while messages are read.
    """

    @property
    def is_connected(self) -> bool:
        """True if a scheduler is connected."""
        ...

    def submit(self, request: ChannelRequest) -> None:
        """Queue a request. Its hooks may be called before this returns."""
        ...

    def put_back(
        self,
        request: ChannelRequest,
        failure: DispatchFailure,
        message: str = "",
        generated_tokens: int = 0,
        retry_after_s: float | None = None,
    ) -> None:
        """Queue a granted request again that can be served again or continued. Hooks as in `submit`.

        Args:
            generated_tokens: output tokens so far with which the request continues; 0 if it starts again.
            retry_after_s: pause that the engine asks for; None if it asks for none.
        """
        ...

    def cancel(self, request: ChannelRequest) -> None:
        """Withdraw a waiting request, or one whose grant was not used."""
        ...

    def watch(self, request: ChannelRequest) -> None:
        """Subscribe to the outlook of a waiting request; None is sent while no scheduler is connected."""
        ...

    def first_token(self, request: ChannelRequest) -> None:
        """Report the first byte of the engine's streamed answer."""
        ...

    def finish(
        self,
        request: ChannelRequest,
        outcome: Outcome,
        usage: Usage | None = None,
        times: RequestTimes | None = None,
        gap: DecodeGap | None = None,
    ) -> None:
        """Report the end of a granted request, which releases its capacity."""
        ...

    def note_end(self, request: ChannelRequest, outcome: Outcome, times: RequestTimes) -> None:
        """Report the stage times of a request that ended in the queue, if a scheduler is connected."""
        ...

    def replicas(self) -> tuple[ReplicaAddress, ...]:
        """Return the open replicas, which accept requests; empty without a connection to a scheduler.

        A replica is open while its engine answers, its reports are recent and it is not draining. The
        scheduler sends changes at once, so the result is about one message old.
        """
        ...

    def all_replicas(self) -> tuple[ReplicaAddress, ...]:
        """Return all replicas of the last table, including closed ones, and recently removed ones."""
        ...

    def adapters(self) -> Mapping[str, frozenset[str]]:
        """Return the LoRA adapters that replicas list, each with the ids of those replicas."""
        ...

    async def exposition(self, *, with_gateways: bool) -> str:
        """Return the metrics of the scheduler in the Prometheus text format; empty without them in a second.

        Args:
            with_gateways: whether to add those of all other gateways.
        """
        ...

    def register_metrics(self, render: Callable[[], Awaitable[str]]) -> None:
        """Register the function that renders this gateway's metrics for scrapes of other gateways."""
        ...


class SchedulerQueries(Protocol):
    """Interface for admin queries to one model's scheduler."""

    async def query(self, name: str, **arguments: Any) -> Any:
        """Return the answer to a query defined by `scheduler.actor.AdminQueries`.

        Raises:
            ChannelError: the scheduler is disconnected or cannot answer.
        """
        ...
