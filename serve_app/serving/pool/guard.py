"""The access check and the request counts in front of a replica's engine.

The guard is an ASGI app before the engine's own, on the replica's port. It checks the replica's token, counts
accepted requests, and refuses new ones while the replica drains. It neither reads bodies nor changes answers,
so it costs one comparison per request on the data path.

- `received` counts accepted generation requests (POST under `/v1/`), which are those that the scheduler
  dispatches. Each report carries it, so that the scheduler knows which dispatches the report includes.
- `open_requests` counts requests between their first line and their last byte. A draining replica may stop
  when it is zero.
"""

import asyncio
import hmac

from serve_app.engines.asgi import require_http, send_response
from serve_app.engines.engine import ASGIApp, Receive, Scope, Send

TOKEN_HEADER = b"x-replica-token"
# A gateway returns a request to the front of its queue when a 503 has this header: the engine has not seen
# it.
DRAINING_HEADER = b"x-replica-draining"


class ReplicaGuard:
    """An ASGI app that checks and counts requests, and forwards them to the engine's app.

    Args:
        app: the engine's ASGI app.
        token: secret that every caller sends in `x-replica-token`; gateways learn it with each grant.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        if not token:
            raise ValueError(
                "token must not be empty: callers of an open replica port would bypass the scheduler"
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
        require_http(scope)
        # A refusal does not read the body; the server closes a connection whose body is still being sent.
        if not self._has_token(scope):
            text = b"the x-replica-token header is missing or wrong: send requests to the gateway"
            await send_response(send, 401, text, b"text/plain")
        elif self.draining:
            header = (DRAINING_HEADER, b"1")
            await send_response(send, 503, b"this replica is draining", b"text/plain", [header])
        else:
            await self._forward(scope, receive, send)

    async def wait_until_idle(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()

    def _has_token(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == TOKEN_HEADER:
                return hmac.compare_digest(value, self._token)
        return False

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
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
