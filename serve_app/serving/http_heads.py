"""Limits on request heads, in length and time, which uvicorn does not have.

httptools keeps the line that it is reading, however long, and uvicorn keeps every header, so one connection
could fill a process with a head that does not end. Nor does uvicorn ever close a connection on which no
complete head has come. `LimitedHeads` closes both. Bodies are the application's to limit.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http import auto, httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Gateways send a replica some hundred bytes, and HAProxy passes a gateway 16 KiB at most.
MAX_HEAD_BYTES = 64 * 1024
# From the connection's beginning, or from the first byte of a later head. Idle connections between requests
# have uvicorn's own limit.
HEAD_TIMEOUT_S = 30.0


class LimitedHeads(HttpToolsProtocol):
    """uvicorn's side of one connection, with limits on the request's head."""

    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        # Bytes of the head that is being received; -1 while none is.
        self._head_bytes = -1
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """A connection has been opened; a request is expected."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """A connection is over."""
        self._expect_no_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        was_open = self._head_bytes >= 0
        super().data_received(data)
        if self._head_bytes < 0:
            return
        if self._head_timer is None:
            # Most heads come in one piece, and need no timer.
            self._expect_head()
        # The piece with which a head begins may begin with the body before it, so it counts for nothing. It
        # is a quarter of a mebibyte at most.
        if was_open:
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's head is longer than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the head. Those after a body (trailers) are dropped: no app of ours reads them."""
        if self._head_bytes >= 0:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A head is complete."""
        self.head_is_complete()
        super().on_headers_complete()

    @property
    def head_has_begun(self) -> bool:
        """Whether a head is being received."""
        return self._head_bytes >= 0

    def head_is_complete(self) -> None:
        """Limit it no more."""
        self._head_bytes = -1
        self._expect_no_head()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _expect_no_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def serve_connections_with(protocol: Callable[..., LimitedHeads]) -> None:
    """Have uvicorn servers that this process starts from now on use a protocol, Ray Serve's included."""
    auto.AutoHTTPProtocol = protocol  # type: ignore[assignment]
    httptools_impl.HttpToolsProtocol = protocol  # type: ignore[assignment, misc]
