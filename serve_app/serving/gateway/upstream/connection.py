"""One HTTP/1.1 connection from a gateway to a replica, at protocol level.

A request is written in one piece (large bodies in slices, as fast as the replica takes them); the answer is
parsed by httptools as it comes in and waits in a small buffer until the forwarder takes it. The buffer is
bounded: a client that reads slowly stops the reading here, and TCP then slows the replica down.

The rules that keep it honest:
- an answer must state its length (content-length or chunked), so that a cut connection is never taken for
  its end;
- a connection is used again only after a complete answer to a completely sent request;
- `close()` on an unfinished answer cuts the connection at once, which is how an engine learns to abort;
- bytes that nobody asked for end the connection.
"""

import asyncio
from typing import Protocol, cast

import httptools

from serve_app.scheduling.events import DispatchFailure
from serve_app.serving.channel.scheduler_client import ServerAddress
from serve_app.serving.gateway.upstream.response import StaleConnectionError, UpstreamError, UpstreamResponse

# Up to here head and body leave in one write, so that a small request is one segment and one wake-up.
_ONE_WRITE_BYTES = 64 * 1024
_SLICE_BYTES = 256 * 1024
# A kept connection that the replica was just closing breaks within a round trip of our writing to it. One
# that breaks later was at work on the request, and took it down with it.
_STALE_WINDOW_S = 0.5
_LOWEST_STATUS = 100
_NO_BODY_STATUSES = frozenset({204, 304})


class ConnectionOwner(Protocol):
    """The pool, as a connection sees it."""

    def on_idle(self, connection: "UpstreamConnection") -> None:
        """The answer is complete and the connection may serve again."""
        ...

    def on_lost(self, connection: "UpstreamConnection") -> None:
        """The connection is gone."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """One TCP connection to a replica; serves one request at a time.

    Attributes:
        address: where it leads, the pool's key.
        silent_ticks: sweeps of the pool since the replica last sent something, or since it went idle.
    """

    __slots__ = (
        "_asked_at",
        "_closed",
        "_first_use",
        "_informational",
        "_keep_alive",
        "_owner",
        "_parser",
        "_paused",
        "_response",
        "_saw_byte",
        "_sent",
        "_transport",
        "_writable",
        "address",
        "silent_ticks",
    )

    def __init__(self, owner: ConnectionOwner, address: ServerAddress) -> None:
        self.address = address
        self.silent_ticks = 0
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._response: UpstreamResponse | None = None
        self._writable: asyncio.Future[None] | None = None
        self._asked_at = 0.0
        self._first_use = True
        self._saw_byte = False
        self._sent = False
        self._keep_alive = False
        self._informational = False
        self._paused = False
        self._closed = False

    def __repr__(self) -> str:
        host, port = self.address[:2]
        state = "closed" if self._closed else "idle" if self.is_idle else "busy"
        return f"<UpstreamConnection {host}:{port} {state}>"

    @property
    def is_idle(self) -> bool:
        """No request is on it."""
        return self._response is None

    @property
    def is_usable(self) -> bool:
        """It can take another request, as far as this side knows."""
        transport = self._transport
        return not self._closed and transport is not None and not transport.is_closing()

    @property
    def is_paused(self) -> bool:
        """Its answer waits for a slow client."""
        return self._paused

    async def exchange(self, head: bytes, body: bytes) -> UpstreamResponse:
        """Send a request and wait for the head of its answer.

        Args:
            head: request line and headers, with the empty line.
            body: the request's body; its length is in `head`.

        Raises:
            StaleConnectionError: this was a kept connection and the replica had closed it.
            UpstreamError: the connection broke, or what came back is not HTTP.
        """
        assert self._transport is not None
        assert self._response is None
        response = self._response = UpstreamResponse(self)
        self._saw_byte = self._sent = False
        self._asked_at = asyncio.get_running_loop().time()
        self.silent_ticks = 0
        try:
            if len(body) <= _ONE_WRITE_BYTES:
                self._transport.write(head + body)
                self._sent = True
            else:
                await self._write_slices(response, head, body)
            await response.started()
        except BaseException:
            # Also when the waiting task is cancelled: an engine must not work for nobody.
            response.close()
            raise
        return response

    async def _write_slices(self, response: UpstreamResponse, head: bytes, body: bytes) -> None:
        """Write a large body without piling it up in the transport; stop when the answer is there first."""
        assert self._transport is not None
        self._transport.write(head)
        view = memoryview(body)
        for start in range(0, len(body), _SLICE_BYTES):
            if response.status or response.error is not None:
                return
            self._transport.write(view[start : start + _SLICE_BYTES])
            if self._writable is not None:
                await self._writable
        self._sent = True

    def abort(self) -> None:
        """Cut the connection now, whatever is still under way."""
        if self._transport is not None:
            self._transport.abort()
        self._lose("the gateway closed the connection")

    def fail(self, message: str, kind: type[UpstreamError] = UpstreamError) -> None:
        """Cut the connection because the replica misbehaves or is silent."""
        self._lose(message, kind)
        if self._transport is not None:
            self._transport.abort()

    def resume_reading(self) -> None:
        """The buffer has room again."""
        if self._paused:
            self._paused = False
            self.silent_ticks = 0
            if self._transport is not None and not self._closed:
                self._transport.resume_reading()

    def _lose(self, message: str, kind: type[UpstreamError] = UpstreamError) -> None:
        """Conclude the answer under way as broken and leave the pool; only the first call counts."""
        if self._closed:
            return
        self._closed = True
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        response, self._response = self._response, None
        if response is not None:
            response.detach(kind(DispatchFailure.LOST, message))
        self._owner.on_lost(self)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        # A cast, not a check: uvloop's transports do not inherit from asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, by either side."""
        reason = f": {exc}" if exc is not None else ""
        unanswered_s = asyncio.get_running_loop().time() - self._asked_at
        stale = not self._first_use and not self._saw_byte and unanswered_s < _STALE_WINDOW_S
        kind = StaleConnectionError if stale else UpstreamError
        self._lose(f"the replica closed the connection before its answer was complete{reason}", kind)

    def pause_writing(self) -> None:
        """The transport holds enough of the request's body for now."""
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """The transport takes more."""
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Bytes of the answer."""
        response = self._response
        if response is None:
            self.fail("the replica sent bytes that nobody asked for")
            return
        self._saw_byte = True
        self.silent_ticks = 0
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self.fail(f"the replica's answer is not valid HTTP/1.1: {exc}")
        else:
            response.wake()

    # httptools callbacks

    def on_message_begin(self) -> None:
        """An answer begins."""
        if self._response is None:
            # A second answer in one piece with the first: taken as the next request's, it would be someone
            # else's.
            self.fail("the replica sent an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the answer."""
        response = self._response
        if response is not None:
            response.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The answer's head is complete."""
        response = self._response
        if response is None:
            return
        status = self._parser.get_status_code()
        self._informational = 100 <= status < 200
        if self._informational:
            # 100 Continue and 103 Early Hints announce the answer, they are not it.
            response.headers.clear()
            return
        if status < _LOWEST_STATUS:
            self.fail(f"the replica's answer has the status {status:03}, which no answer has")
            return
        if not _states_its_length(status, response):
            self.fail("the replica's answer states no length, so its end could not be told from a cut")
            return
        self._keep_alive = self._parser.should_keep_alive()
        response.status = status

    def on_body(self, body: bytes) -> None:
        """Some of the answer's body, without its chunk framing."""
        response = self._response
        if response is not None and response.push(body) and not self._paused:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """The answer is complete; the connection may serve again."""
        response = self._response
        if response is None or self._informational:
            return
        self.resume_reading()
        self._response = None
        self._first_use = False
        self.silent_ticks = 0
        response.detach()
        if self._keep_alive and self._sent:
            self._owner.on_idle(self)
        else:
            self.abort()


def _states_its_length(status: int, response: UpstreamResponse) -> bool:
    if status in _NO_BODY_STATUSES or response.header(b"content-length"):
        return True
    return b"chunked" in response.header(b"transfer-encoding").lower()
