"""Control requests to an endpoint: its models, its metrics."""

import asyncio
from dataclasses import dataclass

from serve_app.errors import EngineError
from serve_app.serving.channel.scheduler_client import ServerAddress
from serve_app.serving.endpoints.url import EndpointUrl
from serve_app.serving.gateway.upstream.pool import UpstreamPool
from serve_app.serving.gateway.upstream.response import UpstreamError, UpstreamResponse

# No page of a server's own is longer; a stranger's may be endless.
_MAX_PAGE_BYTES = 8 * 1024 * 1024


class EndpointUnreachableError(EngineError):
    """Nothing answers at the endpoint's address."""


@dataclass(frozen=True, slots=True)
class Page:
    """An answer to a control request."""

    status: int
    body: bytes


class ControlClient:
    """Asks one endpoint for pages, on kept connections.

    Args:
        upstream: connections, shared by all endpoints.
        api_key: sent as a bearer token; empty for none.
        timeout_s: for a whole request.
    """

    def __init__(self, upstream: UpstreamPool, url: EndpointUrl, api_key: str, timeout_s: float) -> None:
        self._upstream = upstream
        self._url = url
        self._server = ServerAddress(url.host, url.port, url.scheme, url.server_name)
        self._timeout_s = timeout_s
        host = url.authority if not url.server_name else f"{url.server_name}:{url.port}"
        authorization = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f" HTTP/1.1\r\nhost: {host}\r\naccept: */*\r\n{authorization}\r\n"

    async def get(self, path: str) -> Page:
        """Ask for a page.

        Raises:
            EndpointUnreachableError: nothing answers, or not in time, or not in HTTP.
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
            raise EndpointUnreachableError(f"{self._url}{path} gave no answer: {exc}") from exc

    async def page(self, path: str) -> bytes:
        """Ask for a page that must be there.

        Raises:
            EndpointUnreachableError: see `get`.
            EngineError: another status than 200.
        """
        answer = await self.get(path)
        if answer.status in (401, 403):
            raise EngineError(
                f"{self._url}{path} answered {answer.status}: give the endpoint's key as api_key or "
                "api_key_env"
            )
        if answer.status != 200:
            shown = answer.body[:200].decode("utf-8", "replace")
            raise EngineError(f"{self._url}{path} answered {answer.status}: {shown}")
        return answer.body


async def _limited(response: UpstreamResponse) -> bytes:
    pieces, length = [], 0
    while piece := await response.next():
        pieces.append(piece)
        length += len(piece)
        if length > _MAX_PAGE_BYTES:
            raise EndpointUnreachableError(f"the answer is longer than {_MAX_PAGE_BYTES:,} bytes")
    return b"".join(pieces)
