"""HTTP client of the data path: pooled connections to replicas, and responses while they arrive.

- `UpstreamPool`: connects to replicas, reuses connections, and closes idle or silent ones.
- `UpstreamConnection`: one HTTP/1.1 connection to a replica, at protocol level.
- `UpstreamResponse`: a response while it arrives; `UpstreamError`: one that does not complete.
- `HaltWatch`: replicas that are halted with their connections open, and release of what waits for them.

`UpstreamConnection`. A request is written at once; large bodies are written in slices, as fast as the replica
reads. httptools parses the answer as it arrives, into a small bounded buffer for the forwarder. A client that
reads slowly thus pauses reading here, and TCP slows the replica down.

Safety rules:
- An answer must declare its length (content-length or chunked), so that a broken connection is never
  mistaken for its end.
- A connection is reused only after a complete answer to a completely sent request.
- `close()` on an unfinished answer aborts the connection immediately, which makes the engine abort.
- Unsolicited bytes end the connection.
- A head (with the informational ones before it) and what frames a body are limited in size, as in
  `serving.http_server`.

`HaltWatch`. A process that is stopped, or whose node hangs, still acknowledges TCP segments, so its clients
notice nothing. Two signs together show it: the scheduler has closed the replica, because its reports are
missing, and the replica answers no request for its health. Then requests without any part of their answer
return to the queue, for another replica. Answers that have begun may continue, so they end later, with an
error event. While no scheduler is connected, all replicas count as closed, and the second sign alone decides.
"""

import asyncio
import contextlib
import contextvars
import logging
import socket
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from time import monotonic
from typing import Annotated, cast

import httptools

from serve_app.core.events import DispatchFailure
from serve_app.core.settings_base import INTERNAL, NOT_NEGATIVE, POSITIVE, settings
from serve_app.errors import ServeAppError
from serve_app.serving.channel.scheduler_client import ServerAddress
from serve_app.serving.http_server import MAX_HEAD_BYTES
from serve_app.serving.tls import ClientTls, Tls, connect, public_tls

HeaderList = list[tuple[bytes, bytes]]


class UpstreamError(ServeAppError):
    """A replica gave no complete answer.

    Attributes:
        failure: states whether it may have seen the request.
        retry_after_s: seconds after which it asks to be tried again; None if it states none.
    """

    def __init__(self, failure: DispatchFailure, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.failure = failure
        self.retry_after_s = retry_after_s


class EngineSilentError(UpstreamError):
    """A replica sent nothing for too long. It may still be computing, so the request is not retried."""


class StaleConnectionError(UpstreamError):
    """The replica closed a reused connection before it answered."""


class UpstreamResponse:
    """A replica's response while it arrives. Always `close` it.

    Read it in callbacks with `on_change` and `take`, or in a task with `started`, `next` and `read`.

    Attributes:
        status: HTTP status; 0 until the head has arrived.
        has_ended: nothing more will arrive, because the body is complete or the connection broke.
        pieces: body bytes that have not been taken.
        buffered_bytes: bytes received since the last take, with their framing.
        on_change: called when more of the answer, its end or its failure has arrived.
    """

    __slots__ = (
        "_connecting",
        "_connection",
        "buffered_bytes",
        "complete",
        "error",
        "has_ended",
        "headers",
        "on_change",
        "pieces",
        "status",
    )

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        self.status = 0
        self.headers: HeaderList = []
        self.has_ended = self.complete = False
        self.error: UpstreamError | None = None
        self.pieces: list[bytes] = []
        self.buffered_bytes = 0
        self.on_change = on_change
        self._connection: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None

    @property
    def at_end(self) -> bool:
        """True if the body is complete and has been taken."""
        return self.complete and not self.pieces

    def header(self, name: bytes) -> bytes:
        """Return the value of a header (lower-case name), or empty if it is absent."""
        for key, value in self.headers:
            if key == name:
                return value
        return b""

    async def started(self) -> None:
        """Wait for the status line and headers.

        Raises:
            UpstreamError: the connection broke before they were complete.
        """
        while not self.status:
            if self.error is not None:
                raise self.error
            await self._change()

    async def next(self) -> bytes:
        """Return all body bytes since the last call. Waits for some; empty only at the end.

        Raises:
            UpstreamError: the connection broke before the body was complete.
        """
        while not self.pieces:
            if self.complete:
                return b""
            if self.error is not None:
                raise self.error
            await self._change()
        return self.take()

    def take(self) -> bytes:
        """Return all body bytes since the last call, without waiting."""
        pieces, self.pieces = self.pieces, []
        self.buffered_bytes = 0
        if self._connection is not None and self._connection.paused:
            self._connection.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read(self) -> bytes:
        """Return the whole body. Its size is not limited, because it comes from an engine of the application.

        Raises:
            UpstreamError: the connection broke before the body was complete.
        """
        first = await self.next()
        if self.at_end:
            return first
        pieces = [first]
        while piece := await self.next():
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Release the connection. An incomplete answer cuts it, so that the engine stops."""
        self.on_change = None
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.abort()

    def _change(self) -> "asyncio.Future[None]":
        """Return a future that completes at the next change."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_change = partial(complete, waiter)
        return waiter

    # Called by the pool and the connection.

    def connect_by(self, work: Coroutine[None, None, None]) -> None:
        """Start the task that opens a connection for the request."""
        # In an empty context, because Ray Serve cancels a request's tasks with the request.
        self._connecting = asyncio.get_running_loop().create_task(work, context=contextvars.Context())

    def attach(self, connection: "UpstreamConnection") -> None:
        """Wait for the answer on this connection."""
        self._connection, self._connecting = connection, None

    def end(self) -> None:
        """End the response as complete; the connection calls `on_change` after this."""
        self._connection = None
        self.has_ended = self.complete = True

    def break_off(self, error: UpstreamError) -> None:
        """End the response as broken."""
        self._connection = self._connecting = None
        self.has_ended, self.error = True, error
        if self.on_change is not None:
            self.on_change()


def complete(waiter: "asyncio.Future[None]") -> None:
    """Wake the task that awaits a future. Idempotent."""
    if not waiter.done():
        waiter.set_result(None)


# Bound on the part of an answer that the gateway buffers for one slow client.
BUFFER_HIGH_BYTES = 256 * 1024

# Up to this size, head and body leave in one write: one segment and one wake-up for a small request.
_ONE_WRITE_BYTES = 64 * 1024
_SLICE_BYTES = 256 * 1024
# A reused connection that the replica was closing breaks within a round trip. One that breaks later was
# processing the request, which may have caused the failure.
_STALE_WINDOW_S = 0.5
_LOWEST_STATUS = 100
_NO_BODY_STATUSES = frozenset({204, 304})


class UpstreamConnection(asyncio.Protocol):
    """TCP connection to a replica; serves one request at a time.

    Attributes:
        address: the replica's server; key in the pool.
        paused: reading is paused because the client is slow.
        silent_ticks: sweeps of the pool since the replica's last bytes, or since it became idle.
    """

    __slots__ = (
        "_asked_at",
        "_closed",
        "_first_use",
        "_framing_bytes",
        "_informational",
        "_keep_alive",
        "_owner",
        "_parser",
        "_repeats",
        "_response",
        "_saw_body",
        "_transport",
        "_unsent",
        "_write_paused",
        "address",
        "paused",
        "silent_ticks",
    )

    def __init__(self, owner: "UpstreamPool", address: ServerAddress) -> None:
        self.address = address
        self.paused = False
        self.silent_ticks = 0
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._response: UpstreamResponse | None = None
        # Head and body of the request, as long as it may have to be repeated on another connection.
        self._repeats: tuple[bytes, bytes] | None = None
        # The rest of a large body.
        self._unsent: memoryview | None = None
        self._write_paused = False
        self._asked_at = 0.0
        self._first_use = True
        self._saw_body = False
        self._keep_alive = False
        self._informational = False
        # Bytes received since the request, the head or a piece of the body.
        self._framing_bytes = 0
        self._closed = False

    def __repr__(self) -> str:
        host, port = self.address[:2]
        state = "closed" if self._closed else "idle" if self.is_idle else "busy"
        return f"<UpstreamConnection {host}:{port} {state}>"

    @property
    def is_idle(self) -> bool:
        """True if no request is in flight."""
        return self._response is None

    @property
    def is_unanswered(self) -> bool:
        """True if a request is in flight of whose answer no part of the body has arrived."""
        return self._response is not None and not self._saw_body

    @property
    def is_usable(self) -> bool:
        """True if another request can be sent, as far as this side knows."""
        transport = self._transport
        return not self._closed and transport is not None and not transport.is_closing()

    def send(self, response: UpstreamResponse, head: bytes, body: bytes) -> None:
        """Send a request, whose answer arrives in `response`.

        A large body is written in slices, as fast as the transport drains, until the answer arrives.

        Args:
            head: request line and headers, including the empty line and the length of `body`.
        """
        transport = self._transport
        assert transport is not None
        assert self._response is None
        self._response = response
        response.attach(self)
        self._saw_body = False
        self._asked_at = monotonic()
        self.silent_ticks = self._framing_bytes = 0
        # A reused connection may have been closed by the replica, so the request may have to be repeated.
        self._repeats = None if self._first_use else (head, body)
        if len(body) <= _ONE_WRITE_BYTES:
            transport.write(head + body)
            self._unsent = None
        else:
            self._unsent = memoryview(body)
            transport.write(head)
            self._write_slices()

    def _write_slices(self) -> None:
        transport, response = self._transport, self._response
        while self._unsent is not None and not self._write_paused:
            if transport is None or response is None or response.status:
                return
            unsent = self._unsent
            self._unsent = unsent[_SLICE_BYTES:] if len(unsent) > _SLICE_BYTES else None
            transport.write(unsent[:_SLICE_BYTES])

    def abort(self) -> None:
        """Abort the connection immediately."""
        if self._transport is not None:
            self._transport.abort()
        self._lose("the gateway closed the connection")

    def fail(self, message: str, kind: type[UpstreamError] = UpstreamError) -> None:
        """Abort the connection because the replica sends nothing or violates the protocol."""
        self._lose(message, kind)
        if self._transport is not None:
            self._transport.abort()

    def resume_reading(self) -> None:
        """Continue reading after the buffer was emptied."""
        if self.paused:
            self.paused = False
            self.silent_ticks = 0
            if self._transport is not None and not self._closed:
                self._transport.resume_reading()

    def _lose(self, message: str, kind: type[UpstreamError] = UpstreamError) -> None:
        """Fail the open answer and leave the pool. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._unsent = None
        response, self._response = self._response, None
        repeats, self._repeats = self._repeats, None
        self._owner.on_lost(self)
        if response is None:
            return
        error = kind(DispatchFailure.LOST, message)
        if repeats is not None and isinstance(error, StaleConnectionError):
            self._owner.repeat(self.address, response, *repeats, error)
        else:
            response.break_off(error)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of the open connection."""
        # A cast, not a check: uvloop's transports do not inherit from asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the open answer; as stale if a reused connection broke at once and without an answer."""
        reason = f": {exc}" if exc is not None else ""
        response = self._response
        is_unseen = response is not None and not response.status and not self._framing_bytes
        stale = not self._first_use and is_unseen and monotonic() - self._asked_at < _STALE_WINDOW_S
        kind = StaleConnectionError if stale else UpstreamError
        self._lose(f"the replica closed the connection before its answer was complete{reason}", kind)

    def pause_writing(self) -> None:
        """Stop writing the body until the transport's buffer has drained."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """Continue writing the body."""
        self._write_paused = False
        self._write_slices()

    def data_received(self, data: bytes) -> None:
        """Parse bytes of the answer."""
        response = self._response
        if response is None:
            self.fail("the replica sent unsolicited bytes")
            return
        self.silent_ticks = 0
        self._repeats = None
        self._framing_bytes += len(data)
        response.buffered_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            # If these bytes follow a complete answer, it remains valid.
            self.fail(f"the replica's answer is not valid HTTP/1.1: {exc}")
        else:
            if self._framing_bytes > MAX_HEAD_BYTES:
                self.fail(f"the head or chunk framing of the replica's answer exceeds {MAX_HEAD_BYTES} bytes")
        if response.on_change is not None and response.error is None:
            response.on_change()
        if response.buffered_bytes >= BUFFER_HIGH_BYTES and not response.has_ended:
            self._pause_reading()

    def _pause_reading(self) -> None:
        """Stop reading until the buffer is emptied. Idempotent."""
        if not self.paused and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()

    # httptools callbacks

    def on_message_begin(self) -> None:
        """Reject an answer that follows the expected one."""
        if self._response is None:
            # A second answer in the same segment would be taken for that to another client's request.
            self.fail("the replica sent an unsolicited answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header of the answer; trailers are dropped."""
        response = self._response
        if response is not None and not response.status:
            response.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Check the head of the answer, and make its status available."""
        response = self._response
        if response is None:
            return
        status = self._parser.get_status_code()
        self._informational = 100 <= status < 200
        if self._informational:
            # 100 Continue and 103 Early Hints precede the final answer.
            response.headers.clear()
            return
        if status < _LOWEST_STATUS:
            self.fail(f"the replica's answer has the invalid status {status:03}")
            return
        if not _states_its_length(status, response):
            self.fail("the replica's answer has neither content-length nor chunked encoding")
            return
        self._keep_alive = self._parser.should_keep_alive()
        self._framing_bytes = 0
        response.status = status

    def on_body(self, body: bytes) -> None:
        """Add body bytes without their chunk framing."""
        response, self._saw_body = self._response, True
        self._framing_bytes = 0
        if response is not None:
            response.pieces.append(body)

    def on_message_complete(self) -> None:
        """Complete the response, and return the connection to the pool if it can be reused."""
        response = self._response
        if response is None or self._informational:
            return
        self.resume_reading()
        self._response = None
        self._first_use = False
        self.silent_ticks = 0
        response.end()
        if self._keep_alive and self._unsent is None:
            self._owner.on_idle(self)
        else:
            self.abort()


def _states_its_length(status: int, response: UpstreamResponse) -> bool:
    if status in _NO_BODY_STATUSES or response.header(b"content-length"):
        return True
    return b"chunked" in response.header(b"transfer-encoding").lower()


# Remote servers close idle connections sooner than this application's replicas: vLLM after 5 s.
_ENDPOINT_IDLE_EXPIRY_S = 4.0

# A vanished host is detected after idle + interval x count = 20 s, also while an engine computes silently.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2))
_UNACKNOWLEDGED_MS = 20_000


@settings(block="upstream")
class UpstreamSettings:
    """Connections from a gateway to replicas; all times in seconds."""

    # Time limit for connecting; replicas are close by, so a longer time means that one is gone.
    connect_timeout_s: Annotated[float, POSITIVE] = 3.0
    # Longest silence of an engine within one answer. An answer that is not streamed is silent until its end,
    # so this bounds its generation time. Dead hosts are found sooner, by TCP keep-alive.
    silence_timeout_s: Annotated[float, POSITIVE] = 900.0
    # A client that reads nothing for this long loses the rest of its answer. Its engine is released then, or
    # as soon as it has finished.
    stalled_client_timeout_s: Annotated[float, POSITIVE, INTERNAL] = 120.0
    # Idle time after which a connection is closed. Must stay well below the keep-alive of replicas (300 s),
    # because the side that sends requests must close; otherwise requests meet closing connections.
    idle_expiry_s: Annotated[float, POSITIVE, INTERNAL] = 60.0
    # Idle connections per replica; others are closed after use. Each costs a descriptor on both sides.
    max_idle_per_replica: Annotated[int, NOT_NEGATIVE, INTERNAL] = 256


class UpstreamPool:
    """All connections of one gateway to its replicas, on one event loop.

    Args:
        tls: for replicas of this application; None connects without TLS.
        https: for remote servers that use HTTPS; None trusts the system's certificate authorities.

    Attributes:
        connects: TCP connections opened.
        stale_retries: requests repeated on a new connection because the reused one was closed.
        on_sweep: called about every second while there are connections.
    """

    def __init__(
        self, settings: UpstreamSettings, tls: Tls | None = None, https: ClientTls | None = None
    ) -> None:
        self._tls = None if tls is None else tls.as_client
        self._https = https
        self.connects = 0
        self.stale_retries = 0
        self.on_sweep: Callable[[], None] | None = None
        self._settings = settings
        self._idle: dict[ServerAddress, list[UpstreamConnection]] = {}
        self._all: set[UpstreamConnection] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        times = (settings.silence_timeout_s, settings.idle_expiry_s)
        # One timer serves all connections; limits are exact to about a third.
        self._sweep_s = min(1.0, min(times) / 3)
        self._closed = False

    def __repr__(self) -> str:
        idle = sum(len(connections) for connections in self._idle.values())
        return f"<UpstreamPool busy={len(self._all) - idle} idle={idle} connects={self.connects}>"

    def start(
        self, address: ServerAddress, head: bytes, body: bytes, on_change: Callable[[], None] | None = None
    ) -> UpstreamResponse:
        """Send a request to a replica, and return its response, which may fail with an `UpstreamError`.

        The failure is UNREACHABLE when the replica never saw the request, LOST when it may have.

        Args:
            on_change: see `UpstreamResponse`.
        """
        response = UpstreamResponse(on_change)
        connection = self._take_idle(address)
        if connection is not None:
            connection.send(response, head, body)
        else:
            response.connect_by(self._connect_and_send(address, response, head, body))
        return response

    async def send(self, address: ServerAddress, head: bytes, body: bytes) -> UpstreamResponse:
        """Send a request to a replica, and wait for the head of its answer.

        Raises:
            UpstreamError: as in `start`.
        """
        response = self.start(address, head, body)
        try:
            await response.started()
        except BaseException:
            # Also on cancellation, so that the engine does not work for a request without a client.
            response.close()
            raise
        return response

    async def fetch(
        self, address: ServerAddress, head: bytes, body: bytes = b""
    ) -> tuple[UpstreamResponse, bytes]:
        """Send a request to a replica; return its response, which is closed, and the whole body.

        Raises:
            UpstreamError: as in `start`.
        """
        with contextlib.closing(await self.send(address, head, body)) as response:
            return response, await response.read()

    def repeat(
        self,
        address: ServerAddress,
        response: UpstreamResponse,
        head: bytes,
        body: bytes,
        stale: StaleConnectionError,
    ) -> None:
        """Send a request on a new connection, because the replica had closed the reused one.

        This is the race with the replica's own keep-alive timeout.
        """
        self.stale_retries += 1
        response.connect_by(self._connect_and_send(address, response, head, body, stale))

    async def _connect_and_send(
        self,
        address: ServerAddress,
        response: UpstreamResponse,
        head: bytes,
        body: bytes,
        stale: StaleConnectionError | None = None,
    ) -> None:
        try:
            connection = await self._connect(address)
        except UpstreamError as error:
            # After a stale connection, the replica died while the request arrived, maybe because of it: LOST.
            response.break_off(stale or error)
        else:
            connection.send(response, head, body)

    def close(self) -> None:
        """Abort every connection."""
        self._closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        for connection in tuple(self._all):
            connection.abort()

    def silent(self, longer_than_s: float) -> set[ServerAddress]:
        """Return the replicas that have sent nothing for that long to a request in flight."""
        return {
            connection.address
            for connection in self._all
            if not (connection.is_idle or connection.paused)
            and connection.silent_ticks * self._sweep_s > longer_than_s
        }

    def give_up(self, address: ServerAddress, *, begun: bool) -> int:
        """Fail the requests at a replica that does not respond, and close its idle connections.

        Args:
            begun: also those whose answers have begun.

        Returns:
            The number of failed requests.
        """
        failed = 0
        for connection in tuple(self._all):
            if connection.address == address and (begun or connection.is_idle or connection.is_unanswered):
                failed += not connection.is_idle
                connection.fail(f"the replica {address.host}:{address.port} does not respond")
        return failed

    def on_idle(self, connection: UpstreamConnection) -> None:
        """Add a connection to the idle ones of its replica, or close it if there are enough."""
        idle = self._idle.setdefault(connection.address, [])
        if len(idle) < self._settings.max_idle_per_replica:
            idle.append(connection)
        else:
            connection.abort()

    def on_lost(self, connection: UpstreamConnection) -> None:
        """Remove a closed connection."""
        self._all.discard(connection)
        idle = self._idle.get(connection.address)
        if idle is not None:
            with contextlib.suppress(ValueError):
                idle.remove(connection)
            if not idle:
                del self._idle[connection.address]

    def _take_idle(self, address: ServerAddress) -> UpstreamConnection | None:
        """Return the most recently used idle connection, which is the least likely to be closed."""
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.is_usable:
                return connection
        return None

    async def _connect(self, address: ServerAddress) -> UpstreamConnection:
        host, port = address[:2]
        loop = asyncio.get_running_loop()
        connection = UpstreamConnection(self, address)
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                transport, _ = await connect(lambda: connection, host, port, self._tls_for(address))
        except TimeoutError as exc:
            message = f"replica {host}:{port} accepted no connection in {self._settings.connect_timeout_s} s"
            raise UpstreamError(DispatchFailure.UNREACHABLE, message) from exc
        except OSError as exc:
            raise UpstreamError(DispatchFailure.UNREACHABLE, f"replica {host}:{port}: {exc}") from exc
        _tune(transport.get_extra_info("socket"))
        self.connects += 1
        self._all.add(connection)
        if self._sweep_timer is None and not self._closed:
            self._sweep_timer = loop.call_later(self._sweep_s, self._sweep)
        return connection

    def _idle_expiry_s(self, address: ServerAddress) -> float:
        longest_s = self._settings.idle_expiry_s
        return min(longest_s, _ENDPOINT_IDLE_EXPIRY_S) if address.scheme else longest_s

    def _tls_for(self, address: ServerAddress) -> ClientTls | None:
        match address.scheme:
            case "":
                return self._tls
            case "http":
                return None
        if self._https is None:
            # Loads the system's certificates, which takes some milliseconds.
            self._https = public_tls()
        return self._https._replace(name=address.name or None)

    def _sweep(self) -> None:
        """Close connections that were idle, or whose replica sent nothing, for too long."""
        settings, loop = self._settings, asyncio.get_running_loop()
        for connection in tuple(self._all):
            connection.silent_ticks += 1
            silent_s = connection.silent_ticks * self._sweep_s
            if connection.is_idle:
                if silent_s > self._idle_expiry_s(connection.address):
                    connection.abort()
            elif silent_s > settings.silence_timeout_s and not connection.paused:
                # A paused connection waits for its client; the HTTP server limits that.
                message = f"the replica sent nothing for {settings.silence_timeout_s} s"
                connection.fail(message, EngineSilentError)
        self._sweep_timer = loop.call_later(self._sweep_s, self._sweep) if self._all else None
        if self.on_sweep is not None:
            self.on_sweep()


def _tune(sock: socket.socket | None) -> None:
    """Disable Nagle's algorithm and enable detection of dead hosts."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = (*_KEEPALIVE, ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS))
    for name, value in options:
        # Linux has all of these options; other systems use their defaults.
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


logger = logging.getLogger("ray.serve")

# Silence of an answer before its replica is suspected. Prefills of long prompts are silent for longer.
_SILENT_S = 2.0
_PROBE_TIMEOUT_S = 2.0
# Failed probes in succession until requests without an answer are released, and until begun answers end.
_RELEASE_AFTER, _END_AFTER = 2, 15


class HaltWatch:
    """Watch over the replicas for which requests of one gateway wait; `check` runs with every sweep.

    Args:
        open_servers: returns the servers that the schedulers consider healthy.
    """

    def __init__(self, upstream: UpstreamPool, open_servers: Callable[[], Collection[ServerAddress]]) -> None:
        self._upstream = upstream
        self._open_servers = open_servers
        self._probes: dict[ServerAddress, asyncio.Task[None]] = {}
        upstream.on_sweep = self.check

    def __repr__(self) -> str:
        return f"<HaltWatch probing {len(self._probes)}>"

    def check(self) -> None:
        """Start to probe replicas that are closed and silent; end the probes of others."""
        silent = self._upstream.silent(_SILENT_S)
        suspects = silent.difference(self._open_servers()) if silent else silent
        for address in self._probes.keys() - suspects:
            self._probes.pop(address).cancel()
        for address in suspects - self._probes.keys():
            # In an empty context, because Ray Serve cancels the tasks of a request with it.
            self._probes[address] = asyncio.get_running_loop().create_task(
                self._probe(address), context=contextvars.Context()
            )

    def close(self) -> None:
        """End all probes."""
        for task in self._probes.values():
            task.cancel()
        self._probes.clear()

    async def _probe(self, address: ServerAddress) -> None:
        failed = 0
        while failed < _END_AFTER:
            began = asyncio.get_running_loop().time()
            failed = 0 if await self._responds(address) else failed + 1
            if failed in {_RELEASE_AFTER, _END_AFTER}:
                released = self._upstream.give_up(address, begun=failed == _END_AFTER)
                if released:
                    logger.error("event=replica_halted replica=%s:%d requests=%d", *address[:2], released)
            passed_s = asyncio.get_running_loop().time() - began
            await asyncio.sleep(max(0.0, _PROBE_TIMEOUT_S - passed_s))

    async def _responds(self, address: ServerAddress) -> bool:
        """Return whether the server sends any HTTP response."""
        head = f"GET /health HTTP/1.1\r\nhost: {address.name or address.host}\r\ncontent-length: 0\r\n\r\n"
        with contextlib.suppress(TimeoutError, UpstreamError):
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                response = await self._upstream.send(address, head.encode(), b"")
                response.close()
                return True
        return False
