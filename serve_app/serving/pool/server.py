"""The HTTP server of a replica's engine."""

from typing import Annotated

from serve_app.core.settings_base import INTERNAL, at_least, between, settings
from serve_app.engines.engine import ASGIApp
from serve_app.errors import EngineError
from serve_app.serving.asgi import asgi_application
from serve_app.serving.http_server import HttpServer, HttpServerOptions, ServerNotRunningError
from serve_app.serving.listening import PortError, listening_socket
from serve_app.serving.tls import Tls, TlsSettings


@settings(block="server")
class ReplicaServerSettings:
    """The HTTP port of a replica."""

    # First port for replicas, for firewalls; 0 uses any free port.
    port: Annotated[int, between(0, 65_535).hint("0 takes any free port")] = 0
    # Number of ports from `port` on; each replica of a node uses the first free one.
    ports: Annotated[int, at_least(1)] = 16
    # Longer than gateways keep idle connections. The side that sends requests must close first; otherwise a
    # request may meet a closing connection.
    keep_alive_s: Annotated[int, at_least(1), INTERNAL] = 300
    # Listen backlog; after a scheduler restart many connections open at once.
    backlog: Annotated[int, at_least(1), INTERNAL] = 2048


class ReplicaServer:
    """HTTP server on one socket of the node's address, so that other nodes can reach it."""

    def __init__(
        self, app: ASGIApp, host: str, settings: ReplicaServerSettings, tls: TlsSettings | None = None
    ) -> None:
        self.host = host
        self.port = 0
        self._settings = settings
        # Without a date header, because gateways write their own.
        self._server = HttpServer(
            "the replica",
            asgi_application(app),
            HttpServerOptions(
                idle_s=settings.keep_alive_s,
                send_date=False,
                tls=None if tls is None else Tls(tls).server,
                backlog=settings.backlog,
            ),
        )

    def __repr__(self) -> str:
        return f"ReplicaServer({self.host}:{self.port}, connections={self._server.connections})"

    async def start(self) -> None:
        """Listen; `port` is then the actual port.

        Raises:
            EngineError: the address or port is not available.
        """
        settings = self._settings
        try:
            sock = listening_socket(self.host, settings.port, settings.ports, settings.backlog)
            self.port = sock.getsockname()[1]
            await self._server.start(sock)
        except PortError as exc:
            raise EngineError(str(exc)) from exc

    def check_health(self) -> None:
        """Raise `EngineError` if the server is not running."""
        try:
            self._server.check_health()
        except ServerNotRunningError as exc:
            raise EngineError(f"{exc}, on {self.host}:{self.port}") from exc

    async def stop(self, grace_s: float) -> None:
        """Close idle connections, wait up to `grace_s` seconds for in-flight answers, then abort them."""
        await self._server.stop(grace_s)
