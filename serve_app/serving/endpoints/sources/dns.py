"""Endpoints by DNS: the addresses of a name, or the targets of SRV records."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace

from dns.asyncresolver import Resolver
from dns.exception import DNSException

from serve_app.serving.endpoints.sources.polling import poll
from serve_app.serving.endpoints.url import EndpointUrl

Tell = Callable[[frozenset[EndpointUrl]], None]


@dataclass(frozen=True, slots=True)
class AddressSource:
    """Every address of a name is an endpoint (A and AAAA, as this machine resolves names)."""

    url: EndpointUrl
    is_fixed: bool = False

    async def follow(self, tell: Tell, refresh_s: float) -> None:
        """Resolve the name again and again."""
        await poll(f"dns+{self.url}", self._find, tell, refresh_s)

    async def _find(self) -> frozenset[EndpointUrl]:
        url = self.url
        # Raises where the name does not exist, so a broken zone takes nothing away.
        found = await asyncio.get_running_loop().getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        return frozenset(replace(url, host=str(address[0]), server_name=url.host) for *_, address in found)


@dataclass(frozen=True, slots=True)
class ServiceRecordSource:
    """Every target of a name's SRV records is an endpoint, at the port that its record states.

    Attributes:
        resolver: asks the name servers; None for those of this machine.
    """

    url: EndpointUrl
    is_fixed: bool = False
    resolver: Resolver | None = None

    async def follow(self, tell: Tell, refresh_s: float) -> None:
        """Ask for the records again and again."""
        await poll(f"srv+{self.url}", self._find, tell, refresh_s)

    async def _find(self) -> frozenset[EndpointUrl]:
        try:
            answer = await (self.resolver or Resolver()).resolve(self.url.host, "SRV", search=True)
        except DNSException as exc:
            raise OSError(f"{self.url.host} has no SRV records: {exc}") from exc
        # A target of "." says that there is no such service (RFC 2782).
        targets = [(record.target.to_text(omit_final_dot=True), record.port) for record in answer]
        return frozenset(
            replace(self.url, host=host, port=port) for host, port in targets if host not in ("", ".")
        )
