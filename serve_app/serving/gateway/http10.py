"""Answers to HTTP/1.0 clients, which do not know chunks.

uvicorn writes an answer without a content-length in chunks, whatever the client's version (RFC 9112, 6.1,
forbids it for 1.0). Such an answer, a stream, ends with its connection instead. Some clients only call
themselves 1.0: nginx does by default when it forwards, so holding a stream back until its length is known
would take the stream from everyone behind it.
"""

from typing import Any

from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from serve_app.engines.engine import Message

_LENGTH = b"content-length"


class CloseDelimitedCycle(RequestResponseCycle):
    """uvicorn's side of one request of an HTTP/1.0 client; uvicorn itself closes the connection after it."""

    _is_unbounded = False

    async def send(self, message: Message) -> None:  # type: ignore[override]  # uvicorn's union of messages
        """Write a part of the answer."""
        if message["type"] == "http.response.start":
            self._is_unbounded = all(name.lower() != _LENGTH for name, _ in message.get("headers", ()))
            if self._is_unbounded:
                self.chunked_encoding = False
        elif self._is_unbounded:
            # uvicorn compares the two, and nothing was stated.
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)  # type: ignore[arg-type]


def answer_http10_without_chunks() -> None:
    """Let the uvicorn servers of this process, present and future ones, do so; others cost nothing more."""
    httptools_impl.RequestResponseCycle = _cycle  # type: ignore[assignment, misc]


def _cycle(**arguments: Any) -> RequestResponseCycle:
    is_old = arguments["scope"]["http_version"] == "1.0"
    return (CloseDelimitedCycle if is_old else RequestResponseCycle)(**arguments)
