"""TLS between the processes of an application: each side shows a certificate of the same authority.

It encrypts what gateways, replicas and schedulers say to each other, and lets nobody in who has no
certificate, before a message of theirs is read. The secrets of roles and replicas are asked for as before.
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
    """Files of certificates, in PEM. They lie under the same paths on every node, and are read at a start.

    Attributes:
        ca: certificates of the authority that has signed those of all processes; give it to nothing else.
        certificate: what each process shows, with those between it and the authority.
        key: the private key of it, without a password.
        name: a DNS name that every peer's certificate must have, for an authority that signs others, too.
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
    """How a client makes connections.

    Attributes:
        client: whom it trusts, and what it shows.
        name: that a server must prove, where it is not the one that is connected to.
    """

    client: ssl.SSLContext
    name: str | None = None


def public_tls() -> ClientTls:
    """For servers with a certificate of an authority that this machine trusts (`SSL_CERT_FILE` adds one)."""
    return ClientTls(ssl.create_default_context())


class Tls:
    """What connections are made with.

    Raises:
        SettingsError: a file is missing or does not hold what it should.
    """

    def __init__(self, settings: TlsSettings) -> None:
        self.server = _context(settings, ssl.PROTOCOL_TLS_SERVER)
        self.client = _context(settings, ssl.PROTOCOL_TLS_CLIENT)
        # Addresses of nodes come and go, and no certificate names them; the authority or `name` does.
        self.client.check_hostname = settings.name is not None
        self.as_client = ClientTls(self.client, settings.name)


async def connect(
    protocol: Callable[[], Protocol], host: str, port: int, tls: ClientTls | None
) -> tuple[asyncio.Transport, Protocol]:
    """Connect to an address, as `loop.create_connection` does.

    Raises:
        OSError: there is no connection, or no handshake; `ssl.SSLError` is one of them.
    """
    loop = asyncio.get_running_loop()
    if tls is None:
        return await loop.create_connection(protocol, host, port)
    return await loop.create_connection(
        protocol, host, port, ssl=tls.client, server_hostname=tls.name or host
    )


def made_tls(settings: TlsSettings | None) -> Tls | None:
    """What connections are made with; None for plain ones."""
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
        # A password, or a key that has one would make the process ask at its terminal.
        context.load_cert_chain(certificate, key, password="")
    except OSError as exc:
        raise SettingsError(f"tls: cannot use {used}: {exc}") from exc
    return context
