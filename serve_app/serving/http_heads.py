"""A limit on the length of request heads, which uvicorn's parser does not have.

httptools keeps the line that it is reading, however long, and uvicorn keeps every header, so one connection
could fill a process with a head that does not end. `LimitedHeads` closes a connection whose head is longer.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Gateways send a replica some hundred bytes, and HAProxy passes a gateway 16 KiB at most.
MAX_HEAD_BYTES = 64 * 1024


class LimitedHeads(HttpToolsProtocol):
    """uvicorn's side of one connection, with a limit on the request's head."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        # Bytes of the head that is being received; -1 while none is.
        self._head_bytes = -1

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        was_open = self._head_bytes >= 0
        super().data_received(data)
        if self._head_bytes < 0:
            return
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
        self._head_bytes = -1
        super().on_headers_complete()
