"""The client's side of a request, and the detection of clients that disconnect.

The gateway's server (`serving.http_server`) provides an `Exchange`. A batch provides another one for its
requests (`batches.calls`).

A server's `send` waits while the client does not read. The server disconnects a client that reads nothing for
too long, so no send waits forever.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Protocol, Self

from serve_app.engines.engine import Message
from serve_app.errors import ServeAppError
from serve_app.serving.gateway.upstream.response import HeaderList


class ClientGone(ServeAppError):  # noqa: N818 - a client's choice, not an error
    """The client disconnected, or was disconnected because it stopped reading."""


class ClientExchange(Protocol):
    """A server's side of a request; the meaning of all members is that of `http_server.Exchange`."""

    method: str
    path: str
    query: bytes
    headers: HeaderList
    caller: object | None
    more_body: bool
    disconnected: bool
    status: int
    response_complete: bool
    added_headers: HeaderList
    on_disconnect: Callable[[], None] | None
    on_writable: Callable[[], None] | None

    @property
    def client(self) -> tuple[str, int] | None:
        """Address of the client; None if it has none."""
        ...

    @property
    def is_choked(self) -> bool:
        """True while the client does not read what was written."""
        ...

    def run(self, work: Coroutine[None, None, None]) -> object:
        """Serve the request in a task."""
        ...

    def fail(self) -> None:
        """Respond with an internal error or, if the response has started, close the connection."""
        ...

    def take_body(self) -> bytes:
        """Return the whole body, if `more_body` is False."""
        ...

    async def receive(self) -> Message:
        """Return the next piece of the body, or the disconnect."""
        ...

    async def send(self, message: Message) -> None:
        """Write a part of the response once the client has read the parts before."""
        ...

    def start_response(self, status: int, headers: Iterable[tuple[bytes, bytes]], lines: bytes = b"") -> None:
        """Start the response."""
        ...

    def write_chunk(self, piece: bytes, *, ends: bool = False) -> bool:
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
