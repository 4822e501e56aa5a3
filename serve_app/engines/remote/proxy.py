"""An ASGI app that forwards requests to a server elsewhere, and its answers back.

Rules:
- bytes are forwarded unchanged in both directions, as soon as they arrive; nothing is parsed or decompressed;
- the client's credentials and hop-by-hop headers are not forwarded;
- when the client disconnects, the connection to the server is closed, so that the server aborts the request;
- before the first byte of an answer a failure is a 502. Its header `x-engine-error` says whether the server
  can have seen the request: `unreachable` (no) or `lost` (perhaps). A server that is silent is a 504;
- after the first byte a failure truncates the answer, so that it never looks complete.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import aiohttp
from yarl import URL

from serve_app.engines.asgi import read_body, require_http, send_response, wait_for_disconnect
from serve_app.engines.engine import Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

ERROR_HEADER = b"x-engine-error"
UNREACHABLE = "unreachable"
LOST = "lost"
SILENT = "silent"

_HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
# The server gets its own key, never that of a client or of this replica. Host and length are set anew; an
# `expect` was answered when the body was read.
_NOT_FOR_THE_SERVER = _HOP_BY_HOP | {
    b"authorization",
    b"x-replica-token",
    b"host",
    b"content-length",
    b"expect",
}
# Headers that aiohttp would add by itself.
_ADD_NOTHING = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """The server behind the proxy.

    Attributes:
        session: its connection pool.
        base_url: scheme, host, port and perhaps a path, without a slash at the end.
        api_key: sent as a bearer token; None sends no credentials.
    """

    session: aiohttp.ClientSession
    base_url: str
    api_key: str | None


class RemoteProxy:
    """The server's API as an ASGI app."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._unanswered: set[int] = set()
        self._numbers = itertools.count()

    @property
    def unanswered(self) -> int:
        """Requests at the server of whose answer no byte has come; vLLM sends a stream's status at once."""
        return len(self._unanswered)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request until it is answered or its client disconnects."""
        require_http(scope)
        body = await read_body(receive)
        if body is None:
            return
        number = next(self._numbers)
        self._unanswered.add(number)
        forwarding = asyncio.ensure_future(self._forward(scope, body, self._noting_an_answer(send, number)))
        leaving = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait((forwarding, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            forwarding.cancel()
            leaving.cancel()
            await asyncio.gather(forwarding, leaving, return_exceptions=True)
            self._unanswered.discard(number)
        if not forwarding.cancelled():
            forwarding.result()

    def _noting_an_answer(self, send: Send, number: int) -> Send:
        async def noting(message: Message) -> None:
            if message["type"] == "http.response.body":
                self._unanswered.discard(number)
            await send(message)

        return noting

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        base_url = self._upstream.base_url
        try:
            response = await self._request(scope, body)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            await _refuse(send, UNREACHABLE, f"{base_url} cannot be reached: {exc}")
            return
        except TimeoutError as exc:
            # Also aiohttp's own `ServerTimeoutError`. The server may be at work still: not another try.
            await _refuse(send, SILENT, f"{base_url} was silent for too long: {exc or 'no answer'}", 504)
            return
        except aiohttp.ClientError as exc:
            await _refuse(send, LOST, f"{base_url} gave no answer: {exc or type(exc).__name__}")
            return
        try:
            headers = _kept(response.raw_headers, _HOP_BY_HOP)
            await send({"type": "http.response.start", "status": response.status, "headers": headers})
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, TimeoutError) as exc:
            # The replica's server then closes the connection in mid-answer.
            logger.warning("event=engine_answer_cut url=%s error=%r", base_url, exc)
        finally:
            # A complete answer has returned its connection to the pool; otherwise this closes it.
            response.close()

    async def _request(self, scope: Scope, body: bytes) -> aiohttp.ClientResponse:
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in _kept(scope["headers"], _NOT_FOR_THE_SERVER)
        ]
        if self._upstream.api_key is not None:
            headers.append(("authorization", f"Bearer {self._upstream.api_key}"))
        return await self._upstream.session.request(
            scope["method"],
            self._url(scope),
            data=body if body or scope["method"] in ("POST", "PUT", "PATCH") else None,
            headers=headers,
            skip_auto_headers=_ADD_NOTHING,
            allow_redirects=False,
        )

    def _url(self, scope: Scope) -> URL:
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        query = scope["query_string"].decode("latin-1")
        # It is encoded already; encoding it again would change the request.
        return URL(f"{self._upstream.base_url}{path}{'?' + query if query else ''}", encoded=True)


def _kept(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """The headers to forward: without `dropped`, and without those that `connection` names."""
    pairs = [(name.lower(), value) for name, value in headers]
    named = {
        token.strip().lower() for name, value in pairs if name == b"connection" for token in value.split(b",")
    }
    return [(name, value) for name, value in pairs if name not in dropped and name not in named]


async def _refuse(send: Send, kind: str, message: str, status: int = 502) -> None:
    logger.warning("event=engine_%s %s", kind, message)
    error = {"message": message, "type": "engine_error", "param": None, "code": f"engine_{kind}"}
    body = json.dumps({"error": error}).encode()
    await send_response(send, status, body, more_headers=[(ERROR_HEADER, kind.encode())])
