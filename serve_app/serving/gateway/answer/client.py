"""The client's side of a request: passes the response on, and detects clients that disconnect or stall.

The gateway's server (`serving.http_server`) provides an `Exchange` with callbacks, so that a piece of a
stream is one write. A batch provides another one for its requests (`batches.calls`).

A server's `send` waits without limit while the client does not read. The upstream connection would not notice
either, because the engine may have finished long ago. So one timer checks all requests of a gateway; a send
costs two assignments.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from serve_app.engines.engine import Message, Scope, Send
from serve_app.errors import ServeAppError
from serve_app.serving.http_server import EXCHANGE

_REQUEST_ID = b"x-request-id"


class ClientGone(ServeAppError):  # noqa: N818 - a client's choice, not an error
    """The client disconnected or stopped reading."""


class ClientExchange(Protocol):
    """A server's side of a request.

    Attributes:
        disconnected: the client has disconnected.
        on_disconnect: called on a disconnect before the response is complete.
        on_writable: called when more can be written after `write_chunk` returned False.
    """

    disconnected: bool
    on_disconnect: Callable[[], None] | None
    on_writable: Callable[[], None] | None

    def write_chunk(self, piece: bytes) -> bool:
        """Write a piece of a response that has begun; return whether there is room for more."""
        ...


class DisconnectWatch:
    """Context manager that ends the serving of a request on a disconnect; enter it once the body was read.

    It cancels the serving task, and converts that cancellation to `ClientGone` or to the given error, as
    `asyncio.timeout` does. Other cancellations pass through.

    Raises:
        ClientGone: on exit, if the client disconnected inside.
    """

    __slots__ = ("_error", "_exchange", "_served", "_stopped")

    def __init__(self, exchange: ClientExchange) -> None:
        self._exchange = exchange
        self._error: ServeAppError | None = None
        self._stopped = False
        self._served: asyncio.Task[object] | None = None

    def __enter__(self) -> Self:
        self._served = asyncio.current_task()
        if self._exchange.disconnected:
            self.fire()
        else:
            self._exchange.on_disconnect = self.fire
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        self._exchange.on_disconnect = None
        if self._error is None:
            return
        assert self._served is not None
        if self._served.uncancel() == 0 and kind is asyncio.CancelledError:
            raise self._error from None

    def fire(self, error: ServeAppError | None = None) -> None:
        """End the serving of the request with `error`, or as a disconnect without one."""
        if self._error is not None or self._stopped:
            return
        self._error = error or ClientGone("the client closed its connection")
        assert self._served is not None
        self._served.cancel()


class ClientStream:
    """An ASGI `send` with a time limit, which also passes on pieces; created by `StallWatch.watching`.

    Raises:
        ClientGone: the client has read nothing within the watch's time limit.

    Attributes:
        exchange: the server's side of the request.
        on_writable: called when there is room again, after `write_chunk` returned False.
        request_id: the client's request id, which every response repeats; empty until known.
        status: HTTP status once the response has begun; 0 before.
        since: tick of the watch at which the client stopped reading or the current send began.
    """

    __slots__ = (
        "_failure",
        "_send",
        "_task",
        "_watch",
        "exchange",
        "on_writable",
        "request_id",
        "since",
        "status",
    )

    def __init__(self, send: Send, watch: "StallWatch", exchange: ClientExchange) -> None:
        self.exchange = exchange
        self.on_writable: Callable[[], None] | None = None
        self.request_id = b""
        self.status = 0
        self.since: int | None = None
        self._send = send
        self._watch = watch
        self._task: asyncio.Task[object] | None = None
        self._failure: Exception | None = None

    async def __call__(self, message: Message) -> None:
        """Send one message."""
        if self._failure is not None:
            # A concurrent comment was the write that timed out.
            raise self._failure
        if message["type"] == "http.response.start":
            self.status, headers = message["status"], message["headers"]
            if self.request_id and all(name != _REQUEST_ID for name, _ in headers):
                message["headers"] = [*headers, (_REQUEST_ID, self.request_id)]
        self._task, self.since = asyncio.current_task(), self._watch.ticks
        try:
            await self._send(message)
        except asyncio.CancelledError:
            self._raise_failure()
            raise
        finally:
            self.since = None

    def write_chunk(self, piece: bytes) -> bool:
        """Send a piece of a response that has begun, without waiting; return whether there is room for more.

        Allowed only while `passing` runs.
        """
        if self._failure is not None:
            return False
        has_room = self.exchange.write_chunk(piece)
        if not has_room and self.since is None:
            self.since = self._watch.ticks
            self.exchange.on_writable = self._has_room
        return has_room

    async def passing(self, ended: Callable[[], "asyncio.Future[None] | None"]) -> None:
        """Wait while callbacks pass on pieces.

        Args:
            ended: returns the next future to wait for; None when all pieces were passed on.

        Raises:
            ClientGone: the client does not read.
        """
        if self._failure is not None:
            raise self._failure
        self._task = asyncio.current_task()
        try:
            while (waiter := ended()) is not None:
                await waiter
        except asyncio.CancelledError:
            self._raise_failure()
            raise
        finally:
            self.since = self.on_writable = None

    def fail_send(self) -> None:
        """Fail the current `send`, because the client does not read."""
        if self._failure is None and self._task is not None:
            self._failure = ClientGone(f"the client has read nothing for {self._watch.timeout_s} s")
            self._task.cancel()

    def _has_room(self) -> None:
        self.since = None
        if self.on_writable is not None:
            self.on_writable()

    def _raise_failure(self) -> None:
        """Raise the failure as the reason of a cancellation, if this stream caused it."""
        if self._failure is not None and self._task is not None and self._task.uncancel() == 0:
            raise self._failure from None


class StallWatch:
    """Timer that limits the sends of all requests of one gateway; `timeout_s` is exact to about a third."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.ticks = 0
        self._tick_s = min(1.0, timeout_s / 3)
        self._watched: set[ClientStream] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watching(self, scope: Scope, send: Send) -> ClientStream:
        """Return a stream whose sends are watched until `done`."""
        stream = ClientStream(send, self, scope["extensions"][EXCHANGE])
        self._watched.add(stream)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        return stream

    def done(self, stream: ClientStream) -> None:
        """Stop watching a request."""
        self._watched.discard(stream)

    def _tick(self) -> None:
        self.ticks += 1
        for stream in tuple(self._watched):
            if stream.since is not None and (self.ticks - stream.since) * self._tick_s > self.timeout_s:
                stream.fail_send()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._tick_s, self._tick) if self._watched else None
