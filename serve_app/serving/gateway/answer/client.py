"""The client's side of a request: passes the response on, and detects clients that disconnect.

The gateway's server (`serving.http_server`) provides an `Exchange` with callbacks, so that a piece of a
stream is one write. A batch provides another one for its requests (`batches.calls`).

A server's `send` waits while the client does not read. The server disconnects a client that reads nothing for
too long, so no send waits forever.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from serve_app.engines.engine import Message, Send
from serve_app.errors import ServeAppError

_REQUEST_ID = b"x-request-id"


class ClientGone(ServeAppError):  # noqa: N818 - a client's choice, not an error
    """The client disconnected, or was disconnected because it stopped reading."""


class ClientExchange(Protocol):
    """A server's side of a request.

    Attributes:
        more_body: part of the request's body has not arrived.
        disconnected: the client has disconnected.
        on_disconnect: called on a disconnect before the response is complete.
        on_writable: called when more can be written after `write_chunk` returned False.
    """

    more_body: bool
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
    """An ASGI `send` that repeats the client's request id and records the status.

    Attributes:
        exchange: the server's side of the request.
        request_id: the client's request id, which every response repeats; empty until known.
        status: HTTP status once the response has begun; 0 before.
    """

    __slots__ = ("_send", "exchange", "request_id", "status")

    def __init__(self, send: Send, exchange: ClientExchange) -> None:
        self.exchange = exchange
        self.request_id = b""
        self.status = 0
        self._send = send

    async def __call__(self, message: Message) -> None:
        """Send one message."""
        if message["type"] == "http.response.start":
            self.status, headers = message["status"], message["headers"]
            if self.request_id and _REQUEST_ID not in dict(headers):
                message["headers"] = [*headers, (_REQUEST_ID, self.request_id)]
        await self._send(message)
