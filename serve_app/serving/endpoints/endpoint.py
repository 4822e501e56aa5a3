"""One endpoint: identified, watched, and registered with the scheduler like a replica.

- Until it can be identified it is asked again, after growing pauses; nothing is sent there.
- Then its load is read about five times a second. A reading that fails closes it at once, and what runs there
  is left to the gateways. When it answers again, it is identified anew: it may have been restarted with other
  limits. One that fails again and again is held back for longer each time (`damping`).
- Its limits are looked at now and then while it serves.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace

from serve_app.engine_model.recent_mean import RecentMean
from serve_app.engines.adapters import EngineReading
from serve_app.engines.hang_watch import HangWatch
from serve_app.errors import EngineError
from serve_app.routing.replica import UNTOLD_CONTEXT, ReplicaReport, ReplicaSpec
from serve_app.serving.channel.connector import Locate
from serve_app.serving.channel.replica_client import ReplicaClient
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.endpoints.control import ControlClient, EndpointUnreachableError
from serve_app.serving.endpoints.damping import FlapDamping
from serve_app.serving.endpoints.identity import EndpointIdentity, identified
from serve_app.serving.endpoints.settings import RemoteSettings
from serve_app.serving.endpoints.url import EndpointUrl
from serve_app.serving.gateway.upstream.pool import UpstreamPool

logger = logging.getLogger("ray.serve")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
# A server's flags do not change while it runs; its list of adapters may.
_LOOK_AGAIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointContext:
    """What all endpoints of a pool share.

    Attributes:
        api_key: for their servers; empty for none.
        upstream: connections for control requests.
        locate: finds the scheduler.
    """

    pool: str
    settings: RemoteSettings
    api_key: str
    upstream: UpstreamPool
    locate: Locate
    channel: ChannelSettings


class Endpoint:
    """Stands for one endpoint at the scheduler.

    Attributes:
        failure: why it gets no requests; empty while it gets some.
        is_refused: it has answered, and cannot be used as it is.
    """

    def __init__(self, url: EndpointUrl, surroundings: EndpointContext) -> None:
        self.url = url
        self.failure = "it has not been asked yet"
        self._shared = surroundings
        timeout_s = surroundings.settings.metrics_timeout_s
        self._control = ControlClient(surroundings.upstream, url, surroundings.api_key, timeout_s)
        self._damping = FlapDamping()
        self._tpot = RecentMean()
        self._hang = HangWatch()
        self._progress: tuple[float | None, ...] | None = None
        self._identity: EndpointIdentity | None = None
        self._client: ReplicaClient | None = None
        self.is_refused = False
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Endpoint {self.url} {self.failure or 'serves'}>"

    @property
    def is_known(self) -> bool:
        """It has answered, and can be used."""
        return self._identity is not None

    @property
    def replica_id(self) -> str:
        """Its name as a replica; the same whoever watches it."""
        return f"{self._shared.pool}/{self.url.authority}{self.url.path}"

    def start(self) -> None:
        """Begin to watch it."""
        self._task = asyncio.create_task(self._run(), name=f"endpoint {self.url}")

    async def close(self) -> None:
        """Take it from the scheduler. What runs there goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._client is not None:
            await self._client.close()

    def described(self) -> dict[str, object]:
        """For people who look at the fleet."""
        identity = self._identity
        return {
            "url": str(self.url),
            "pool": self._shared.pool,
            "replica": self.replica_id,
            "state": "serving" if not self.failure else "closed",
            "reason": self.failure,
            "server": f"{identity.server.kind} {identity.server.version or ''}".strip() if identity else "",
            "models": [listing.model for listing in identity.server.models] if identity else [],
            "max_model_len": identity.max_model_len if identity else None,
            "kv_tokens": identity.kv_tokens if identity else None,
            "max_num_seqs": identity.max_num_seqs if identity else None,
            "lacks": list(identity.server.lacks) if identity else [],
        }

    async def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while self._identity is None:
            try:
                await self._identify()
            except EngineError as exc:
                self._note_failure(str(exc))
                self.is_refused = not isinstance(exc, EndpointUnreachableError)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._client = self._registered()
        self._client.start()
        while True:
            await asyncio.sleep(_LOOK_AGAIN_S)
            # `_report` tells of an endpoint that does not answer.
            with contextlib.suppress(EngineError):
                await self._identify()

    async def _identify(self) -> None:
        """Ask what it is; tell the scheduler of limits that have changed.

        Raises:
            EngineError: it does not answer, or cannot be used.
        """
        found = await identified(self._control, self.url, self._shared.settings)
        before = self._identity
        if before is not None:
            # A first guess of the pace; reports tell it from then on.
            found = replace(found, tpot_s=before.tpot_s)
        self._identity = found
        if before is None:
            for lack in found.server.lacks:
                logger.warning(
                    "event=endpoint_lacks endpoint=%s server=%s lack=%r", self.url, found.server.kind, lack
                )
        elif self._client is not None and (spec := self._spec(found)) != self._spec(before):
            logger.info("event=endpoint_changed endpoint=%s spec=%r", self.url, spec)
            self._client.change(spec)

    def _registered(self) -> ReplicaClient:
        assert self._identity is not None, "it registers once it is known"
        shared = self._shared
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
        )
        spec = self._spec(self._identity)
        return ReplicaClient(spec, address, shared.locate, self._report, shared.channel)

    def _spec(self, identity: EndpointIdentity) -> ReplicaSpec:
        return ReplicaSpec(
            replica_id=self.replica_id,
            pool=self._shared.pool,
            max_model_len=identity.max_model_len or UNTOLD_CONTEXT,
            kv_tokens=identity.kv_tokens,
            max_num_seqs=identity.max_num_seqs,
            tpot_s=identity.tpot_s,
            adapters=identity.adapters,
            stall_timeout_s=self._shared.settings.stall_timeout_s,
        )

    async def _report(self) -> ReplicaReport:
        """Its load; each report is of a reading of its own, as `received=None` asks for.

        Raises:
            EngineError: it cannot be read, or is held back.
        """
        loop = asyncio.get_running_loop()
        assert self._identity is not None, "it reports once it is known"
        try:
            if self.failure:
                await self._identify()
            server = self._identity.server
            # One without metrics is at least alive.
            page = await self._control.page(server.metrics_path or server.health_path)
            reading = server.read(page)
            self._check_progress(reading, loop.time())
        except EngineError as exc:
            self._damping.on_failure(loop.time())
            self._note_failure(str(exc))
            raise
        if held_s := self._damping.on_answer(loop.time()):
            self.failure = f"it answers again, and has to for {held_s:.0f} s more, since it failed repeatedly"
            raise EngineError(self.failure)
        if self.failure:
            logger.info("event=endpoint_serves endpoint=%s", self.url)
        self.failure = ""
        now = loop.time()
        if reading.token_gaps is not None and reading.token_gaps_s is not None:
            self._tpot.note(reading.token_gaps_s, reading.token_gaps, now)
        return ReplicaReport(
            received=None,
            waiting=reading.waiting,
            running=reading.running,
            kv_usage_ratio=reading.kv_usage_ratio,
            tpot_s=self._tpot.mean(now),
            computes=self._has_computed(reading),
        )

    def _check_progress(self, reading: EngineReading, now: float) -> None:
        """See whether the engine still computes: the front end of one that has hung states the last load on.

        Raises:
            EngineError: it has hung.
        """
        if reading.progress is None:
            return
        busy = bool(reading.running or reading.waiting)
        stalled_s = self._hang.note(reading.progress, busy=busy, now=now)
        limit_s = self._shared.settings.stall_timeout_s
        if stalled_s > limit_s:
            raise EngineError(
                f"{self.url} hangs: it has requests and has computed nothing for {stalled_s:.0f} s "
                f"(stall_timeout_s {limit_s:g})"
            )

    def _has_computed(self, reading: EngineReading) -> bool | None:
        """Whether it has since the last look; None when it does not tell."""
        before, self._progress = self._progress, reading.progress
        return None if reading.progress is None else reading.progress != before

    def _note_failure(self, reason: str) -> None:
        if not self.failure or reason != self.failure:
            logger.warning("event=endpoint_closed endpoint=%s reason=%r", self.url, reason)
        self.failure = reason
