"""The HTTP server of a replica's engine, on a port of its own."""

from typing import Annotated

from serve_app.engines.engine import ASGIApp
from serve_app.errors import EngineError
from serve_app.serving.http_server import HttpServer, HttpServerOptions, ServerEndedError
from serve_app.serving.listening import PortError, listening_socket
from serve_app.serving.tls import Tls, TlsSettings
from serve_app.settings_base import INTERNAL, at_least, between, settings


@settings(block="server")
class ReplicaServerSettings:
    """The HTTP port of a replica."""

    # The first port that replicas listen on, for a firewall; 0 takes any free port.
    port: Annotated[int, between(0, 65_535).hint("0 takes any free port")] = 0
    # How many from there they may use; each replica of a node takes the first that is free.
    ports: Annotated[int, at_least(1)] = 16
    # Longer than gateways keep an idle connection. The side that sends requests must close it first, or a
    # request may use a closing connection.
    keep_alive_s: Annotated[int, at_least(1), INTERNAL] = 300
    # Connections that wait to be accepted; a burst after a scheduler restart opens many at once.
    backlog: Annotated[int, at_least(1), INTERNAL] = 2048


class ReplicaServer:
    """One HTTP server on one socket.

    Args:
        app: the app to serve.
        host: address to listen on, the node's own, so that other nodes can reach it.
        settings: port and connection limits.
        tls: take connections only with it.
    """

    def __init__(
        self, app: ASGIApp, host: str, settings: ReplicaServerSettings, tls: TlsSettings | None = None
    ) -> None:
        self.host = host
        self.port = 0
        self._settings = settings
        # Gateways read no date, and write their own.
        self._server = HttpServer(
            "the replica",
            app,
            HttpServerOptions(
                idle_s=settings.keep_alive_s,
                dated=False,
                tls=None if tls is None else Tls(tls).server,
                backlog=settings.backlog,
            ),
        )

    def __repr__(self) -> str:
        return f"ReplicaServer({self.host}:{self.port}, connections={self._server.connections})"

    async def start(self) -> None:
        """Listen; afterwards `port` is the actual port.

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
        """Raise `EngineError` when the server is not running."""
        try:
            self._server.check_health()
        except ServerEndedError as exc:
            raise EngineError(f"{exc}, on {self.host}:{self.port}") from exc

    async def stop(self, grace_s: float) -> None:
        """Close idle connections, wait up to `grace_s` seconds for open answers, then cut them."""
        await self._server.stop(grace_s)
