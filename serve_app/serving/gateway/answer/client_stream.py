"""The way of an answer to its client, whoever wrote it, with a time limit on every send.

A server's `send` waits while the client does not read. Such a wait has no end of its own: the engine may have
finished long ago, so no connection to it would notice. One timer looks at all requests of a gateway; a send
itself costs two assignments.

The pieces of a stream are passed on without waiting. Where the server is ours (`front`) that is one write;
with another, a task sends each piece, and until it is done there is no room for the next.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from serve_app.engines.engine import Message, Scope, Send
from serve_app.serving.gateway.answer.disconnect import ClientGone, WatchedExchange

# Under which ASGI's `scope["extensions"]` have a `DirectExchange`.
EXTENSION = "ewsjf.exchange"
_REQUEST_ID = b"x-request-id"


class DirectExchange(WatchedExchange, Protocol):
    """A server's own side of a request, where the gateway can do without ASGI's coroutines.

    Attributes:
        on_room: called when the client has read, after `pass_on` has told of no room.
        peer_is_client: who has connected is the client itself, and no front end.
    """

    on_room: Callable[[], None] | None
    peer_is_client: bool

    def pass_on(self, piece: bytes) -> bool:
        """Write a piece of an answer that has begun; whether there is room for more."""
        ...


def exchange_of(scope: Scope) -> DirectExchange | None:
    """The server's side of a request; None for a server of others."""
    extensions = scope.get("extensions")
    found: DirectExchange | None = extensions.get(EXTENSION) if extensions else None
    return found


class ClientStream:
    """An ASGI `send` that gives up after a while, and passes pieces on; made by `StallWatch.watching`.

    Raises:
        ClientGone: the client has read nothing for the time of the watch.

    Attributes:
        on_room: called when there is room again, after `pass_on` has told of none.
        request_id: the client's name of its request, which every answer tells; empty while it is not known.
        status: of the answer, once it has begun; 0 before.
    """

    __slots__ = (
        "_exchange",
        "_failure",
        "_piece",
        "_send",
        "_task",
        "_watch",
        "on_room",
        "request_id",
        "since",
        "status",
    )

    def __init__(self, send: Send, watch: "StallWatch", exchange: DirectExchange | None) -> None:
        self._send = send
        self._watch = watch
        self._exchange = exchange
        self._task: asyncio.Task[object] | None = None
        self._piece: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self.on_room: Callable[[], None] | None = None
        self.request_id = b""
        self.status = 0
        # When the client stopped reading, or the send that is under way began, in ticks of the watch.
        self.since: int | None = None

    async def __call__(self, message: Message) -> None:
        """Send one message."""
        if self._failure is not None:
            # A comment that was sent beside the request was the one that nobody read.
            raise self._failure
        if message["type"] == "http.response.start":
            self.status, headers = message["status"], message["headers"]
            if self.request_id and all(name != _REQUEST_ID for name, _ in headers):
                message["headers"] = [*headers, (_REQUEST_ID, self.request_id)]
        self._task, self.since = asyncio.current_task(), self._watch.ticks
        try:
            if self._piece is not None:
                await self._piece
            await self._send(message)
        except asyncio.CancelledError:
            self._cancelled()
            raise
        finally:
            self.since = None

    def pass_on(self, piece: bytes) -> bool:
        """Send a piece of an answer that has begun, without waiting; whether there is room for more.

        Only between the begin and the end of `passing`.
        """
        if self._exchange is not None:
            has_room = self._exchange.pass_on(piece)
            if not has_room and self.since is None:
                self.since = self._watch.ticks
                self._exchange.on_room = self._has_room
            return has_room
        if self._failure is not None:
            return False
        self.since = self._watch.ticks
        self._piece = asyncio.get_running_loop().create_task(self._send_piece(piece))
        return False

    async def passing(self, ended: Callable[[], "asyncio.Future[None] | None"]) -> None:
        """Wait while pieces are passed on by others.

        Args:
            ended: what to wait for next; None when all has been passed on.

        Raises:
            ClientGone: the client does not read.
            OSError: as a server's `send` does for a client that has gone.
        """
        if self._failure is not None:
            raise self._failure
        self._task = asyncio.current_task()
        try:
            while (waiter := ended()) is not None:
                await waiter
        except asyncio.CancelledError:
            self._cancelled()
            raise
        finally:
            self.since = self.on_room = None

    def give_up(self) -> None:
        """End the send that is under way."""
        self._fail(ClientGone(f"the client has read nothing for {self._watch.timeout_s} s"))

    async def _send_piece(self, piece: bytes) -> None:
        try:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:  # noqa: BLE001 - whoever passes pieces on hears of it
            self._fail(error)
        else:
            self._piece = None
            self._has_room()

    def _has_room(self) -> None:
        self.since = None
        if self.on_room is not None:
            self.on_room()

    def _fail(self, failure: Exception) -> None:
        if self._failure is None and self._task is not None:
            self._failure = failure
            self._task.cancel()

    def _cancelled(self) -> None:
        """In a task that was cancelled: tell why, if it was because of this client."""
        if self._piece is not None:
            self._piece.cancel()
        if self._failure is not None and self._task is not None and self._task.uncancel() == 0:
            raise self._failure from None


class StallWatch:
    """Watches the sends of all requests of one gateway.

    Attributes:
        timeout_s: how long one send may take; kept to within about a third.
        ticks: of the watch's timer, which runs while there is anything to watch.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.ticks = 0
        self._tick_s = min(1.0, timeout_s / 3)
        self._watched: set[ClientStream] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watching(self, send: Send, exchange: DirectExchange | None = None) -> ClientStream:
        """Watch a request's sends from now on, until `done`."""
        stream = ClientStream(send, self, exchange)
        self._watched.add(stream)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        return stream

    def done(self, stream: ClientStream) -> None:
        """The request is over."""
        self._watched.discard(stream)

    def _tick(self) -> None:
        self.ticks += 1
        for stream in tuple(self._watched):
            if stream.since is not None and (self.ticks - stream.since) * self._tick_s > self.timeout_s:
                stream.give_up()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._tick_s, self._tick) if self._watched else None
