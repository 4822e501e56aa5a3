"""Control requests to an endpoint, for its models and metrics."""

import asyncio
import os
from dataclasses import dataclass

from serve_app.engines.adapters.server import excerpt
from serve_app.errors import EngineError
from serve_app.serving.channel.scheduler_client import ServerAddress
from serve_app.serving.gateway.upstream.pool import UpstreamPool
from serve_app.serving.gateway.upstream.response import UpstreamError, UpstreamResponse
from serve_app.serving.remote.endpoint_url import EndpointUrl

# Limit on control answers; a wrong server's answer may be endless.
_MAX_PAGE_BYTES = 8 * 1024 * 1024


class EndpointUnreachableError(EngineError):
    """The endpoint does not answer."""


@dataclass(frozen=True, slots=True)
class Page:
    """Answer to a control request."""

    status: int
    body: bytes


class ControlClient:
    """Client for control requests to one endpoint, with a time limit; endpoints share connections."""

    def __init__(self, upstream: UpstreamPool, url: EndpointUrl, api_key: str, timeout_s: float) -> None:
        self._upstream = upstream
        self._url = url
        self._server = ServerAddress(url.host, url.port, url.scheme, url.server_name)
        self._timeout_s = timeout_s
        host = url.authority if not url.server_name else f"{url.server_name}:{url.port}"
        authorization = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f" HTTP/1.1\r\nhost: {host}\r\naccept: */*\r\n{authorization}\r\n"

    async def get(self, path: str) -> Page:
        """Send a GET request.

        Raises:
            EndpointUnreachableError: no answer, not in time, or not HTTP.
        """
        head = f"GET {self._url.path}{path}{self._headers}".encode("latin-1")
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._upstream.send(self._server, head, b"")
                try:
                    return Page(response.status, await _limited(response))
                finally:
                    response.close()
        except TimeoutError as exc:
            raise EndpointUnreachableError(
                f"{self._url}{path} gave no answer in {self._timeout_s:g} s"
            ) from exc
        except UpstreamError as exc:
            why, cause = str(exc), exc.__cause__
            if isinstance(cause, ConnectionError) and cause.errno:
                why = os.strerror(cause.errno)
            raise EndpointUnreachableError(f"{self._url}{path} gave no answer: {why}") from exc

    async def page(self, path: str) -> bytes:
        """Return a page that must exist.

        Raises:
            EndpointUnreachableError: see `get`.
            EngineError: the status is not 200.
        """
        answer = await self.get(path)
        if answer.status in (401, 403):
            raise EngineError(
                f"{self._url}{path} answered {answer.status}: give the endpoint's key as api_key or "
                "api_key_env"
            )
        if answer.status != 200:
            raise EngineError(f"{self._url}{path} answered {answer.status}: {excerpt(answer.body)}")
        return answer.body


async def _limited(response: UpstreamResponse) -> bytes:
    pieces, length = [], 0
    while piece := await response.next():
        pieces.append(piece)
        length += len(piece)
        if length > _MAX_PAGE_BYTES:
            raise EndpointUnreachableError(f"the answer is longer than {_MAX_PAGE_BYTES:,} bytes")
    return b"".join(pieces)
