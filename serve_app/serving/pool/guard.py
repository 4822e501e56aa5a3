"""Who may talk to a replica's engine, and when.

The guard stands before the engine's ASGI app on the replica's own port. It asks every caller for the
replica's token, counts what it lets through, and turns new work away once the replica drains. It reads no
body and touches no byte of an
answer: on the data path it costs one dictionary look-up and one comparison per request.

- `received` counts accepted generation requests (POST under `/v1/`), the requests that the scheduler
  dispatches; a report that carries it tells the scheduler which of its dispatches the report has seen.
- `open_requests` counts every request between its first line and its last byte; a draining replica may stop
  when it is zero.
"""

import asyncio
import hmac

from serve_app.engines.engine import ASGIApp, Message, Receive, Scope, Send

TOKEN_HEADER = b"x-replica-token"
# A gateway that sees this header on a 503 puts the request back to the front of its queue at once: the engine
# has not seen it.
DRAINING_HEADER = b"x-replica-draining"


class ReplicaGuard:
    """An ASGI app that admits, counts and passes on to the engine's own app.

    Args:
        app: the engine's ASGI app.
        token: secret that every caller sends in `x-replica-token`; gateways learn it with each grant.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        if not token:
            raise ValueError(
                "token must not be empty: an open replica port would let callers pass the scheduler by"
            )
        self._app = app
        self._token = token.encode()
        self._idle = asyncio.Event()
        self._idle.set()
        self.received = 0
        self.open_requests = 0
        self.draining = False

    def __repr__(self) -> str:
        state = "draining" if self.draining else "open"
        return f"ReplicaGuard({state}, received={self.received}, open_requests={self.open_requests})"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request, or refuse it."""
        if scope["type"] != "http":
            # The server is started without lifespan and websockets; whatever else comes is none of ours.
            raise RuntimeError(f"a replica serves HTTP only, got {scope['type']}")
        if not self._admits(scope):
            await _refuse(
                send, 401, b"the x-replica-token header is missing or wrong: ask through the gateway", []
            )
        elif self.draining:
            await _refuse(send, 503, b"this replica is draining", [(DRAINING_HEADER, b"1")])
        else:
            await self._pass_on(scope, receive, send)

    async def wait_until_idle(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()

    def _admits(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == TOKEN_HEADER:
                return hmac.compare_digest(value, self._token)
        return False

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and scope["path"].startswith("/v1/"):
            self.received += 1
        self.open_requests += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self.open_requests -= 1
            if self.open_requests == 0:
                self._idle.set()


async def _refuse(send: Send, status: int, text: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Answer without reading the body; the server then closes a connection whose body is still on its way."""
    start: Message = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode()), *headers],
    }
    await send(start)
    await send({"type": "http.response.body", "body": text})
