"""A replica's answer while it arrives: filled by the connection, emptied by the forwarder."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from serve_app.errors import ServeAppError
from serve_app.scheduling.events import DispatchFailure

HeaderList = list[tuple[bytes, bytes]]

# One slow client holds at most about this much of an answer in the gateway.
BUFFER_HIGH_BYTES = 256 * 1024


class UpstreamError(ServeAppError):
    """A replica gave no complete answer; `failure` says how far it got."""

    def __init__(self, failure: DispatchFailure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class EngineSilentError(UpstreamError):
    """A replica sent nothing for too long. It may be at work still, so the request is not tried again."""


class StaleConnectionError(UpstreamError):
    """A kept connection was closed by the replica before it answered anything."""


class Source(Protocol):
    """The connection, as an answer sees it."""

    def resume_reading(self) -> None:
        """There is room for more."""
        ...

    def abort(self) -> None:
        """The rest is not wanted."""
        ...


class UpstreamResponse:
    """A replica's answer while it arrives. Read with `next` or `read`, and always `close`.

    Attributes:
        on_pieces: called when pieces have come and the answer is not at its end; `take` gives them.
    """

    __slots__ = (
        "_buffered_bytes",
        "_connection",
        "_pieces",
        "_waiter",
        "complete",
        "error",
        "headers",
        "on_pieces",
        "status",
    )

    def __init__(self, connection: Source) -> None:
        self.status = 0
        self.headers: HeaderList = []
        self.complete = False
        self.error: UpstreamError | None = None
        self.on_pieces: Callable[[], None] | None = None
        self._connection: Source | None = connection
        self._pieces: list[bytes] = []
        self._buffered_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def at_end(self) -> bool:
        """The body is complete and has been taken."""
        return self.complete and not self._pieces

    def header(self, name: bytes) -> bytes:
        """The value of a header (lower-case name); empty when it is absent."""
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
            await self.waiter()

    async def next(self) -> bytes:
        """All body bytes that have come since the last call; waits for some, empty only at the end.

        Raises:
            UpstreamError: the connection broke before the body was complete.
        """
        while not self._pieces:
            if self.complete:
                return b""
            if self.error is not None:
                raise self.error
            await self.waiter()
        return self.take()

    def take(self) -> bytes:
        """All body bytes that have come since the last call, without waiting for any."""
        pieces, self._pieces = self._pieces, []
        self._buffered_bytes = 0
        if self._connection is not None:
            self._connection.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read(self) -> bytes:
        """The whole body, however long: it comes from an engine of our own, after its work is done.

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
        """Give the connection up; cuts it when the answer is not complete, so that the engine stops."""
        if self._connection is not None:
            self._connection.abort()

    def waiter(self) -> "asyncio.Future[None]":
        """Done when there is something new; with `on_pieces`, at the end alone."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    # Called by the connection.

    def push(self, piece: bytes) -> bool:
        """Add body bytes; True when the buffer is full and reading must pause."""
        self._pieces.append(piece)
        self._buffered_bytes += len(piece)
        return self._buffered_bytes >= BUFFER_HIGH_BYTES

    def detach(self, error: UpstreamError | None = None) -> None:
        """Nothing more will come: the answer is complete, or broken by `error`."""
        self._connection = None
        if error is None:
            self.complete = True
        elif self.error is None:
            self.error = error
        self.wake()

    def wake(self) -> None:
        """Let the reader look again."""
        if self.on_pieces is not None and not self.complete and self.error is None:
            if self._pieces:
                self.on_pieces()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
