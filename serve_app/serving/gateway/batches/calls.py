"""Requests of batches enter the gateway as those of clients do, but from within its process."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from serve_app.engines.engine import ASGIApp, Message, Scope
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.request.incoming import CALLER
from serve_app.serving.http_server import EXCHANGE


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a request, with header names in lower case."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    def header(self, name: bytes) -> float | None:
        """Return a header that is a number; None if it is missing or is none."""
        try:
            return float(self.headers[name])
        except (KeyError, ValueError):
            return None


ServeRequest = Callable[[str, bytes, Mapping[bytes, bytes], Caller], Awaitable[Answer]]
"""Serves a request: path, body, headers, caller."""


@dataclass(slots=True)
class CollectingExchange:
    """A `ClientExchange` of a request that has no connection; it collects the pieces of the answer."""

    more_body: bool = False
    disconnected: bool = False
    on_disconnect: Callable[[], None] | None = None
    on_writable: Callable[[], None] | None = None
    pieces: list[bytes] = field(default_factory=list)

    def write_chunk(self, piece: bytes) -> bool:
        """Collect a piece; there is always room for more."""
        self.pieces.append(piece)
        return True


async def call(
    app: ASGIApp, path: str, body: bytes, headers: Mapping[bytes, bytes], caller: Caller
) -> Answer:
    """Serve a POST request. Cancelling the task cancels the request, as a client that disconnects does."""
    exchange = CollectingExchange()
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    start: Message = {"status": 500, "headers": []}

    async def receive() -> Message:
        if messages:
            return messages.pop()
        # Without a connection, no disconnect is ever received.
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def send(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            start = message
        else:
            exchange.pieces.append(message.get("body", b""))

    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-type", b"application/json"), *headers.items()],
        "client": None,
        "extensions": {EXCHANGE: exchange, CALLER: caller},
    }
    await app(scope, receive, send)
    return Answer(start["status"], dict(start["headers"]), b"".join(exchange.pieces))
