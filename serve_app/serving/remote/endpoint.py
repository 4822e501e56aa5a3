"""A remote endpoint: identified, watched, and registered with the scheduler like a replica.

- Until it is identified, attempts are repeated with growing pauses, and it receives no requests.
- Then its load is read about five times per second. A failed reading closes it at once; gateways finish
  what runs there. When it answers again it is identified again, because it may have restarted with other
  limits. After repeated failures it is held back for longer each time (`damping`).
- Its limits are refreshed periodically while it serves.
"""

import asyncio
import contextlib
import logging
import math
import time
from dataclasses import dataclass, replace

from serve_app.core.routing.replica import UNREPORTED_CONTEXT, ReplicaReport, ReplicaSpec
from serve_app.engines.adapters import EngineReading, EngineServer
from serve_app.engines.hang_watch import HangWatch
from serve_app.engines.model.model import RecentMean
from serve_app.errors import EngineError
from serve_app.serving.channel.connector import Locate
from serve_app.serving.channel.replica_client import ReplicaClient
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.gateway.upstream.pool import UpstreamPool
from serve_app.serving.remote.control import ControlClient, EndpointUnreachableError
from serve_app.serving.remote.damping import FlapDamping
from serve_app.serving.remote.endpoint_url import EndpointUrl
from serve_app.serving.remote.identity import EndpointIdentity, identified
from serve_app.serving.remote.settings import RemoteSettings

logger = logging.getLogger("ray.serve")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
# Flags of a server do not change while it runs, but its list of adapters may.
_LOOK_AGAIN_S = 10.0
# Interval of checks of a server without metrics, which may be a provider that limits requests.
_LIVENESS_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointContext:
    """Context shared by all endpoints of a pool; an empty API key sends none."""

    pool: str
    settings: RemoteSettings
    api_key: str
    upstream: UpstreamPool
    locate: Locate
    channel: ChannelSettings


class Endpoint:
    """Watcher of one endpoint, which registers it at the scheduler.

    Attributes:
        failure: why it receives no requests; empty while it does.
        down_since: begin of the latest time without requests, in Unix seconds.
        is_rejected: it has answered, but cannot be used.
    """

    def __init__(self, url: EndpointUrl, surroundings: EndpointContext) -> None:
        self.url = url
        self.failure = "not identified yet"
        self.down_since = time.time()
        self._shared = surroundings
        timeout_s = surroundings.settings.metrics_timeout_s
        self._control = ControlClient(surroundings.upstream, url, surroundings.api_key, timeout_s)
        self._damping = FlapDamping()
        self._tpot = RecentMean()
        self._hang = HangWatch()
        self._progress: tuple[float | None, ...] | None = None
        self._identity: EndpointIdentity | None = None
        self._client: ReplicaClient | None = None
        self.is_rejected = False
        self._alive_at = -math.inf
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Endpoint {self.url} {self.failure or 'serves'}>"

    @property
    def is_identified(self) -> bool:
        """True if it has been identified."""
        return self._identity is not None

    @property
    def replica_id(self) -> str:
        """Replica id, independent of the watching process."""
        return f"{self._shared.pool}/{self.url.authority}{self.url.path}"

    def start(self) -> None:
        """Start watching."""
        self._task = asyncio.create_task(self._run(), name=f"endpoint {self.url}")

    async def close(self) -> None:
        """Remove it from the scheduler; running requests continue."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._client is not None:
            await self._client.close()

    def describe(self) -> dict[str, object]:
        """Return a description of the endpoint, for operators."""
        identity = self._identity
        return {
            "url": str(self.url),
            "pool": self._shared.pool,
            "replica": self.replica_id,
            "state": "serving" if not self.failure else "closed",
            "reason": self.failure,
            "since": self.down_since if self.failure else None,
            "server": f"{identity.server.kind} {identity.server.version or ''}".strip() if identity else "",
            "models": [listing.model for listing in identity.server.models] if identity else [],
            "max_model_len": identity.max_model_len if identity else None,
            "kv_tokens": identity.kv_tokens if identity else None,
            "max_num_seqs": identity.max_num_seqs if identity else None,
            "limitations": list(identity.server.limitations) if identity else [],
        }

    async def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while self._identity is None:
            try:
                await self._identify()
            except Exception as exc:  # noqa: BLE001 - an unexpected answer must not end the attempts
                self._record_failure(str(exc) if isinstance(exc, EngineError) else repr(exc))
                self.is_rejected = not isinstance(exc, EndpointUnreachableError)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._client = self._registered()
        self._client.start()
        while True:
            await asyncio.sleep(_LOOK_AGAIN_S)
            # Failures to answer are reported by `_report`.
            with contextlib.suppress(Exception):
                await self._identify()

    async def _identify(self) -> None:
        """Identify the endpoint, and send changed limits to the scheduler.

        Raises:
            EngineError: it does not answer, or cannot be used.
        """
        found = await identified(self._control, self.url, self._shared.settings)
        before = self._identity
        if before is not None:
            # The first TPOT is only a prior; reports have the current one.
            found = replace(found, tpot_s=before.tpot_s)
        self._identity = found
        if before is None:
            for limitation in found.server.limitations:
                logger.warning(
                    "event=endpoint_limitation endpoint=%s server=%s limitation=%r",
                    self.url,
                    found.server.kind,
                    limitation,
                )
        elif self._client is not None and (spec := self._spec(found)) != self._spec(before):
            logger.info("event=endpoint_changed endpoint=%s spec=%r", self.url, spec)
            self._client.change(spec)

    def _registered(self) -> ReplicaClient:
        assert self._identity is not None, "it registers once it is known"
        shared = self._shared
        spec = self._spec(self._identity)
        address = ReplicaAddress(
            replica_id=self.replica_id,
            pool=shared.pool,
            host=self.url.host,
            port=self.url.port,
            token="",
            scheme=self.url.scheme,
            server_name=self.url.server_name,
            path=self.url.path,
            api_key=shared.api_key,
            names_responses=self._identity.server.names_responses,
            max_model_len=spec.max_model_len,
        )
        return ReplicaClient(spec, address, shared.locate, self._report, shared.channel)

    def _spec(self, identity: EndpointIdentity) -> ReplicaSpec:
        return ReplicaSpec(
            replica_id=self.replica_id,
            pool=self._shared.pool,
            max_model_len=identity.max_model_len or UNREPORTED_CONTEXT,
            kv_tokens=identity.kv_tokens,
            max_num_seqs=identity.max_num_seqs,
            tpot_s=identity.tpot_s,
            adapters=identity.adapters,
            stall_timeout_s=self._shared.settings.hang_timeout_s,
        )

    async def _report(self) -> ReplicaReport:
        """Return the load. Each report has a new reading, as `received=None` requires.

        Raises:
            EngineError: the load cannot be read, or the endpoint is held back.
        """
        loop = asyncio.get_running_loop()
        assert self._identity is not None, "it reports once it is known"
        try:
            if self.failure:
                await self._identify()
            reading = await self._read(self._identity.server, loop.time())
            self._check_progress(reading, loop.time())
        except EngineError as exc:
            self._damping.on_failure(loop.time())
            self._record_failure(str(exc))
            raise
        if held_s := self._damping.on_answer(loop.time()):
            self.failure = f"it answers again, and has to for {held_s:.0f} s more, since it failed repeatedly"
            raise EngineError(self.failure)
        if self.failure:
            logger.info("event=endpoint_opened endpoint=%s", self.url)
        self.failure = ""
        now = loop.time()
        if reading.token_gaps is not None and reading.token_gaps_s is not None:
            self._tpot.record(reading.token_gaps_s, reading.token_gaps, now)
        return ReplicaReport(
            received=None,
            waiting=reading.waiting,
            running=reading.running,
            kv_usage_ratio=reading.kv_usage_ratio,
            tpot_s=self._tpot.mean(now),
            computes=self._has_computed(reading),
        )

    async def _read(self, server: EngineServer, now: float) -> EngineReading:
        """Read the metrics. A server without metrics is at least checked for liveness, less often.

        Raises:
            EngineError: it does not answer.
        """
        if server.metrics_path is not None:
            return server.read(await self._control.page(server.metrics_path))
        if self.failure or now >= self._alive_at + _LIVENESS_S:
            await self._control.page(server.health_path)
            self._alive_at = now
        return EngineReading()

    def _check_progress(self, reading: EngineReading, now: float) -> None:
        """Check that the engine makes progress; the front end of a hung one repeats the last load.

        Raises:
            EngineError: it hangs.
        """
        if reading.progress is None:
            return
        busy = bool(reading.running or reading.waiting)
        hanging_s = self._hang.update(reading.progress, busy=busy, now=now)
        limit_s = self._shared.settings.hang_timeout_s
        if hanging_s > limit_s:
            raise EngineError(
                f"{self.url} hangs: it has requests and has computed nothing for {hanging_s:.0f} s "
                f"(hang_timeout_s {limit_s:g})"
            )

    def _has_computed(self, reading: EngineReading) -> bool | None:
        """Return whether it has computed since the last reading; None if it does not report progress."""
        before, self._progress = self._progress, reading.progress
        return None if reading.progress is None else reading.progress != before

    def _record_failure(self, reason: str) -> None:
        if reason != self.failure:
            logger.warning("event=endpoint_closed endpoint=%s reason=%r", self.url, reason)
        if not self.failure:
            self.down_since = time.time()
        self.failure = reason
