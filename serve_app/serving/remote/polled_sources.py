"""Sources that are polled: DNS addresses, DNS service records, and files."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dns.asyncresolver import Resolver
from dns.exception import DNSException

from serve_app.serving.remote.endpoint_source import Publish, SourceHealth
from serve_app.serving.remote.endpoint_url import EndpointUrl

# Cheaper than resolving a name, and users who edit the file wait for the effect.
_REFRESH_S = 1.0


async def poll(
    health: SourceHealth,
    find: Callable[[], Awaitable[frozenset[EndpointUrl]]],
    publish: Callable[[frozenset[EndpointUrl]], None],
    refresh_s: float,
) -> None:
    """Call `find` forever, and report its result whenever it has changed.

    Args:
        health: receives failures.
        find: raises `OSError` or `ValueError` if the source cannot be read.
        refresh_s: time between two calls, in seconds.
    """
    found: frozenset[EndpointUrl] | None = None
    while True:
        try:
            now = await find()
        except (OSError, ValueError) as exc:
            # The last result stays valid.
            health.fail(str(exc))
        else:
            health.failure = ""
            if now != found:
                found = now
                publish(now)
        await asyncio.sleep(refresh_s)


@dataclass(frozen=True, slots=True)
class AddressSource:
    """Each address of a name is an endpoint (A and AAAA, with this machine's resolver)."""

    url: EndpointUrl
    is_fixed: bool = False

    async def follow(self, publish: Publish, refresh_s: float, health: SourceHealth) -> None:
        """Resolve the name periodically."""
        await poll(health, self._find, publish, refresh_s)

    async def _find(self) -> frozenset[EndpointUrl]:
        url = self.url
        # Raises if the name does not exist, so that a broken zone removes no endpoints.
        found = await asyncio.get_running_loop().getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        return frozenset(replace(url, host=str(address[0]), server_name=url.host) for *_, address in found)


@dataclass(frozen=True, slots=True)
class ServiceRecordSource:
    """Each target of a name's SRV records is an endpoint, at the port of its record."""

    url: EndpointUrl
    is_fixed: bool = False
    resolver: Resolver | None = None

    async def follow(self, publish: Publish, refresh_s: float, health: SourceHealth) -> None:
        """Query the records periodically."""
        await poll(health, self._find, publish, refresh_s)

    async def _find(self) -> frozenset[EndpointUrl]:
        try:
            answer = await (self.resolver or Resolver()).resolve(self.url.host, "SRV", search=True)
        except DNSException as exc:
            raise OSError(f"{self.url.host} has no SRV records: {exc}") from exc
        # A target of "." means that the service does not exist (RFC 2782).
        targets = [(record.target.to_text(omit_final_dot=True), record.port) for record in answer]
        return frozenset(
            replace(self.url, host=host, port=port) for host, port in targets if host not in ("", ".")
        )


@dataclass(frozen=True, slots=True)
class FileSource:
    """URLs in a file, one per line; `#` begins a comment.

    If a line is not a URL, the file is ignored and its last content stays valid.
    """

    path: Path
    is_fixed: bool = False

    @classmethod
    def parse(cls, text: str) -> "FileSource":
        """Parse `file:///path`.

        Raises:
            ValueError: the path is not absolute.
        """
        parts = urlsplit(text)
        if parts.netloc or not parts.path.startswith("/"):
            raise ValueError(f"a file of endpoints looks like file:///path, got {text!r}")
        return cls(Path(unquote(parts.path)))

    async def follow(self, publish: Publish, refresh_s: float, health: SourceHealth) -> None:
        """Read the file periodically."""
        await poll(health, self._find, publish, min(refresh_s, _REFRESH_S))

    async def _find(self) -> frozenset[EndpointUrl]:
        text = await asyncio.to_thread(self.path.read_text, encoding="utf-8")
        lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
        return frozenset(EndpointUrl.parse(line) for line in lines if line)
