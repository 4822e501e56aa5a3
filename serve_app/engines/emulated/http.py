"""One HTTP request to the emulated engine, with its answer or its stream of events."""

import uuid
from dataclasses import dataclass

from serve_app.engines.engine import Receive, Scope, Send

_EVENTS = b"text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request whose body has been read."""

    scope: Scope
    body: bytes
    receive: Receive
    send: Send

    def request_id(self, prefix: str) -> str:
        """The client's `x-request-id`, or a new id, after the prefix of the answer's kind."""
        for name, value in self.scope["headers"]:
            if name == b"x-request-id":
                return f"{prefix}-{value.decode('latin-1')}"
        return f"{prefix}-{uuid.uuid4().hex}"

    async def begin_events(self) -> None:
        """Begin a stream of server-sent events."""
        headers = [(b"content-type", _EVENTS), (b"cache-control", b"no-cache")]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send_events(self, body: bytes, *, more: bool) -> None:
        """Send the next events of a stream; `more` is False for the last."""
        await self.send({"type": "http.response.body", "body": body, "more_body": more})
