"""What is a vLLM engine doing, by its own account?

`read_metrics` reads the Prometheus text of a vLLM server; `LoadMeter` takes the same figures from an engine
in this process, step by step. Both take the TPOT from `RecentMean`.
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
_PREEMPTIONS = "vllm:num_preemptions_total"
_CACHE_CONFIG = "vllm:cache_config_info"
# Newest name first: a server may publish an old name beside the new one.
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_TOKEN_GAPS = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")

_WANTED = frozenset(
    (
        *(_RUNNING, _WAITING, _PREEMPTIONS, _CACHE_CONFIG),
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
        preemptions: since the server started.
        token_gaps: gaps between output tokens seen since the server started.
        token_gaps_s: their sum, in seconds.
        kv_tokens: capacity of the KV cache; None when the server does not tell.
    """

    waiting: int
    running: int
    kv_usage_ratio: float
    preemptions: int
    token_gaps: int
    token_gaps_s: float
    kv_tokens: int | None


def read_metrics(text: str) -> VllmMetrics:
    """Read the text of vLLM's `/metrics`.

    Raises:
        EngineError: when the text has no `vllm:` gauges, so it is no vLLM that speaks.
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
        preemptions=round(_total(samples, _PREEMPTIONS)),
        token_gaps=round(sum(v for _, v in _first_present(samples, _suffixed(_TOKEN_GAPS, "_count")))),
        token_gaps_s=sum(v for _, v in _first_present(samples, _suffixed(_TOKEN_GAPS, "_sum"))),
        kv_tokens=_kv_tokens(samples.get(_CACHE_CONFIG, [])),
    )


def kv_capacity_tokens(size_tokens: int | None, num_blocks: int, block_size: int, cores: int = 1) -> int:
    """Tokens that the KV caches of all engine cores hold together; 0 for a model without one.

    Args:
        size_tokens: one core's cache as vLLM states it; None from releases that do not.
        num_blocks: blocks of all cores together. Where layers differ in kind, these are not all of one size,
            so what vLLM states comes first.
        block_size: tokens in a block.
        cores: engine cores (data parallel ranks). Each sets one block aside as padding and never fills it.
    """
    total = num_blocks * block_size if size_tokens is None else size_tokens * cores
    return max(total - cores * block_size, 0)


class LoadMeter:
    """What is the engine in this process doing? Fed at each of its steps, read a few times a second."""

    def __init__(self) -> None:
        self._running: dict[int, int] = {}
        self._kv_usage_ratio: dict[int, float] = {}
        self._preemptions = 0
        self._token_gaps = 0
        self._token_gaps_s = 0.0
        self._tpot = RecentMean()
        self._tpot.note(0.0, 0, float("-inf"))

    def __repr__(self) -> str:
        return f"<LoadMeter running={sum(self._running.values())} token_gaps={self._token_gaps}>"

    def on_step(self, core: int, running: int, kv_usage_ratio: float) -> None:
        """One engine core reports the state of its batch after a step."""
        self._running[core] = running
        self._kv_usage_ratio[core] = kv_usage_ratio

    def on_tokens(self, gaps_s: Sequence[float], preempted: int, now: float) -> None:
        """Output tokens came `gaps_s` after the ones before them, and so many sequences were preempted."""
        self._preemptions += preempted
        if gaps_s:
            self._token_gaps += len(gaps_s)
            self._token_gaps_s += sum(gaps_s)
            self._tpot.note(self._token_gaps_s, self._token_gaps, now)

    def load(self, unfinished: int, now: float) -> EngineLoad:
        """The load, given how many requests the front end holds.

        The front end counts a request from its submission to its last token or abort, the core only at
        its steps: so a request that the core has not yet seen counts as waiting, one that was aborted
        no longer as running, and an engine without requests is empty whatever its last step said.
        """
        running = min(sum(self._running.values()), unfinished)
        usage = list(self._kv_usage_ratio.values())
        return EngineLoad(
            waiting=unfinished - running,
            running=running,
            kv_usage_ratio=sum(usage) / len(usage) if usage and unfinished else 0.0,
            tpot_s=self._tpot.mean(now),
            preemptions=self._preemptions,
        )


class StepRecorder:
    """Hands the statistics of each engine step to a `LoadMeter`; has the shape of vLLM's `StatLoggerBase`.

    vLLM makes one for each engine core, and keeps its own loggers beside it, that for `/metrics` included.
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
            gaps_s, preempted = iteration_stats.inter_token_latencies_iter, iteration_stats.num_preempted_reqs
            self._meter.on_tokens(gaps_s, preempted, time.monotonic())

    def log_engine_initialized(self) -> None:
        """Nothing to say: the engine's limits are read from its configuration."""

    def log(self) -> None:
        """Nothing to say: vLLM's own logger writes the periodic line."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Nothing to keep: no one puts a replica's engine to sleep."""


_Samples = dict[str, list[tuple[str, float]]]


def _wanted_samples(text: str) -> _Samples:
    """The few samples that we use, as (labels, value) by name; most lines are buckets of histograms."""
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
    """Capacity over all cores, each with a sample of the same labels; None when it is not told."""
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
