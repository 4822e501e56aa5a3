"""The load of a vLLM engine, from its own statistics.

`read_metrics` reads the Prometheus text of a vLLM server. `LoadMeter` gets the same figures from an engine in
this process, step by step. Only the few samples that are needed are parsed, because a server is read five
times a second, and most of its page is buckets of histograms.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.engine_model.recent_mean import RecentMean
from serve_app.engines.engine import EngineLoad
from serve_app.errors import EngineError

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_CACHE_CONFIG = "vllm:cache_config_info"
_STEPS = "vllm:iteration_tokens_total_count"
# Newest name first: a server may publish an old name beside the new one.
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_TOKEN_GAPS = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")

_WANTED = frozenset(
    (
        *(_RUNNING, _WAITING, _CACHE_CONFIG, _STEPS),
        *_KV_USAGE,
        *(f"{name}_sum" for name in _TOKEN_GAPS),
        *(f"{name}_count" for name in _TOKEN_GAPS),
    )
)
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmMetrics:
    """One reading of a vLLM server's metrics, summed over its engine cores.

    Attributes:
        kv_usage_ratio: mean over the cores.
        token_gaps: gaps between output tokens seen since the server started.
        token_gaps_s: their sum, in seconds.
        kv_tokens: capacity of the KV cache; None when the server does not state it.
        steps: iterations that gave a token; None when the server does not count them.
    """

    waiting: int
    running: int
    kv_usage_ratio: float
    token_gaps: int
    token_gaps_s: float
    kv_tokens: int | None
    steps: int | None

    @property
    def progress(self) -> tuple[float, ...] | None:
        """What changes while the engine computes; None when the server does not count its iterations.

        A long prompt takes iterations that give no token. Each of them takes more of the KV cache.
        """
        return None if self.steps is None else (self.steps, self.kv_usage_ratio, self.running, self.waiting)


def read_metrics(text: str) -> VllmMetrics:
    """Read the text of vLLM's `/metrics`.

    Raises:
        EngineError: the text has no `vllm:` gauges, so it is not the page of a vLLM server.
    """
    samples = _wanted_samples(text)
    kv_usage = _first_present(samples, _KV_USAGE)
    if _RUNNING not in samples or _WAITING not in samples or not kv_usage:
        raise EngineError(
            f"the metrics lack {_RUNNING}, {_WAITING} or {_KV_USAGE[0]}: is it a vLLM server (0.6 or later) "
            "that logs statistics?"
        )
    return VllmMetrics(
        waiting=round(_total(samples, _WAITING)),
        running=round(_total(samples, _RUNNING)),
        kv_usage_ratio=sum(value for _, value in kv_usage) / len(kv_usage),
        token_gaps=round(sum(v for _, v in _first_present(samples, _suffixed(_TOKEN_GAPS, "_count")))),
        token_gaps_s=sum(v for _, v in _first_present(samples, _suffixed(_TOKEN_GAPS, "_sum"))),
        kv_tokens=_kv_tokens(samples.get(_CACHE_CONFIG, [])),
        steps=round(_total(samples, _STEPS)) if _STEPS in samples else None,
    )


def kv_capacity_tokens(size_tokens: int | None, num_blocks: int, block_size: int, cores: int = 1) -> int:
    """Tokens in the KV caches of all engine cores together; 0 for a model without one.

    Args:
        size_tokens: one core's cache as vLLM states it; None from releases that do not.
        num_blocks: blocks of all cores together. Where layers differ in kind, blocks differ in size, so
            `size_tokens` takes precedence.
        block_size: tokens in a block.
        cores: engine cores (data parallel ranks). Each reserves one block as padding.
    """
    total = num_blocks * block_size if size_tokens is None else size_tokens * cores
    return max(total - cores * block_size, 0)


class LoadMeter:
    """The load of an engine in this process: updated at each of its steps, read a few times a second.

    Attributes:
        steps: iterations of the engine so far.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._running: dict[int, int] = {}
        self._kv_usage_ratio: dict[int, float] = {}
        self._token_gaps = 0
        self._token_gaps_s = 0.0
        self._tpot = RecentMean()
        self._tpot.note(0.0, 0, float("-inf"))

    def __repr__(self) -> str:
        return f"<LoadMeter running={sum(self._running.values())} token_gaps={self._token_gaps}>"

    def on_step(self, core: int, running: int, kv_usage_ratio: float) -> None:
        """Note the batch of one engine core after a step."""
        self.steps += 1
        self._running[core] = running
        self._kv_usage_ratio[core] = kv_usage_ratio

    def on_tokens(self, gaps_s: Sequence[float], now: float) -> None:
        """Note output tokens that came `gaps_s` seconds after the tokens before them."""
        if gaps_s:
            self._token_gaps += len(gaps_s)
            self._token_gaps_s += sum(gaps_s)
            self._tpot.note(self._token_gaps_s, self._token_gaps, now)

    def load(self, unfinished: int, now: float) -> EngineLoad:
        """The load, given the number of requests that the front end holds.

        The front end counts a request from its submission to its last token or abort, the core only at its
        steps. So a request that the core has not seen yet counts as waiting, and an aborted one no longer as
        running. An engine without requests is empty, whatever its last step reported.
        """
        running = min(sum(self._running.values()), unfinished)
        usage = list(self._kv_usage_ratio.values())
        return EngineLoad(
            waiting=unfinished - running,
            running=running,
            kv_usage_ratio=sum(usage) / len(usage) if usage and unfinished else 0.0,
            tpot_s=self._tpot.mean(now),
        )


class StepRecorder:
    """Passes the statistics of each engine step to a `LoadMeter`; satisfies vLLM's `StatLoggerBase`.

    vLLM makes one per engine core, and keeps its own loggers, including that of `/metrics`.
    """

    def __init__(self, meter: LoadMeter, _vllm_config: object, engine_index: int = 0) -> None:
        self._meter = meter
        self._core = engine_index

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_others: object) -> None:
        """Called after each step with vLLM's `SchedulerStats` and `IterationStats`, either of them None."""
        if scheduler_stats is not None:
            running, usage = scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage
            self._meter.on_step(self._core, running, usage)
        if iteration_stats is not None:
            self._meter.on_tokens(iteration_stats.inter_token_latencies_iter, time.monotonic())

    def log_engine_initialized(self) -> None:
        """Do nothing: the engine's limits are read from its configuration."""

    def log(self) -> None:
        """Do nothing: vLLM's own logger writes the periodic line."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Do nothing: the engine of a replica never sleeps."""


_Samples = dict[str, list[tuple[str, float]]]


def _wanted_samples(text: str) -> _Samples:
    """The samples that are needed, as (labels, value) by name; most lines are buckets of histograms."""
    samples: _Samples = {}
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        name = line.partition("{")[0].partition(" ")[0]
        if name not in _WANTED:
            continue
        labels, _, value = line[len(name) :].rpartition(" ")
        try:
            samples.setdefault(name, []).append((labels, float(value)))
        except ValueError as exc:
            raise EngineError(f"the metrics hold a line that is not Prometheus text: {line[:200]!r}") from exc
    return samples


def _total(samples: _Samples, name: str) -> float:
    return sum(value for _, value in samples.get(name, []))


def _first_present(samples: _Samples, names: Sequence[str]) -> list[tuple[str, float]]:
    return next((samples[name] for name in names if name in samples), [])


def _suffixed(names: Sequence[str], suffix: str) -> list[str]:
    return [name + suffix for name in names]


def _kv_tokens(cache_configs: list[tuple[str, float]]) -> int | None:
    """Capacity over all cores, each with a sample of the same labels; None when it is not stated."""
    if not cache_configs:
        return None
    labels = dict(_LABEL.findall(cache_configs[0][0]))
    blocks, block_size, size = (
        int(value) if (value := labels.get(name, "")).isdigit() else None
        for name in ("num_gpu_blocks", "block_size", "kv_cache_size_tokens")
    )
    if blocks is None or block_size is None:
        return None
    return kv_capacity_tokens(size, blocks, block_size, len(cache_configs)) or None
