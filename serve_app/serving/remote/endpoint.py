"""A remote endpoint: identified, watched, and registered with the scheduler like a replica.

- `Endpoint`: the watcher of one endpoint, by the rules below.
- `ControlClient`: control requests to an endpoint, for its models and metrics.
- `EndpointIdentity`: its server and limits, completed by the settings.
- `FlapDamping`: holds an endpoint back that fails repeatedly.

Rules:

- Until it is identified, attempts are repeated with growing pauses, and it receives no requests.
- Then its load is read about five times per second while the engine is full, and otherwise twice: a reading
  takes time on the event loop that streams its answers. A failed one closes it at once; gateways finish what
  runs there. When it answers again it is identified again, because it may have restarted with other limits.
  After repeated failures it is held back for longer each time (`FlapDamping`).
- One that sleeps receives no requests, because its engine has left the GPU. That is no failure, so it
  receives requests at once when it has been woken up.
- Its limits are refreshed periodically while it serves.

`FlapDamping`. Each failure soon after a recovery doubles the time that the endpoint must answer without a
failure before it receives requests again. Source: the exponential penalty of route flap damping (RFC 2439),
with the doubling of a backoff in place of a decaying figure of merit.
"""

import asyncio
import contextlib
import logging
import math
import os
import time
from dataclasses import asdict, dataclass, replace

from serve_app.core.routing.replica import UNREPORTED_CONTEXT, ReplicaReport, ReplicaSpec
from serve_app.engines.adapters import EngineReading, EngineServer, PageResponse, ReportedLimits, identify
from serve_app.engines.adapters.server import excerpt
from serve_app.engines.engine import HangWatch
from serve_app.engines.model.model import RecentMean
from serve_app.errors import EngineError
from serve_app.serving.channel.connector import Locate
from serve_app.serving.channel.replica_client import ReplicaClient
from serve_app.serving.channel.scheduler_client import ReplicaAddress, ServerAddress
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.gateway.upstream import UpstreamError, UpstreamPool, UpstreamSettings
from serve_app.serving.remote.settings import RemoteSettings
from serve_app.serving.remote.sources import EndpointUrl, FixedSource, source_of

# Limit on control answers; a wrong server's answer may be endless.
_MAX_PAGE_BYTES = 8 * 1024 * 1024


class EndpointAsleepError(EngineError):
    """The endpoint sleeps: it has left its GPU, and no request wakes it."""


class EndpointUnreachableError(EngineError):
    """The endpoint does not answer."""


class ControlClient:
    """Client for control requests to one endpoint, with a time limit; endpoints share connections."""

    def __init__(self, upstream: UpstreamPool, url: EndpointUrl, api_key: str, timeout_s: float) -> None:
        self._upstream = upstream
        self._url = url
        self._server = ServerAddress(url.host, url.port, url.scheme, url.server_name)
        self._timeout_s = timeout_s
        host = url.authority if not url.server_name else f"{url.server_name}:{url.port}"
        authorization = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f" HTTP/1.1\r\nhost: {host}\r\naccept: */*\r\n{authorization}\r\n"

    async def get(self, path: str) -> PageResponse:
        """Send a GET request.

        Raises:
            EndpointUnreachableError: no answer, not in time, or not HTTP.
        """
        head = f"GET {self._url.path}{path}{self._headers}".encode("latin-1")
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.closing(await self._upstream.send(self._server, head, b"")) as response:
                    body = bytearray()
                    while piece := await response.next():
                        body += piece
                        if len(body) > _MAX_PAGE_BYTES:
                            raise EndpointUnreachableError(
                                f"the answer is longer than {_MAX_PAGE_BYTES:,} bytes"
                            )
                    return PageResponse(response.status, bytes(body))
        except TimeoutError as exc:
            raise EndpointUnreachableError(
                f"{self._url}{path} gave no answer in {self._timeout_s:g} s"
            ) from exc
        except UpstreamError as exc:
            why, cause = str(exc), exc.__cause__
            if isinstance(cause, ConnectionError) and cause.errno:
                why = os.strerror(cause.errno)
            raise EndpointUnreachableError(f"{self._url}{path} gave no answer: {why}") from exc

    async def page(self, path: str) -> bytes:
        """Return a page that must exist.

        Raises:
            EndpointUnreachableError: see `get`.
            EngineError: the status is not 200.
        """
        answer = await self.get(path)
        if answer.status in (401, 403):
            raise EngineError(
                f"{self._url}{path} answered {answer.status}: give the endpoint's key as api_key or "
                "api_key_env"
            )
        if answer.status != 200:
            raise EngineError(f"{self._url}{path} answered {answer.status}: {excerpt(answer.body)}")
        return answer.body


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointIdentity:
    """Server and limits of one endpoint, as it reports them or as configured.

    Attributes:
        server: with the configured limits in place of those that it reports.
        tpot_s: as in `ReplicaSpec`; the mean over all tokens that the server had generated.
    """

    server: EngineServer
    tpot_s: float | None = None

    @property
    def adapters(self) -> tuple[str, ...]:
        """LoRA adapters that it lists."""
        return tuple(sorted(each.model for each in self.server.models if each.base is not None))


async def identified(control: ControlClient, url: EndpointUrl, settings: RemoteSettings) -> EndpointIdentity:
    """Identify an endpoint.

    Raises:
        EngineError: it does not answer, rejects the key, or lacks a model.
    """
    try:
        server = await identify(control.get)
    except EngineError as exc:
        if str(url) in str(exc):
            raise
        raise EngineError(f"{url}{exc}") from exc
    names = [listing.model for listing in server.models]
    wanted = settings.served_model_names or ()
    if missing := [name for name in wanted if name not in names]:
        raise EngineError(
            f"{url} serves {', '.join(names) or 'no model'} but not {', '.join(missing)}: start it with "
            f"--served-model-name {' '.join(wanted)}, or name another model here; a name that only clients "
            "use is a route (gateway.routes) and no alias"
        )
    stated = server.limits
    limits = ReportedLimits(
        max_model_len=settings.max_model_len or stated.max_model_len,
        kv_tokens=settings.kv_tokens or stated.kv_tokens,
        max_num_seqs=settings.max_num_seqs or stated.max_num_seqs,
    )
    return EndpointIdentity(server=replace(server, limits=limits), tpot_s=await _mean_tpot_s(control, server))


async def unusable_endpoints(settings: RemoteSettings) -> dict[str, str]:
    """Query the endpoints that are configured as URLs, and return why some cannot be used, by URL.

    Raises:
        EngineError: their API key is not known.
    """
    sources = (source_of(text) for text in settings.endpoints)
    urls = [source.url for source in sources if isinstance(source, FixedSource)]
    upstream = UpstreamPool(UpstreamSettings(connect_timeout_s=settings.metrics_timeout_s))
    key, failures = settings.key(), dict[str, str]()

    async def query(url: EndpointUrl) -> None:
        try:
            await identified(ControlClient(upstream, url, key, settings.metrics_timeout_s), url, settings)
        except EndpointUnreachableError as exc:
            failures[str(url)] = f"{exc}: start its server, or correct the URL"
        except EngineError as exc:
            failures[str(url)] = str(exc)

    await asyncio.gather(*map(query, urls))
    upstream.close()
    return failures


async def _mean_tpot_s(control: ControlClient, server: EngineServer) -> float | None:
    if server.metrics_path is None:
        return None
    reading = server.read(await control.page(server.metrics_path))
    return reading.token_gaps_s / reading.token_gaps if reading.token_gaps and reading.token_gaps_s else None


_FIRST_HOLD_S = 1.0
_LONGEST_HOLD_S = 60.0
# A failure this long after a recovery resets the penalty.
_SETTLED_S = 60.0


class FlapDamping:
    """Penalty of one endpoint; all times in seconds of one clock."""

    def __init__(self) -> None:
        self._hold_s = 0.0
        self._up_since: float | None = None
        self._answers_since: float | None = None

    def __repr__(self) -> str:
        return f"<FlapDamping hold {self._hold_s:g} s>"

    def on_failure(self, now: float) -> None:
        """Record a failure."""
        self._answers_since = None
        if self._up_since is None:
            return
        settled = now - self._up_since >= _SETTLED_S
        self._hold_s = 0.0 if settled else min(max(_FIRST_HOLD_S, 2 * self._hold_s), _LONGEST_HOLD_S)
        self._up_since = None

    def on_answer(self, now: float) -> float:
        """Record an answer, and return the remaining penalty in seconds; 0 for none."""
        if self._answers_since is None:
            self._answers_since = now
        left_s = max(0.0, self._answers_since + self._hold_s - now)
        if not left_s and self._up_since is None:
            self._up_since = now
        return left_s


logger = logging.getLogger("ray.serve")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
# Flags of a server do not change while it runs, but its list of adapters may.
_LOOK_AGAIN_S = 10.0
# Intervals between two readings of an engine that is not full, and the share of its KV cache above which it
# is. Requests wait for the capacity of a full engine, so that late readings delay them.
_CALM_INTERVALS = 2.5
_FULL_KV_RATIO = 0.7
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

    def __init__(self, url: EndpointUrl, context: EndpointContext) -> None:
        self.url = url
        self.failure = "not identified yet"
        self.down_since = time.time()
        self._context = context
        timeout_s = context.settings.metrics_timeout_s
        self._control = ControlClient(context.upstream, url, context.api_key, timeout_s)
        self._damping = FlapDamping()
        self._tpot = RecentMean()
        self._hang = HangWatch()
        self._progress: tuple[float | None, ...] | None = None
        self._identity: EndpointIdentity | None = None
        self._client: ReplicaClient | None = None
        self._reading = EngineReading()
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
    def is_asleep(self) -> bool:
        """True if it receives no requests because it sleeps."""
        return bool(self.failure) and self._reading.sleeps

    @property
    def replica_id(self) -> str:
        """Replica id, independent of the watching process."""
        return f"{self._context.pool}/{self.url.authority}{self.url.path}"

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
        server = self._identity.server if self._identity else None
        return {
            "url": str(self.url),
            "pool": self._context.pool,
            "replica": self.replica_id,
            "state": "asleep" if self.is_asleep else "closed" if self.failure else "serving",
            "reason": self.failure,
            "since": self.down_since if self.failure else None,
            "server": f"{server.kind} {server.version or ''}".strip() if server else "",
            "models": [listing.model for listing in server.models] if server else [],
            **asdict(server.limits if server else ReportedLimits()),
            "limitations": list(server.limitations) if server else [],
        }

    async def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._identify()
            except Exception as exc:  # noqa: BLE001 - an unexpected answer must not end the attempts
                # `_report` records the failures of a registered endpoint.
                if self._client is None:
                    self._record_failure(str(exc) if isinstance(exc, EngineError) else repr(exc))
                    self.is_rejected = not isinstance(exc, EndpointUnreachableError)
            await asyncio.sleep(pause_s if self._client is None else _LOOK_AGAIN_S)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _identify(self) -> None:
        """Identify the endpoint; register it at the scheduler, or send changed limits.

        Raises:
            EngineError: it does not answer, or cannot be used.
        """
        found = await identified(self._control, self.url, self._context.settings)
        before = self._identity
        if before is not None:
            # The first TPOT is only a prior; reports have the current one.
            found = replace(found, tpot_s=before.tpot_s)
        self._identity, spec = found, self._spec(found)
        if before is None or self._client is None:
            for limitation in found.server.limitations:
                logger.warning(
                    "event=endpoint_limitation endpoint=%s server=%s limitation=%r",
                    self.url,
                    found.server.kind,
                    limitation,
                )
            self._client = self._registered(spec, found.server)
            self._client.start()
        elif spec != self._spec(before):
            logger.info("event=endpoint_changed endpoint=%s spec=%r", self.url, spec)
            self._client.change(spec)

    def _registered(self, spec: ReplicaSpec, server: EngineServer) -> ReplicaClient:
        context = self._context
        address = ReplicaAddress(
            replica_id=self.replica_id,
            pool=context.pool,
            host=self.url.host,
            port=self.url.port,
            token="",
            scheme=self.url.scheme,
            server_name=self.url.server_name,
            path=self.url.path,
            api_key=context.api_key,
            names_responses=server.names_responses,
        )
        return ReplicaClient(
            spec, address, context.locate, self._report, context.channel, self._intervals_to_next_reading
        )

    def _spec(self, identity: EndpointIdentity) -> ReplicaSpec:
        limits = identity.server.limits
        return ReplicaSpec(
            replica_id=self.replica_id,
            pool=self._context.pool,
            max_model_len=limits.max_model_len or UNREPORTED_CONTEXT,
            kv_tokens=limits.kv_tokens,
            max_num_seqs=limits.max_num_seqs,
            tpot_s=identity.tpot_s,
            adapters=identity.adapters,
            stall_timeout_s=self._context.settings.hang_timeout_s,
        )

    async def _report(self) -> ReplicaReport:
        """Return the load. Each report has a new reading, as `received=None` requires.

        Raises:
            EngineError: the load cannot be read, or the endpoint sleeps or is held back.
        """
        loop = asyncio.get_running_loop()
        assert self._identity is not None, "it reports once it is known"
        try:
            if self.failure and not self.is_asleep:
                await self._identify()
            reading = await self._read(self._identity.server, loop.time())
            self._reading = reading
            self._check_engine(reading, loop.time())
        except EndpointAsleepError as exc:
            self._record_failure(str(exc))
            raise
        except EngineError as exc:
            self._reading = EngineReading()
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

    def _check_engine(self, reading: EngineReading, now: float) -> None:
        """Check that the engine is awake and computes; the front end of a hung one repeats the last load.

        Raises:
            EndpointAsleepError: it sleeps.
            EngineError: it hangs.
        """
        if reading.sleeps:
            raise EndpointAsleepError(f"{self.url} sleeps: wake it up with POST /wake_up")
        if reading.progress is None:
            return
        busy = bool(reading.running or reading.waiting)
        hanging_s = self._hang.update(reading.progress, busy=busy, now=now)
        limit_s = self._context.settings.hang_timeout_s
        if hanging_s > limit_s:
            raise EngineError(
                f"{self.url} hangs: it has requests and has computed nothing for {hanging_s:.0f} s "
                f"(hang_timeout_s {limit_s:g})"
            )

    def _intervals_to_next_reading(self) -> float:
        reading = self._reading
        most = self._identity.server.limits.max_num_seqs if self._identity else None
        is_full = (
            bool(reading.waiting)
            or (reading.kv_usage_ratio or 0.0) > _FULL_KV_RATIO
            or (most is not None and (reading.running or 0) >= most)
        )
        return 1.0 if is_full or (self.failure and not self.is_asleep) else _CALM_INTERVALS

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
