"""An HTTP server for an ASGI app, on a port of its own and on an event loop of Ray.

Ray owns the process with its signals and its event loop. So this is uvicorn without signal handlers, started
as a task on the running loop and stopped within a time limit.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterator
from typing import Annotated

import uvicorn

from serve_app.engines.engine import ASGIApp
from serve_app.errors import EngineError
from serve_app.serving.http_heads import LimitedHeads
from serve_app.serving.listening import PortError, listening_socket
from serve_app.serving.tls import Tls, TlsSettings
from serve_app.settings_base import at_least, between, settings


@settings(block="server")
class ReplicaServerSettings:
    """The HTTP port of a replica."""

    # The first port that replicas listen on, for a firewall; 0 takes any free port.
    port: Annotated[int, between(0, 65_535).hint("0 takes any free port")] = 0
    # How many from there they may use; each replica of a node takes the first that is free.
    ports: Annotated[int, at_least(1)] = 16
    # Longer than gateways keep an idle connection. The side that sends requests must close it first, or a
    # request may use a closing connection.
    keep_alive_s: Annotated[int, at_least(1)] = 300
    # Connections that wait to be accepted; a burst after a scheduler restart opens many at once.
    backlog: Annotated[int, at_least(1)] = 2048


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
        self._server = _QuietServer(
            uvicorn.Config(
                app,
                http=LimitedHeads,
                ws="none",
                lifespan="off",
                timeout_keep_alive=settings.keep_alive_s,
                backlog=settings.backlog,
                access_log=False,
                log_config=None,
                date_header=False,
                server_header=False,
                ssl_context_factory=None if tls is None else _context_factory(Tls(tls)),
            )
        )
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        connections = len(self._server.server_state.connections)
        return f"ReplicaServer({self.host}:{self.port}, connections={connections})"

    async def start(self) -> None:
        """Listen; afterwards `port` is the actual port.

        Raises:
            EngineError: the address or port is not available.
        """
        settings = self._settings
        try:
            sock = listening_socket(self.host, settings.port, settings.ports, settings.backlog)
        except PortError as exc:
            raise EngineError(str(exc)) from exc
        self.port = sock.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]), name="replica-http")
        while not self._server.started:
            self.check_health()
            await asyncio.sleep(0.005)

    def check_health(self) -> None:
        """Raise `EngineError` when the server is not running."""
        if self._task is None:
            raise EngineError("the replica's HTTP server has not been started")
        if self._task.done():
            cause = None if self._task.cancelled() else self._task.exception()
            raise EngineError(f"the replica's HTTP server on {self.host}:{self.port} has ended") from cause

    async def stop(self, grace_s: float) -> None:
        """Close idle connections, wait up to `grace_s` seconds for open answers, then cut them."""
        if self._task is None or self._task.done():
            return
        # uvicorn reads this, in whole seconds, when it begins to shut down.
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.end()
        with contextlib.suppress(asyncio.CancelledError):
            # After the timeout the task is cancelled, which closes the remaining connections.
            await asyncio.wait([self._task], timeout=grace_s + 2.0)
        if not self._task.done():
            self._task.cancel()


def _context_factory(tls: Tls) -> Callable[..., ssl.SSLContext]:
    return lambda *_: tls.server


class _QuietServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Begin to shut down."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Wait for the end; uvicorn looks ten times a second whether it has come, and dates its headers."""
        await self.on_tick(0)
        await self._ending.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to Ray, which drains the whole replica on them."""
        yield
