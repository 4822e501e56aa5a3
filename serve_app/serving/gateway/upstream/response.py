"""Responses of replicas while they arrive, and the errors of those that do not complete."""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING

from serve_app.core.events import DispatchFailure
from serve_app.errors import ServeAppError

if TYPE_CHECKING:
    from serve_app.serving.gateway.upstream.connection import UpstreamConnection

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
