"""Control channel harness: real schedulers and sockets, with wires that can be cut or muted."""

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import AsyncMock

import pytest
from prometheus_client import CollectorRegistry

from serve_app.core import SchedulerSettings
from serve_app.core.commands import Command, Dispatch, Revoke
from serve_app.core.events import DispatchFailure, Event, Message, Woke
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.core.scaling import ScalingSettings
from serve_app.errors import Conclusion, EngineError, Outcome
from serve_app.request import PromptShape, RequestSpec, Submission, Usage
from serve_app.serving.channel.gateway_client import GatewayClient
from serve_app.serving.channel.link import FrameReader, decode_from_scheduler, encode_frames
from serve_app.serving.channel.messages import VERSION, FromScheduler, Hello, Role, SchedulerEndpoint
from serve_app.serving.channel.replica_client import ReplicaClient
from serve_app.serving.channel.scheduler_client import ChannelRequest, ReplicaAddress, RequestOutlook
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.scheduler.actor import AdminQueries
from serve_app.serving.scheduler.gauges import PersistentCosts
from serve_app.serving.scheduler.live_scaling import LiveScaling
from serve_app.serving.scheduler.live_scheduler import LiveScheduler, LiveSchedulerOptions
from serve_app.serving.scheduler.usage import PersistentUsage
from tests.relay import Relay

# Faster than in production, yet slow enough for a busy machine.
FAST = ChannelSettings(
    heartbeat_interval_s=0.1,
    dead_after_s=0.6,
    stuck_after_s=3.0,
    gateway_grace_s=0.8,
    report_interval_s=0.05,
    backoff_max_s=0.1,
)
PATIENCE_S = 30.0
_SO_ATTACH_FILTER = 26


def permits_socket_filters() -> bool:
    """Return whether this user may filter the packets of a socket; some kernels let only root."""
    with socket.socket() as sock:
        try:
            _reject_segments(sock)
        except OSError:
            return False
        return True


def _reject_segments(sock: socket.socket) -> None:
    """Make the kernel drop all that arrives for a socket."""
    reject_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(reject_all))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


M = TypeVar("M")
E = TypeVar("E")


def scheduler_settings(**changes: Any) -> SchedulerSettings:
    # Many channel tests need queued requests and no replica.
    patient = {"no_replica_grace_s": 600.0}
    return SchedulerSettings(
        **{"model": "m", "routing": RoutingSettings(pools=("short",)), **patient, **changes}
    )


def submission(
    request_id: str,
    *,
    model: str = "m",
    shape: PromptShape | None = None,
    streamed: bool = True,
    **changes: Any,
) -> Submission:
    spec = RequestSpec(
        model=model,
        shape=shape or PromptShape(text_bytes=40, prompt_tokens=10),
        max_output_tokens=10,
        streamed=streamed,
    )
    return Submission(request_id=request_id, spec=spec, **changes)


async def wait_until(
    condition: Callable[[], object], what: str = "the condition", within_s: float = PATIENCE_S
) -> None:
    """Wait until the condition holds; the limit is generous by default."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - any state of several parties may be waited for
            await asyncio.sleep(0.005)
    assert condition(), what


def socket_descriptors() -> list[int]:
    """Return the descriptors of this process's sockets."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(path.readlink()).startswith("socket:"):
                found.append(int(path.name))
    return found


class Wire(Relay):
    """Relay to the current scheduler."""

    def __init__(self, control_plane: "ControlPlane") -> None:
        super().__init__(self._scheduler)
        self._control_plane = control_plane

    async def locate(self, role: Role = Role.GATEWAY) -> SchedulerEndpoint:
        """Return the current scheduler's endpoint, reached through this wire."""
        if self.rejects:
            raise ConnectionError("the wire is down")
        return replace(self._control_plane.endpoint(role), port=self.port)

    def _scheduler(self) -> tuple[str, int]:
        endpoint = self._control_plane.endpoint()
        return endpoint.host, endpoint.port


class FakeReplica:
    """Replica without an engine; reports what the test sets.

    Attributes:
        counts: computes each report; replaces `report`.
    """

    def __init__(self, replica_id: str, pool: str, max_num_seqs: int) -> None:
        self.spec = ReplicaSpec(
            replica_id=replica_id,
            pool=pool,
            max_model_len=1000,
            kv_tokens=1_000_000,
            max_num_seqs=max_num_seqs,
        )
        self.address = ReplicaAddress(
            replica_id=replica_id, pool=pool, host="10.0.0.1", port=8000, token=f"token-{replica_id}"
        )
        self.report = ReplicaReport(received=0, waiting=0, running=0, kv_usage_ratio=0.0)
        self.counts: Callable[[], ReplicaReport] | None = None
        self.broken = False
        self.engine_failure = ""
        self.looks = 0

    async def load(self) -> ReplicaReport:
        self.looks += 1
        if self.engine_failure:
            raise EngineError(self.engine_failure)
        if self.broken:
            raise RuntimeError("the engine does not answer")
        return self.report if self.counts is None else self.counts()


class Grant(NamedTuple):
    """A grant as a gateway receives it."""

    dispatch: Dispatch
    address: ReplicaAddress


class AwaitedRequest(ChannelRequest):
    """Request whose grant or rejection is awaited."""

    def __init__(self, submission: Submission, id_of_client: str, on_revoke: Callable[[], None]) -> None:
        self.submission = submission
        self._id_of_client = id_of_client
        self.outlooks: list[RequestOutlook | None] = []
        self._on_revoke = on_revoke
        self._answer: asyncio.Future[Grant | Conclusion] = asyncio.get_running_loop().create_future()

    @property
    def id_of_client(self) -> str:
        return self._id_of_client

    def on_grant(self, dispatch: Dispatch, address: ReplicaAddress) -> None:
        self._answer_with(Grant(dispatch, address))

    def on_rejection(self, rejection: Conclusion) -> None:
        self._answer_with(rejection)

    def on_revocation(self) -> None:
        self._on_revoke()

    def on_outlook(self, outlook: RequestOutlook | None) -> None:
        self.outlooks.append(outlook)

    def _answer_with(self, answer: Grant | Conclusion) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)

    def begin(self) -> None:
        """Wait for another answer."""
        self._answer = asyncio.get_running_loop().create_future()

    async def answer(self, client: GatewayClient) -> Grant | Conclusion:
        """Return the answer; cancelling the task withdraws the request."""
        try:
            return await self._answer
        except asyncio.CancelledError:
            client.cancel(self)
            raise


class AwaitedClient(GatewayClient):
    """Client whose requests are awaited, and named by their ids."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.requests: dict[str, AwaitedRequest] = {}

    async def acquire(
        self, submission: Submission, id_of_client: str = "", on_revoke: Callable[[], None] = lambda: None
    ) -> Grant | Conclusion:
        """Submit a request."""
        request = AwaitedRequest(submission, id_of_client, on_revoke)
        self.submit(request)
        self.requests[submission.request_id] = request
        return await request.answer(self)

    async def requeue(
        self, request_id: str, failure: DispatchFailure, message: str = "", generated_tokens: int = 0
    ) -> Grant | Conclusion:
        """Put a request back."""
        request = self.requests[request_id]
        request.begin()
        self.put_back(request, failure, message, generated_tokens)
        return await request.answer(self)

    def outlooks(self, request_id: str) -> list[RequestOutlook | None]:
        """Subscribe to the outlooks of a request; return the list that receives them."""
        request = self.requests[request_id]
        self.watch(request)
        return request.outlooks

    def begin(self, request_id: str) -> None:
        """Report the first byte of an answer."""
        self.first_token(self.requests[request_id])

    def end(self, request_id: str, outcome: Outcome, usage: Usage | None = None) -> None:
        """Report the end of a request."""
        if request_id in self.requests:
            self.finish(self.requests[request_id], outcome, usage)


class ControlPlane:
    """Successive schedulers and their peers."""

    def __init__(self, settings: SchedulerSettings, channel: ChannelSettings) -> None:
        self.settings = settings
        self.channel = channel
        self.incarnation = 0
        self.shells: list[LiveScheduler] = []
        self.ends: list[str] = []
        self._port = 0
        self._closers: list[Any] = []

    @property
    def live(self) -> LiveScheduler:
        """Return the current scheduler."""
        return self.shells[-1]

    def endpoint(self, role: Role = Role.GATEWAY) -> SchedulerEndpoint:
        return self.live.endpoint(role)

    async def locate(self) -> SchedulerEndpoint:
        return self.endpoint()

    async def locate_for_replica(self) -> SchedulerEndpoint:
        return self.endpoint(Role.REPLICA)

    async def begin(self, **parts: Any) -> LiveScheduler:
        """Start the next incarnation; the previous one keeps running."""
        self.incarnation += 1
        given = {"incarnation": self.incarnation, "channel": self.channel, "on_end": self.ends.append}
        live = LiveScheduler(self.settings, LiveSchedulerOptions(**{**given, **parts}))
        model, registry = self.settings.model, CollectorRegistry()
        live.queries = AdminQueries(
            live=live,
            previous_costs=PersistentCosts(time.time(), (), ()),
            live_scaling=LiveScaling(model, ScalingSettings(), registry),
            persistent_usage=PersistentUsage(model, None, model, 1.0, registry),
            save=AsyncMock(),
        )
        await live.start("127.0.0.1")
        self.shells.append(live)
        self._port = self.endpoint().port
        return live

    async def restart(self) -> LiveScheduler:
        """Kill the scheduler and start the next incarnation."""
        self.kill()
        return await self.begin()

    def kill(self) -> None:
        """End the scheduler as a process death does: no goodbye, nothing flushed."""
        for descriptor in socket_descriptors():
            with socket.socket(fileno=os.dup(descriptor)) as sock, contextlib.suppress(OSError):
                if sock.family == socket.AF_INET and sock.getsockname()[1] == self._port:
                    sock.shutdown(socket.SHUT_RDWR)
        self.live.stop("killed")

    async def wire(self) -> Wire:
        wire = Wire(self)
        await wire.start()
        self._closers.append(wire.stop)
        return wire

    async def gateway(self, gateway_id: str = "g1", wire: Wire | None = None) -> AwaitedClient:
        """Return a connected gateway client."""
        client = AwaitedClient(gateway_id, wire.locate if wire else self.locate, self.channel)
        client.start()
        self._closers.append(client.close)
        await wait_until(lambda: client.is_connected, "the gateway connects")
        return client

    async def replica(
        self,
        replica_id: str = "s1",
        *,
        wire: Wire | None = None,
        pool: str = "short",
        seats: int = 64,
        prepare: Callable[[FakeReplica], None] = lambda _: None,
    ) -> tuple[ReplicaClient, FakeReplica]:
        """Return a registered replica; `prepare` may change it before it registers."""
        double = FakeReplica(replica_id, pool, seats)
        prepare(double)
        locate = partial(wire.locate, Role.REPLICA) if wire else self.locate_for_replica
        client = ReplicaClient(double.spec, double.address, locate, double.load, self.channel)
        client.start()
        self._closers.append(client.close)
        await wait_until(lambda: self.reported(replica_id), "the replica reports")
        return client, double

    def reported(self, replica_id: str) -> bool:
        """Return whether the scheduler has a report of this replica."""
        report = self.live.status()["replicas"].get(replica_id, {}).get("report")
        return report is not None

    def open_requests(self) -> int:
        """Return how many requests the scheduler's sessions know."""
        status = self.live.status()
        running: int = sum(each["in_flight"] for each in status["replicas"].values())
        waiting: int = sum(status["waiting"].values())
        return running + waiting

    def events(self, kind: type[E]) -> list[E]:
        """Return a list of the events of this kind that the core receives from now on."""
        found: list[E] = []
        handle = self.live.core.handle

        def record(event: Event, now: float) -> list[Command]:
            if isinstance(event, kind):
                found.append(event)
            return handle(event, now)

        self.live.core.handle = record  # type: ignore[method-assign]
        return found

    def revoke(self, request_id: str, replica_id: str, gateway_id: str = "g1") -> None:
        """Let the core revoke a grant."""
        command = Revoke(request_id=request_id, gateway_id=gateway_id, replica_id=replica_id)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.live.core, "handle", lambda event, now: [command])
            self.live.feed(Woke())

    async def close(self) -> None:
        for closer in reversed(self._closers):
            await closer()
        for live in self.shells:
            live.stop("the test is over")


async def granted(client: AwaitedClient, request_id: str, **changes: Any) -> Grant:
    """Submit a request and return its grant."""
    answer = await asyncio.wait_for(client.acquire(submission(request_id, **changes)), PATIENCE_S)
    assert isinstance(answer, Grant), answer
    return answer


async def rejected(client: AwaitedClient, request_id: str, **changes: Any) -> Conclusion:
    """Submit a request and return its rejection."""
    answer = await asyncio.wait_for(client.acquire(submission(request_id, **changes)), PATIENCE_S)
    assert isinstance(answer, Conclusion), answer
    return answer


class RecordingLink:
    """Link that records messages.

    Attributes:
        acknowledged: number of messages that the peer has acknowledged.
    """

    def __init__(self) -> None:
        self.acknowledged = 0
        self.messages: list[Message] = []

    def send(self, message: Message) -> int:
        self.messages.append(message)
        return len(self.messages)

    def of(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


class RawPeer:
    """Raw connection to a scheduler that can send anything."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames: FrameReader[FromScheduler] = FrameReader(decode_from_scheduler, 1 << 22)
        self.received: list[FromScheduler] = []

    @classmethod
    async def at(cls, endpoint: SchedulerEndpoint) -> "RawPeer":
        return cls(*await asyncio.open_connection(endpoint.host, endpoint.port))

    def send(self, *messages: Message) -> None:
        self._writer.write(encode_frames(messages, 1 << 22))

    def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    async def receive(self, kind: type[M]) -> M:
        """Read until a message of this kind arrives."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for message in self.received:
                    if isinstance(message, kind):
                        return message
                if not await self.read():
                    raise ConnectionError(
                        f"closed before a {kind.__name__} arrived; received {self.received}"
                    )

    async def closed(self) -> bool:
        """Read until the peer closes the connection."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.read():
                pass
        return True

    def vanish(self) -> None:
        """Drop all packets below TCP, as a host without power does: not even the kernel acknowledges."""
        _reject_segments(self._writer.get_extra_info("socket"))

    def leave(self) -> None:
        self._writer.transport.abort()

    async def read(self) -> bool:
        """Read what has arrived next; return False at the end of the connection."""
        try:
            data = await self._reader.read(65536)
        except ConnectionError:
            return False
        for frame in self._frames.feed(data):
            self.received += frame
        return bool(data)


def hello(endpoint: SchedulerEndpoint, **changes: Any) -> Hello:
    wanted = {
        "version": VERSION,
        "role": Role.GATEWAY,
        "peer_id": "raw-peer",
        "secret": endpoint.secret,
        "highest_incarnation": 0,
    }
    return Hello(**{**wanted, **changes})
