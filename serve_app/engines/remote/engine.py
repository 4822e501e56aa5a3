"""An OpenAI-compatible vLLM server that runs elsewhere, as an engine.

`proxy` forwards the requests. This module finds the limits of the server, reads its load from its metrics,
and checks its health.
"""

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp

from serve_app.engine_model.recent_mean import RecentMean
from serve_app.engines.engine import ASGIApp, EngineLimits, EngineLoad
from serve_app.engines.hang_watch import HangWatch
from serve_app.engines.remote.proxy import RemoteProxy, Upstream
from serve_app.engines.vllm_metrics import VllmMetrics, read_metrics
from serve_app.errors import EngineError
from serve_app.settings_base import ADVANCED, POSITIVE, at_least, settings

# Interval between attempts to reach a server that does not listen yet.
_START_POLL_S = 0.5
# A control request (models, metrics, health) that takes longer is a failure.
_CONTROL_TIMEOUT_S = 5.0


@settings
class RemoteEngineSettings:
    """The server's address, and the limits that it does not state by itself.

    Attributes:
        base_url: its address, with or without `/v1` at the end.
        api_key: sent to it as a bearer token.
        api_key_env: environment variable of the replicas that holds the key, so that no file has to.
        served_model_names: names that it must serve; empty checks none.
        max_model_len: its context limit in tokens; vLLM states it.
        kv_tokens: its KV cache in tokens; vLLM states it.
        max_num_seqs: most sequences in its batch (`--max-num-seqs`); vLLM does not state it.
        start_timeout_s: how long to wait for it to listen.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    api_key_env: str | None = None
    served_model_names: Annotated[tuple[str, ...] | None, ADVANCED] = None
    max_model_len: Annotated[int | None, at_least(1).hint("leave it out to ask the server")] = None
    kv_tokens: Annotated[int | None, at_least(1).hint("leave it out to ask the server")] = None
    max_num_seqs: Annotated[int | None, at_least(1).hint("leave it out to ask the server")] = None
    start_timeout_s: Annotated[float, POSITIVE, ADVANCED] = 60.0
    # The age of the load that backpressure sees; each reading costs both sides about a millisecond.
    scrape_interval_s: Annotated[float, POSITIVE, ADVANCED] = 0.2
    # An older load counts as unknown. Long enough for a server that is busy with one long prompt.
    stale_after_s: Annotated[float, POSITIVE, ADVANCED] = 2.0
    # A server that has requests, and whose metrics show no progress for so long, gets no more until they do.
    stall_timeout_s: Annotated[float, POSITIVE, ADVANCED] = 60.0
    # Seconds until an attempt to connect counts as failed.
    connect_timeout_s: Annotated[float, POSITIVE, ADVANCED] = 5.0
    # An answer without bytes for this long fails; must exceed the longest prefill behind the longest queue.
    read_timeout_s: Annotated[float, POSITIVE] = 600.0
    # Shorter than the server keeps idle connections (vLLM: 5 s), or a request may use a closing one.
    keep_alive_s: Annotated[float, POSITIVE, ADVANCED] = 4.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"base_url must look like http://host:8000, got {self.base_url!r}")
        if self.api_key is not None and self.api_key_env is not None:
            raise ValueError("give api_key or api_key_env, not both")
        if self.stale_after_s <= self.scrape_interval_s:
            raise ValueError(
                f"stale_after_s must exceed scrape_interval_s, got {self.stale_after_s} and "
                f"{self.scrape_interval_s}"
            )


class RemoteEngine:
    """A server by its URL: its API as an ASGI app, its load from its metrics."""

    def __init__(self, settings: RemoteEngineSettings) -> None:
        self._settings = settings
        self._base_url = settings.base_url.rstrip("/").removesuffix("/v1")
        self._upstream: Upstream | None = None
        self._app: RemoteProxy | None = None
        self._stall = HangWatch()
        self._stalled_s = 0.0
        self._scraping: asyncio.Task[None] | None = None
        self._metrics: VllmMetrics | None = None
        self._read_at = float("-inf")
        self._last_failure = "none was read yet"
        self._tpot = RecentMean()

    def __repr__(self) -> str:
        return f"<RemoteEngine {self._base_url} {self._metrics}>"

    async def start(self) -> EngineLimits:
        """Wait for the server, and find its limits.

        Raises:
            EngineError: it does not listen, refuses the key, lacks a model, or does not state a limit that
                the settings lack as well.
        """
        self._upstream = self._connect()
        try:
            models = await self._models_once_it_listens()
            self._note(read_metrics(await self._get_text("/metrics")))
            limits = self._limits(_max_model_len(models, self._settings.served_model_names or ()))
        except BaseException:
            await self.stop()
            raise
        self._app = RemoteProxy(self._upstream)
        self._scraping = asyncio.create_task(self._scrape_forever(), name=f"scrape {self._base_url}")
        return limits

    @property
    def app(self) -> ASGIApp:
        """The server's own API."""
        if self._app is None:
            raise EngineError(f"{self!r} has no app: call start() first")
        return self._app

    async def load(self) -> EngineLoad:
        """The load as last read.

        Raises:
            EngineError: the last reading is too old, there is none, or the server hangs.
        """
        now = time.monotonic()
        age_s = now - self._read_at
        if self._metrics is None or age_s > self._settings.stale_after_s:
            limit_s = self._settings.stale_after_s
            raise EngineError(
                f"the load of {self._base_url} is unknown: its metrics are {age_s:.1f} s old (limit "
                f"{limit_s:g} s), last failure: {self._last_failure}"
            )
        if self._stalled_s > self._settings.stall_timeout_s:
            raise EngineError(
                f"{self._base_url} hangs: it has requests and has computed nothing for "
                f"{self._stalled_s:.0f} s (stall_timeout_s {self._settings.stall_timeout_s:g})"
            )
        return EngineLoad(
            waiting=self._metrics.waiting,
            running=self._metrics.running,
            kv_usage_ratio=self._metrics.kv_usage_ratio,
            tpot_s=self._tpot.mean(now),
        )

    async def check_health(self) -> None:
        """Raise `EngineError` unless the server answers that it is healthy."""
        await self._get_text("/health", missing_is_fine=True)

    async def stop(self) -> None:
        """Close all connections; the server itself keeps running."""
        scraping, self._scraping = self._scraping, None
        if scraping is not None:
            scraping.cancel()
            await asyncio.gather(scraping, return_exceptions=True)
        upstream, self._upstream, self._app = self._upstream, None, None
        if upstream is not None:
            await upstream.session.close()

    def _connect(self) -> Upstream:
        settings = self._settings
        api_key = settings.api_key
        if settings.api_key_env is not None:
            api_key = os.environ.get(settings.api_key_env)
            if not api_key:
                raise EngineError(
                    f"the environment variable {settings.api_key_env} is not set: set it for the replicas, "
                    "or change api_key_env"
                )
        # No limit of connections: the scheduler decides how many requests run.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=settings.keep_alive_s)
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.read_timeout_s
        )
        session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return Upstream(session=session, base_url=self._base_url, api_key=api_key)

    async def _models_once_it_listens(self) -> Sequence[Mapping[str, Any]]:
        """The server's list of models; asks until it listens or `start_timeout_s` is over."""
        deadline = time.monotonic() + self._settings.start_timeout_s
        while True:
            try:
                return _models(await self._get_text("/v1/models"), self._base_url)
            except _UnreachableError:
                if time.monotonic() + _START_POLL_S > deadline:
                    raise
                await asyncio.sleep(_START_POLL_S)

    def _limits(self, stated_max_model_len: int | None) -> EngineLimits:
        assert self._metrics is not None
        settings = self._settings
        found = {
            "max_model_len": settings.max_model_len or stated_max_model_len,
            "kv_tokens": settings.kv_tokens or self._metrics.kv_tokens,
            "max_num_seqs": settings.max_num_seqs,
        }
        if unknown := [name for name, value in found.items() if value is None]:
            names = " and ".join(unknown)
            raise EngineError(
                f"{self._base_url} does not state its {names}: give {names} in the settings of this engine, "
                "as the server was started with"
            )
        stated = {name: value for name, value in found.items() if value is not None}
        gaps, gaps_s = self._metrics.token_gaps, self._metrics.token_gaps_s
        # Of all that the server has generated so far.
        return EngineLimits(**stated, tpot_s=gaps_s / gaps if gaps and gaps_s else None)

    async def _scrape_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.scrape_interval_s)
            try:
                self._note(read_metrics(await self._get_text("/metrics")))
            except EngineError as exc:
                # load() reports it once the last reading is too old; one missed reading is no event.
                self._last_failure = str(exc)

    def _note(self, metrics: VllmMetrics) -> None:
        self._metrics = metrics
        self._read_at = time.monotonic()
        self._tpot.note(metrics.token_gaps_s, metrics.token_gaps, self._read_at)
        if metrics.progress is not None:
            # One that has hung since it was idle goes on saying that it is.
            unanswered = 0 if self._app is None else self._app.unanswered
            busy = metrics.running + metrics.waiting + unanswered > 0
            self._stalled_s = self._stall.note(metrics.progress, busy=busy, now=self._read_at)

    async def _get_text(self, path: str, *, missing_is_fine: bool = False) -> str:
        """The body of a control request.

        Raises:
            EngineError: no answer, or an answer with an error status.
        """
        if self._upstream is None:
            raise EngineError(f"{self!r} has no connections: call start() first")
        api_key = self._upstream.api_key
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        url = f"{self._base_url}{path}"
        timeout = aiohttp.ClientTimeout(total=_CONTROL_TIMEOUT_S)
        try:
            async with self._upstream.session.get(url, headers=headers, timeout=timeout) as response:
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise _UnreachableError(f"{url} gave no answer: {exc or type(exc).__name__}") from exc
        if response.status in (401, 403):
            raise EngineError(f"{url} answered {response.status}: give the server's key as api_key")
        if response.status != 200 and not (missing_is_fine and response.status == 404):
            raise EngineError(f"{url} answered {response.status}: {text[:200]}")
        return text


class _UnreachableError(EngineError):
    """Nothing answers at the address."""


def _models(text: str, base_url: str) -> Sequence[Mapping[str, Any]]:
    try:
        models: Sequence[Mapping[str, Any]] = json.loads(text)["data"]
        readable = all(isinstance(model["id"], str) for model in models)
    except (ValueError, KeyError, TypeError):
        readable = False
    if not readable:
        raise EngineError(f"{base_url}/v1/models is no list of models: {text[:200]!r}")
    return models


def _max_model_len(models: Sequence[Mapping[str, Any]], wanted: Sequence[str]) -> int | None:
    """The context limit that the server states for the wanted models, which share one engine."""
    served = {model["id"]: model for model in models}
    if missing := [name for name in wanted if name not in served]:
        raise EngineError(
            f"the server serves {', '.join(served) or 'no model'} but not {', '.join(missing)}: start it "
            f"with --served-model-name {' '.join(wanted)}"
        )
    chosen = [served[name] for name in wanted] or models
    stated = [model["max_model_len"] for model in chosen if isinstance(model.get("max_model_len"), int)]
    return min(stated, default=None)
