"""The pool replica process: one engine behind an access check, on its own port.

- `PoolReplica`: the life cycle of a replica, see below.
- `ReplicaGuard`: authenticates and counts requests before they reach the engine.
- `ReplicaServer`: the HTTP server of the engine.

Life cycle:

- Start: start the engine (a minute or more for a real one), listen, register with the scheduler.
- Serve: report the load about five times per second, and answer Ray's health checks.
- Drain: notify the scheduler, reject new requests, wait for open answers up to a limit, stop the engine.

The classes do not depend on Ray; `deployments` wraps them in a Serve deployment.
"""

import asyncio
import hmac
import logging
import secrets
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.core.settings_base import INTERNAL, at_least, between, settings
from serve_app.engines.engine import (
    ASGIApp,
    Engine,
    EngineLimits,
    Receive,
    Scope,
    Send,
    require_http,
    send_response,
)
from serve_app.errors import EngineError
from serve_app.serving.channel.connector import Locate
from serve_app.serving.channel.replica_client import ReplicaClient
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.http_server import (
    HttpServer,
    HttpServerOptions,
    ServerNotRunningError,
    asgi_application,
)
from serve_app.serving.listening import PortError, listening_socket
from serve_app.serving.tls import Tls, TlsSettings

TOKEN_HEADER = b"x-replica-token"
# A 503 with this header makes gateways put the request back, because the engine has not received it.
DRAINING_HEADER = b"x-replica-draining"
# Endpoints whose requests are dispatched. The scheduler subtracts the received ones from its dispatches, so
# counting any other request, or missing one, would falsify the load.
_DISPATCHED = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
        *("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/v2/embed", "/pooling", "/classify"),
        *("/v1/audio/transcriptions", "/v1/audio/translations"),
    }
)


class ReplicaGuard:
    """ASGI application that authenticates and counts requests before the engine's application.

    Callers send the token in `x-replica-token`; gateways receive it with the replica table.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        if not token:
            raise ValueError(
                "token must not be empty: callers of an open replica port would bypass the scheduler"
            )
        self._app = app
        self._token = token.encode()
        self._idle = asyncio.Event()
        self._idle.set()
        self.received = 0
        self.open_requests = 0
        self.draining = False

    def __repr__(self) -> str:
        state = "draining" if self.draining else "open"
        return f"ReplicaGuard({state}, received={self.received}, open_requests={self.open_requests})"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one HTTP request, or reject it."""
        require_http(scope)
        # Rejections do not read the body; the server closes a connection whose body is still being sent.
        if not self._has_token(scope):
            text = b"the x-replica-token header is missing or wrong: send requests to the gateway"
            await send_response(send, 401, text, b"text/plain")
        elif self.draining:
            header = (DRAINING_HEADER, b"1")
            await send_response(send, 503, b"this replica is draining", b"text/plain", [header])
        else:
            await self._forward(scope, receive, send)

    async def wait_until_idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    def _has_token(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == TOKEN_HEADER:
                return hmac.compare_digest(value, self._token)
        return False

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and scope["path"] in _DISPATCHED:
            self.received += 1
        self.open_requests += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self.open_requests -= 1
            if self.open_requests == 0:
                self._idle.set()


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


logger = logging.getLogger("ray.serve")

# Load reports that a connected replica may miss before it counts as stuck. By then the scheduler has long
# treated it as saturated, and only a replacement helps.
_MISSED_READINGS = 100
# Time for the last bytes of answers after draining.
_LAST_BYTES_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReplicaSettings:
    """Settings of all replicas of one pool.

    Attributes:
        drain_timeout_s: time for open answers after a stop was requested.
        health_timeout_s: an engine whose health check takes longer counts as dead.
    """

    pool: str
    drain_timeout_s: float
    health_timeout_s: float
    server: ReplicaServerSettings
    channel: ChannelSettings


class PoolReplica:
    """An engine with a port, registration at the scheduler, and graceful shutdown.

    `host` is the address of its node, reachable from gateways on all nodes.
    """

    def __init__(
        self, replica_id: str, host: str, settings: PoolReplicaSettings, engine: Engine, locate: Locate
    ) -> None:
        self._replica_id, self._host = replica_id, host
        self._settings = settings
        self._engine = engine
        self._locate = locate
        self._guard: ReplicaGuard | None = None
        self._server: ReplicaServer | None = None
        self._client: ReplicaClient | None = None
        self._spec: ReplicaSpec | None = None
        self._read_at = 0.0

    def __repr__(self) -> str:
        return f"PoolReplica({self._replica_id}, {self._guard}, {self._server}, {self._client})"

    async def start(self) -> None:
        """Start the engine, listen and register.

        Raises:
            EngineError: the engine or the port is not available; Ray then starts another replica.
        """
        limits = await self._engine.start()
        try:
            await self._join(limits)
        except BaseException:
            # An engine without a port would block its GPU for the next attempt.
            await self._free()
            raise

    async def check_health(self) -> None:
        """Raise `EngineError` if this replica can no longer serve and must be replaced."""
        if self._server is None or self._client is None:
            raise EngineError(f"{self!r} has not been started")
        self._server.check_health()
        silent_s = asyncio.get_running_loop().time() - self._read_at
        if (
            self._client.is_connected
            and silent_s > _MISSED_READINGS * self._settings.channel.report_interval_s
        ):
            raise EngineError(f"the engine's load has been unknown for {silent_s:.0f} s: {self!r}")
        try:
            await asyncio.wait_for(self._engine.check_health(), self._settings.health_timeout_s)
        except TimeoutError as exc:
            limit_s = self._settings.health_timeout_s
            raise EngineError(f"the engine's health check took over {limit_s:g} s: {self!r}") from exc

    async def stop(self) -> None:
        """Drain, then release all resources, within `drain_timeout_s` and a few seconds."""
        if self._guard is not None:
            await self._drain(self._guard)
        await self._free()
        logger.info("event=replica_stopped replica=%s", self._replica_id)

    async def _free(self) -> None:
        # The client closes before the port, so that the scheduler dispatches no request to a closed port.
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.stop(_LAST_BYTES_S)
        await self._engine.stop()

    async def _join(self, limits: EngineLimits) -> None:
        settings = self._settings
        # New at every start, so that a leaked token expires with its replica.
        token = secrets.token_urlsafe(32)
        self._guard = ReplicaGuard(self._engine.app, token)
        self._server = ReplicaServer(self._guard, self._host, settings.server, settings.channel.tls)
        await self._server.start()
        spec = ReplicaSpec(
            replica_id=self._replica_id,
            pool=settings.pool,
            **asdict(limits),
        )
        address = ReplicaAddress(
            replica_id=self._replica_id,
            pool=settings.pool,
            host=self._host,
            port=self._server.port,
            token=token,
            names_responses=True,
        )
        self._spec = spec
        self._client = ReplicaClient(spec, address, self._locate, self._report, settings.channel)
        self._read_at = asyncio.get_running_loop().time()
        self._client.start()
        logger.info("event=replica_started %r port=%d", spec, self._server.port)

    async def _drain(self, guard: ReplicaGuard) -> None:
        guard.draining = True
        if self._client is not None:
            self._client.report_now()
        try:
            await asyncio.wait_for(guard.wait_until_idle(), self._settings.drain_timeout_s)
        except TimeoutError:
            logger.warning(
                "event=drain_timeout replica=%s aborted=%d drain_timeout_s=%g",
                self._replica_id,
                guard.open_requests,
                self._settings.drain_timeout_s,
            )

    async def _report(self) -> ReplicaReport:
        """Return the current load; errors of the engine are also detected by `check_health`."""
        assert self._guard is not None, "the client starts after the guard is made"
        load = await self._engine.load()
        self._read_at = asyncio.get_running_loop().time()
        spec = self._spec
        if self._client is not None and spec is not None and load.adapters != spec.adapters:
            self._spec = replace(spec, adapters=load.adapters)
            logger.info("event=adapters_changed replica=%s adapters=%s", self._replica_id, load.adapters)
            self._client.change(self._spec)
        return ReplicaReport(
            received=self._guard.received,
            waiting=load.waiting,
            running=load.running,
            kv_usage_ratio=load.kv_usage_ratio,
            tpot_s=load.tpot_s,
            draining=self._guard.draining,
        )
