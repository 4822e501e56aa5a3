"""The little of HTTP that the emulated engine needs on top of ASGI."""

import uuid
from dataclasses import dataclass

from serve_app.engines.engine import Receive, Scope, Send

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request whose body has been read."""

    scope: Scope
    body: bytes
    receive: Receive
    send: Send

    def request_id(self, prefix: str) -> str:
        """The client's `x-request-id`, or a new one, with the prefix of the answer's kind."""
        for name, value in self.scope["headers"]:
            if name == b"x-request-id":
                return f"{prefix}-{value.decode('latin-1')}"
        return f"{prefix}-{uuid.uuid4().hex}"

    async def answer(self, status: int, body: bytes, content_type: bytes = JSON) -> None:
        """Send a whole response."""
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def begin_events(self) -> None:
        """Begin a stream of server-sent events."""
        headers = [(b"content-type", EVENTS), (b"cache-control", b"no-cache")]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send_events(self, body: bytes, *, more: bool) -> None:
        """Send the next events of a stream; `more` is False for the last."""
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    async def wait_for_disconnect(self) -> None:
        """Return when the client has gone, or the response has ended."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


async def serve_lifespan(receive: Receive, send: Send) -> None:
    """Agree to start and to stop: the engine's life is managed by its owner."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})
            return
