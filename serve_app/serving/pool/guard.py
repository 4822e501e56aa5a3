"""The guard of a replica: authenticates and counts requests before they reach its engine."""

import asyncio
import hmac

from serve_app.engines.engine import ASGIApp, Receive, Scope, Send, require_http, send_response

TOKEN_HEADER = b"x-replica-token"
# A 503 with this header makes gateways put the request back, because the engine has not received it.
DRAINING_HEADER = b"x-replica-draining"
# Endpoints whose requests are dispatched. The scheduler subtracts the received ones from its dispatches, so
# counting any other request, or missing one, would falsify the load.
_DISPATCHED = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
        *("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/v2/embed", "/pooling", "/classify"),
        *("/v1/audio/transcriptions", "/v1/audio/translations"),
    }
)


class ReplicaGuard:
    """ASGI application that authenticates and counts requests before the engine's application.

    Callers send the token in `x-replica-token`; gateways receive it with the replica table.
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
        """Forward one HTTP request, or reject it."""
        require_http(scope)
        # Rejections do not read the body; the server closes a connection whose body is still being sent.
        if not self._has_token(scope):
            text = b"the x-replica-token header is missing or wrong: send requests to the gateway"
            await send_response(send, 401, text, b"text/plain")
        elif self.draining:
            header = (DRAINING_HEADER, b"1")
            await send_response(send, 503, b"this replica is draining", b"text/plain", [header])
        else:
            await self._forward(scope, receive, send)

    async def wait_until_idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    def _has_token(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == TOKEN_HEADER:
                return hmac.compare_digest(value, self._token)
        return False

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and scope["path"] in _DISPATCHED:
            self.received += 1
        self.open_requests += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self.open_requests -= 1
            if self.open_requests == 0:
                self._idle.set()
