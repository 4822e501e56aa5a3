"""Mutual TLS between the processes of an application, with certificates of a common authority.

It encrypts connections between gateways, replicas and schedulers, and rejects peers without a certificate
before any message is read. The secrets of roles and replicas are still required.
"""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from serve_app.core.settings_base import settings
from serve_app.errors import SettingsError

Protocol = TypeVar("Protocol", bound=asyncio.BaseProtocol)


@settings(block="tls")
class TlsSettings:
    """Certificate files in PEM format, under the same paths on every node; read at the start.

    Attributes:
        ca: certificates of the authority that signed those of all processes; use it for nothing else.
        certificate: certificate of each process, with intermediate ones.
        key: its private key, without a password.
        name: DNS name that every peer's certificate must have, for an authority that also signs others.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        for name in ("ca", "certificate", "key"):
            path = getattr(self, name)
            if path is None or not Path(path).is_absolute():
                raise SettingsError(f"tls.{name} must be an absolute path, got {path!r}")


class ClientTls(NamedTuple):
    """TLS context of a client, and the name to verify if it is not the host."""

    client: ssl.SSLContext
    name: str | None = None


def public_tls() -> ClientTls:
    """Return TLS for servers with a certificate that this machine trusts (`SSL_CERT_FILE` adds one)."""
    return ClientTls(ssl.create_default_context())


class Tls:
    """TLS contexts for both directions.

    Raises:
        SettingsError: a file is missing or invalid.
    """

    def __init__(self, settings: TlsSettings) -> None:
        self.server = _context(settings, ssl.PROTOCOL_TLS_SERVER)
        self.client = _context(settings, ssl.PROTOCOL_TLS_CLIENT)
        # Nodes change addresses, so certificates do not have them; the authority or `name` is verified.
        self.client.check_hostname = settings.name is not None
        self.as_client = ClientTls(self.client, settings.name)


async def connect(
    protocol: Callable[[], Protocol], host: str, port: int, tls: ClientTls | None
) -> tuple[asyncio.Transport, Protocol]:
    """Connect to an address, as `loop.create_connection` does.

    Raises:
        OSError: the connection or the TLS handshake failed (`ssl.SSLError`).
    """
    loop = asyncio.get_running_loop()
    if tls is None:
        return await loop.create_connection(protocol, host, port)
    return await loop.create_connection(
        protocol, host, port, ssl=tls.client, server_hostname=tls.name or host
    )


def make_tls(settings: TlsSettings | None) -> Tls | None:
    """Return the TLS contexts of the settings; None for plain connections."""
    return None if settings is None else Tls(settings)


def _context(settings: TlsSettings, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    ca, certificate, key = settings.ca, settings.certificate, settings.key
    assert ca is not None, "the settings have been checked"
    assert certificate is not None, "the settings have been checked"
    used = ca
    try:
        context.load_verify_locations(ca)
        used = f"{certificate} and {key}"
        # A password, because for a key that has one the process would prompt on its terminal.
        context.load_cert_chain(certificate, key, password="")
    except OSError as exc:
        raise SettingsError(f"tls: cannot use {used}: {exc}") from exc
    return context
