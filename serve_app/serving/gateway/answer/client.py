"""The client's side of a request: passes the response on, and notices clients that leave or stop reading.

Where the gateway's own server (`serving.http_server`) serves the request, its `Exchange` calls back, and a
piece of a stream is one write. Any other ASGI server, such as Ray Serve's proxy, gets the same through
`AsgiExchange`.

A server's `send` waits while the client does not read. That wait has no limit of its own: the engine may have
finished long ago, so no upstream connection would notice. One timer checks all requests of a gateway; a send
costs two assignments.
"""

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from serve_app.engines.engine import Message, Receive, Scope, Send
from serve_app.errors import ServeAppError
from serve_app.serving.http_server import EXCHANGE

_REQUEST_ID = b"x-request-id"


class ClientGone(ServeAppError):  # noqa: N818 - an end that clients choose, not an error
    """The client closed its connection, or reads no more."""


class ClientExchange(Protocol):
    """A server's side of a request.

    Attributes:
        disconnected: the client is gone.
        on_gone: called when the client disconnects before its response is complete.
        on_room: called when the client has read after `pass_on` returned False.
    """

    disconnected: bool
    on_gone: Callable[[], None] | None
    on_room: Callable[[], None] | None

    def pass_on(self, piece: bytes) -> bool:
        """Write a piece of a response that has begun; return whether there is room for more."""
        ...


class AsgiExchange:
    """A `ClientExchange` on any ASGI server, with tasks that wait instead of callbacks."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self.disconnected = False
        self.on_room: Callable[[], None] | None = None
        self._on_gone: Callable[[], None] | None = None
        self._receive = receive
        self._send = send
        self._receiving: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None

    @property
    def on_gone(self) -> Callable[[], None] | None:
        """See `ClientExchange`. Setting it waits in `receive`, where ASGI reports a disconnect."""
        return self._on_gone

    @on_gone.setter
    def on_gone(self, callback: Callable[[], None] | None) -> None:
        self._on_gone = callback
        if callback is not None and self._receiving is None:
            self._receiving = asyncio.create_task(self._until_gone())
        elif callback is None and self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    async def send(self, message: Message) -> None:
        """Send a message after the piece that is being sent."""
        if self._sending is not None:
            await self._sending
        await self._send(message)

    def pass_on(self, piece: bytes) -> bool:
        """Send a piece in a task. There is no room for the next until it is done."""
        self._sending = asyncio.create_task(self._send_piece(piece))
        return False

    async def _send_piece(self, piece: bytes) -> None:
        try:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        except OSError:
            # Some servers report an absent client in this way.
            self._gone()
        else:
            if self.on_room is not None:
                self.on_room()

    async def _until_gone(self) -> None:
        with contextlib.suppress(Exception):
            # Some servers repeat an empty end of the body.
            while (await self._receive())["type"] != "http.disconnect":
                pass
        self._gone()

    def _gone(self) -> None:
        self.disconnected = True
        if self._on_gone is not None:
            self._on_gone()


def exchange_of(scope: Scope) -> ClientExchange | None:
    """Return the exchange of the gateway's own server, None for another server."""
    extensions = scope.get("extensions")
    found: ClientExchange | None = extensions.get(EXCHANGE) if extensions else None
    return found


class DisconnectWatch:
    """A context manager around the serving of one request, entered once its body has been read.

    It cancels the serving task when the client disconnects, and turns that cancellation into `ClientGone`, or
    into the error that was given. A cancellation from elsewhere stays as it is. `asyncio.timeout` works the
    same way.

    Raises:
        ClientGone: on leaving, when the client disconnected inside.
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
            self._exchange.on_gone = self.fire
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        self._exchange.on_gone = None
        if self._error is None:
            return
        assert self._served is not None
        if self._served.uncancel() == 0 and kind is asyncio.CancelledError:
            raise self._error from None

    def fire(self, error: ServeAppError | None = None) -> None:
        """End the serving of the request with an error; without one, as if the client had disconnected."""
        if self._error is not None or self._stopped:
            return
        self._error = error or ClientGone("the client closed its connection")
        assert self._served is not None
        self._served.cancel()


class ClientStream:
    """An ASGI `send` with a time limit, which also passes pieces on; made by `StallWatch.watching`.

    Raises:
        ClientGone: the client has read nothing for the time of the watch.

    Attributes:
        exchange: the server's side of the request.
        on_room: called when there is room again, after `pass_on` returned False.
        request_id: the client's name of its request, which every response repeats; empty while it is not
            known.
        status: of the response, once it has begun; 0 before.
        since: when the client stopped reading, or the current send began, in ticks of the watch.
    """

    __slots__ = (
        "_failure",
        "_send",
        "_task",
        "_watch",
        "exchange",
        "on_room",
        "request_id",
        "since",
        "status",
    )

    def __init__(self, send: Send, watch: "StallWatch", exchange: ClientExchange) -> None:
        self.exchange = exchange
        self.on_room: Callable[[], None] | None = None
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
            # A comment that was sent beside the request was the one that the client did not read.
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

    def pass_on(self, piece: bytes) -> bool:
        """Send a piece of a response that has begun, without waiting; return whether there is room for more.

        Only between the begin and the end of `passing`.
        """
        if self._failure is not None:
            return False
        has_room = self.exchange.pass_on(piece)
        if not has_room and self.since is None:
            self.since = self._watch.ticks
            self.exchange.on_room = self._has_room
        return has_room

    async def passing(self, ended: Callable[[], "asyncio.Future[None] | None"]) -> None:
        """Wait while pieces are passed on by callbacks.

        Args:
            ended: returns what to wait for next; None when all has been passed on.

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
            self.since = self.on_room = None

    def give_up(self) -> None:
        """End the current send."""
        if self._failure is None and self._task is not None:
            self._failure = ClientGone(f"the client has read nothing for {self._watch.timeout_s} s")
            self._task.cancel()

    def _has_room(self) -> None:
        self.since = None
        if self.on_room is not None:
            self.on_room()

    def _raise_failure(self) -> None:
        """In a cancelled task: raise the reason, if it was this client."""
        if self._failure is not None and self._task is not None and self._task.uncancel() == 0:
            raise self._failure from None


class StallWatch:
    """Watches the sends of all requests of one gateway.

    Attributes:
        timeout_s: how long one send may take; enforced to within about a third.
        ticks: of the watch's timer, which runs while there is anything to watch.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.ticks = 0
        self._tick_s = min(1.0, timeout_s / 3)
        self._watched: set[ClientStream] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watching(self, scope: Scope, receive: Receive, send: Send) -> ClientStream:
        """Watch a request's sends from now on, until `done`."""
        exchange = exchange_of(scope)
        if exchange is None:
            plain = AsgiExchange(receive, send)
            exchange, send = plain, plain.send
        stream = ClientStream(send, self, exchange)
        self._watched.add(stream)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        return stream

    def done(self, stream: ClientStream) -> None:
        """Watch a request no more."""
        self._watched.discard(stream)

    def _tick(self) -> None:
        self.ticks += 1
        for stream in tuple(self._watched):
            if stream.since is not None and (self.ticks - stream.since) * self._tick_s > self.timeout_s:
                stream.give_up()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._tick_s, self._tick) if self._watched else None
