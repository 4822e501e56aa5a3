"""The watch for what ends a request early: its client leaves, or the application stops.

ASGI tells of a client's end only to whoever waits in `receive`. The watch waits there beside the task that
serves the request; a server of ours calls it instead. It cancels that task when the client goes, and leaving
the watch turns that cancellation into `ClientGone`, or into another error that was given. A cancellation that
came from elsewhere stays as it is. `asyncio.timeout` works the same way.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from serve_app.engines.engine import Message, Receive
from serve_app.errors import ServeAppError


class ClientGone(ServeAppError):  # noqa: N818 - an end that clients choose, not an error
    """The client closed its connection, or reads no more."""


class WatchedExchange(Protocol):
    """A server's own side of a request.

    Attributes:
        disconnected: the client has gone.
        on_gone: called when the client goes before its answer is complete.
    """

    disconnected: bool
    on_gone: Callable[[], None] | None


class DisconnectWatch:
    """A context manager around the serving of one request, to be entered once its body has been read.

    Raises:
        ClientGone: on leaving, when the client has gone meanwhile.
    """

    __slots__ = ("_error", "_exchange", "_receive", "_served", "_stopped", "_waiting")

    def __init__(self, receive: Receive, exchange: WatchedExchange | None = None) -> None:
        self._receive = receive
        self._exchange = exchange
        self._error: ServeAppError | None = None
        self._stopped = False
        self._served: asyncio.Task[object] | None = None
        self._waiting: asyncio.Task[Message] | None = None

    def __enter__(self) -> Self:
        self._served = asyncio.current_task()
        if self._exchange is None:
            self._wait()
        elif self._exchange.disconnected:
            self.fire()
        else:
            self._exchange.on_gone = self.fire
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        if self._exchange is not None:
            self._exchange.on_gone = None
        if self._waiting is not None:
            self._waiting.cancel()
        if self._error is None:
            return
        assert self._served is not None
        if self._served.uncancel() == 0 and kind is asyncio.CancelledError:
            raise self._error from None

    def fire(self, error: ServeAppError | None = None) -> None:
        """End the serving of the request with an error; without one, as if the client had gone."""
        if self._error is not None or self._stopped:
            return
        self._error = error or ClientGone("the client closed its connection")
        assert self._served is not None
        self._served.cancel()

    def _wait(self) -> None:
        # An ASGI app's `receive` is a coroutine function; the task is the price of hearing of a disconnect.
        self._waiting = asyncio.ensure_future(self._receive())
        self._waiting.add_done_callback(self._received)

    def _received(self, waiting: asyncio.Task[Message]) -> None:
        if waiting.cancelled():
            return
        failed = waiting.exception() is not None
        if self._stopped:
            return
        if failed or waiting.result()["type"] == "http.disconnect":
            self.fire()
        else:
            # Some servers repeat an empty end of the body.
            self._wait()
