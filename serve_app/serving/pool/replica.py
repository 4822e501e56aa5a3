"""One replica of a pool: an engine behind an access check, on its own port.

Life cycle:

- Start: start the engine (a minute or more for a real one), listen, register with the scheduler.
- Serve: report the load about five times per second, and answer Ray's health checks.
- Drain: notify the scheduler, reject new requests, wait for open answers up to a limit, stop the engine.

The classes do not depend on Ray; `deployment` wraps them in a Serve deployment.
"""

import asyncio
import logging
import secrets
from dataclasses import dataclass, replace

from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.engines.engine import Engine, EngineLimits
from serve_app.errors import EngineError
from serve_app.serving.channel.connector import Locate
from serve_app.serving.channel.replica_client import ReplicaClient
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.pool.guard import ReplicaGuard
from serve_app.serving.pool.server import ReplicaServer, ReplicaServerSettings

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
            max_model_len=limits.max_model_len,
            kv_tokens=limits.kv_tokens,
            max_num_seqs=limits.max_num_seqs,
            tpot_s=limits.tpot_s,
            prefill_token_s=limits.prefill_token_s,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            long_prefill_token_threshold=limits.long_prefill_token_threshold,
        )
        address = ReplicaAddress(
            replica_id=self._replica_id,
            pool=settings.pool,
            host=self._host,
            port=self._server.port,
            token=token,
            names_responses=True,
            max_model_len=spec.max_model_len,
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
