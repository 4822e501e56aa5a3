"""Load of an in-process vLLM engine, derived from its step statistics."""

import time
from collections.abc import Sequence
from typing import Any

from serve_app.engines.engine import EngineLoad
from serve_app.engines.model.recent_mean import RecentMean


class LoadMeter:
    """Load of an in-process engine, updated after each of its `steps` and read a few times per second."""

    def __init__(self) -> None:
        self.steps = 0
        self._running: dict[int, int] = {}
        self._kv_usage_ratio: dict[int, float] = {}
        self._token_gaps = 0
        self._token_gaps_s = 0.0
        self._tpot = RecentMean()
        self._tpot.record(0.0, 0, float("-inf"))

    def __repr__(self) -> str:
        return f"<LoadMeter running={sum(self._running.values())} token_gaps={self._token_gaps}>"

    def record_step(self, core: int, running: int, kv_usage_ratio: float) -> None:
        """Record the batch of one engine core after a step."""
        self.steps += 1
        self._running[core] = running
        self._kv_usage_ratio[core] = kv_usage_ratio

    def record_tokens(self, gaps_s: Sequence[float], now: float) -> None:
        """Record output tokens, each generated `gaps_s` seconds after the previous token of its request."""
        if gaps_s:
            self._token_gaps += len(gaps_s)
            self._token_gaps_s += sum(gaps_s)
            self._tpot.record(self._token_gaps_s, self._token_gaps, now)

    def load(self, unfinished: int, now: float) -> EngineLoad:
        """Return the load, given the number of unfinished requests in the frontend.

        The frontend counts a request from submission to its last token or abort, the core only at its steps.
        So a request that the core has not seen yet counts as waiting, and an aborted one no longer counts as
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
    """Stat logger that passes the statistics of each engine step to a `LoadMeter`.

    Implements vLLM's `StatLoggerBase`. vLLM creates one per engine core, in addition to its own loggers.
    """

    def __init__(self, meter: LoadMeter, _vllm_config: object, engine_index: int = 0) -> None:
        self._meter = meter
        self._core = engine_index

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_others: object) -> None:
        """Record a step. vLLM passes `SchedulerStats` and `IterationStats`, either of which may be None."""
        if scheduler_stats is not None:
            running, usage = scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage
            self._meter.record_step(self._core, running, usage)
        if iteration_stats is not None:
            self._meter.record_tokens(iteration_stats.inter_token_latencies_iter, time.monotonic())

    def log_engine_initialized(self) -> None:
        """Do nothing: the limits are read from the engine's configuration."""

    def log(self) -> None:
        """Do nothing: vLLM's own logger writes the periodic line."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Do nothing: the engine of a replica never sleeps."""
