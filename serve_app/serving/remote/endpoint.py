"""One endpoint: its control pages, its identity, and its life as a replica at the scheduler."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace

from serve_app.core.routing.replica import UNTOLD_CONTEXT, ReplicaReport, ReplicaSpec
from serve_app.engines.adapters import EngineReading, EngineServer, PageAnswer, identify
from serve_app.engines.hang_watch import HangWatch
from serve_app.engines.model.recent_mean import RecentMean
from serve_app.errors import EngineError
from serve_app.serving.channel.connector import Locate
from serve_app.serving.channel.replica_client import ReplicaClient
from serve_app.serving.channel.scheduler_client import ReplicaAddress, ServerAddress
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.gateway.upstream import UpstreamError, UpstreamPool, UpstreamResponse
from serve_app.serving.remote.settings import RemoteSettings
from serve_app.serving.remote.sources import EndpointUrl

# Control requests to an endpoint: its models, its metrics.


# No page of a server's own is longer; a stranger's may be endless.
_MAX_PAGE_BYTES = 8 * 1024 * 1024


class EndpointUnreachableError(EngineError):
    """Nothing answers at the endpoint's address."""


@dataclass(frozen=True, slots=True)
class Page:
    """An answer to a control request."""

    status: int
    body: bytes


class ControlClient:
    """Asks one endpoint for pages, on kept connections.

    Args:
        upstream: connections, shared by all endpoints.
        api_key: sent as a bearer token; empty for none.
        timeout_s: for a whole request.
    """

    def __init__(self, upstream: UpstreamPool, url: EndpointUrl, api_key: str, timeout_s: float) -> None:
        self._upstream = upstream
        self._url = url
        self._server = ServerAddress(url.host, url.port, url.scheme, url.server_name)
        self._timeout_s = timeout_s
        host = url.authority if not url.server_name else f"{url.server_name}:{url.port}"
        authorization = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f" HTTP/1.1\r\nhost: {host}\r\naccept: */*\r\n{authorization}\r\n"

    async def get(self, path: str) -> Page:
        """Ask for a page.

        Raises:
            EndpointUnreachableError: nothing answers, or not in time, or not in HTTP.
        """
        head = f"GET {self._url.path}{path}{self._headers}".encode("latin-1")
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._upstream.send(self._server, head, b"")
                try:
                    return Page(response.status, await _limited(response))
                finally:
                    response.close()
        except TimeoutError as exc:
            raise EndpointUnreachableError(
                f"{self._url}{path} gave no answer in {self._timeout_s:g} s"
            ) from exc
        except UpstreamError as exc:
            raise EndpointUnreachableError(f"{self._url}{path} gave no answer: {exc}") from exc

    async def page(self, path: str) -> bytes:
        """Ask for a page that must be there.

        Raises:
            EndpointUnreachableError: see `get`.
            EngineError: another status than 200.
        """
        answer = await self.get(path)
        if answer.status in (401, 403):
            raise EngineError(
                f"{self._url}{path} answered {answer.status}: give the endpoint's key as api_key or "
                "api_key_env"
            )
        if answer.status != 200:
            shown = answer.body[:200].decode("utf-8", "replace")
            raise EngineError(f"{self._url}{path} answered {answer.status}: {shown}")
        return answer.body


async def _limited(response: UpstreamResponse) -> bytes:
    pieces, length = [], 0
    while piece := await response.next():
        pieces.append(piece)
        length += len(piece)
        if length > _MAX_PAGE_BYTES:
            raise EndpointUnreachableError(f"the answer is longer than {_MAX_PAGE_BYTES:,} bytes")
    return b"".join(pieces)


# What an endpoint is to the scheduler: its server, and its limits, completed by the settings.


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointIdentity:
    """One endpoint as it describes itself, completed by the settings.

    Attributes:
        max_model_len: as in `ReplicaSpec`, and None where it is not told.
        kv_tokens, max_num_seqs: as in `ReplicaSpec`.
        tpot_s: likewise; the mean over all that the server had generated when it was asked.
    """

    server: EngineServer
    max_model_len: int | None
    kv_tokens: int | None
    max_num_seqs: int | None
    tpot_s: float | None = None

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that it lists."""
        return tuple(sorted(each.model for each in self.server.models if each.base is not None))


async def identified(control: ControlClient, url: EndpointUrl, settings: RemoteSettings) -> EndpointIdentity:
    """Ask an endpoint what it is.

    Raises:
        EngineError: it does not answer, refuses the key, or lacks a model.
    """

    async def get(path: str) -> PageAnswer:
        page = await control.get(path)
        return PageAnswer(page.status, page.body, {})

    try:
        server = await identify(get)
    except EngineError as exc:
        if str(url) in str(exc):
            raise
        raise EngineError(f"{url}{exc}") from exc
    names = [listing.model for listing in server.models]
    wanted = settings.served_model_names or ()
    if missing := [name for name in wanted if name not in names]:
        raise EngineError(
            f"{url} serves {', '.join(names) or 'no model'} but not {', '.join(missing)}: start it with "
            f"--served-model-name {' '.join(wanted)}, or name another model here"
        )
    stated = server.limits
    return EndpointIdentity(
        server=server,
        max_model_len=settings.max_model_len or stated.max_model_len,
        kv_tokens=settings.kv_tokens or stated.kv_tokens,
        max_num_seqs=settings.max_num_seqs or stated.max_num_seqs,
        tpot_s=await _mean_tpot_s(control, server),
    )


async def _mean_tpot_s(control: ControlClient, server: EngineServer) -> float | None:
    if server.metrics_path is None:
        return None
    reading = server.read(await control.page(server.metrics_path))
    return reading.token_gaps_s / reading.token_gaps if reading.token_gaps and reading.token_gaps_s else None


# Damping of endpoints that come and go: one that fails again and again has to prove itself for longer.
#
# Each failure that follows soon after a recovery doubles the time that the endpoint must answer without a
# failure before it gets requests again. Source: the exponential penalty of route flap damping (RFC 2439),
# with the doubling of a backoff in place of a decaying figure of merit.


_FIRST_HOLD_S = 1.0
_LONGEST_HOLD_S = 60.0
# An endpoint that has served for so long since its recovery has settled.
_SETTLED_S = 60.0


class FlapDamping:
    """The penalty of one endpoint; all times in seconds of one clock."""

    def __init__(self) -> None:
        self._hold_s = 0.0
        self._up_since: float | None = None
        self._answers_since: float | None = None

    def __repr__(self) -> str:
        return f"<FlapDamping hold {self._hold_s:g} s>"

    @property
    def hold_s(self) -> float:
        """How long it must answer before it gets requests."""
        return self._hold_s

    def on_failure(self, now: float) -> None:
        """It does not answer."""
        self._answers_since = None
        if self._up_since is None:
            return
        settled = now - self._up_since >= _SETTLED_S
        self._hold_s = 0.0 if settled else min(max(_FIRST_HOLD_S, 2 * self._hold_s), _LONGEST_HOLD_S)
        self._up_since = None

    def on_answer(self, now: float) -> float:
        """It answers; return for how long it is still held back, 0 for not at all."""
        if self._answers_since is None:
            self._answers_since = now
        left_s = max(0.0, self._answers_since + self._hold_s - now)
        if not left_s and self._up_since is None:
            self._up_since = now
        return left_s


# One endpoint: identified, watched, and registered with the scheduler like a replica.
#
# - Until it can be identified it is asked again, after growing pauses; nothing is sent there.
# - Then its load is read about five times a second. A reading that fails closes it at once, and what runs
#   there is left to the gateways. When it answers again, it is identified anew: it may have been restarted
#   with other limits. One that fails again and again is held back for longer each time (`damping`).
# - Its limits are looked at now and then while it serves.


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
