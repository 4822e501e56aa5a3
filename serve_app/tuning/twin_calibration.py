"""Calibration of the twin's engines: from a profile or without one, fitted to the real engines.

This is a state machine without a clock, like the loop that owns it. It hands out a task (`engine_fit`) when
enough requests are new, and processes the result, which has the error of the current model on requests after
its fit. While that error is large or unknown, `obstacle` explains why there should be no search: a twin with
wrong engines proposes candidates that lose in production.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.core.settings_base import FINITE_NOT_NEGATIVE, FINITE_POSITIVE, at_least, settings
from serve_app.engines.model.model import EngineModelSettings
from serve_app.engines.model.roofline import load_profile
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.lab.calibration import FittedEngine
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulationSettings
from serve_app.tuning.engine_fit import (
    EngineFitResult,
    EngineFitTask,
    Engines,
    TwinError,
    engines_as_json,
    engines_of_json,
    is_pace_sample,
)
from serve_app.tuning.traffic import TrafficLog

_UNKNOWN = FittedEngine(
    # Only a placeholder to describe an engine with known limits whose step times are to be fitted.
    step_time=StepTimeModel(
        decode_base_s=0.02, decode_per_sequence_s=0.0001, prefill_base_s=0.02, prefill_per_token_s=0.0001
    ),
    latency_s=0.0,
)
_BLOCK = 16
"""Tokens per block of the KV cache, as in vLLM on GPUs."""
_DEFAULT_BUDGET = 2_048
"""`max_num_batched_tokens` of an engine that does not report it: the smaller of vLLM's usual defaults."""
_MAX_DOUBLINGS = 4
# Defaults for a server that reports neither.
_DEFAULT_KV_TOKENS, _DEFAULT_NUM_SEQS = 100_000, 256


@settings
class CalibrationSettings:
    """Settings for fitting the step times of the twin's engines to the real ones."""

    # Streamed responses before the first fit. With 200, the means of engines are known within a few percent.
    first_requests: Annotated[int, at_least(20)] = 200
    # New streamed responses before the model is checked again.
    check_requests: Annotated[int, at_least(1)] = 100
    # Seconds between two checks. A check takes some hundredths of a CPU second, a fit some seconds.
    every_s: Annotated[float, FINITE_NOT_NEGATIVE] = 60.0
    # Error of mean TTFT or TPOT above which there is no search, because candidates differ by as much.
    max_error_ratio: Annotated[float, FINITE_POSITIVE] = 0.15


class TwinCalibration:
    """Engines of one model's twin.

    Args:
        profile: name or path of the initial profile; None for none.

    Attributes:
        error: last measured error of the current model; None before that.
    """

    def __init__(self, settings: CalibrationSettings, profile: str | None) -> None:
        self._settings, self._profile_name = settings, profile
        self._profile = None if profile is None else load_profile(profile)
        self._fitted: Engines = {}
        self.error: TwinError | None = None
        self._fits = 0
        # Consecutive fits after which the twin was still wrong.
        self._fruitless = 0
        # Streamed responses since the last task, and times on this scheduler's clock.
        self._fresh, self._next_at, self._fitted_until = 0, -math.inf, -math.inf

    def __repr__(self) -> str:
        return f"<TwinCalibration {self.source()}>"

    @property
    def latency_s(self) -> float:
        """One-way latency between scheduler and engine in seconds."""
        latencies = [each.latency_s for each in self._fitted.values()]
        return max(latencies) / 2 if latencies else SimulationSettings().control_latency_s

    @property
    def obstacle(self) -> str:
        """Why the twin cannot be used for a search yet; empty if it can."""
        limit, error = self._settings.max_error_ratio, self.error
        if error is not None and error.max_abs > limit:
            return (
                f"the error of the twin exceeds {limit:.0%}: mean TTFT {error.ttft_ratio:+.0%}, "
                f"TPOT {error.tpot_ratio:+.0%} against {error.requests} requests"
            )
        if self._profile is not None or (self._fitted and error is not None):
            return ""
        if self._fitted:
            needed = self._settings.check_requests
            return f"the error of the twin is measured after {needed} more streamed responses"
        needed = self._settings.first_requests
        return f"the twin is fitted after {needed} streamed responses ({self._fresh} so far)"

    def restart(self) -> None:
        """Continue with a new scheduler, which has another clock."""
        self._fresh, self._next_at, self._fitted_until = 0, -math.inf, -math.inf

    def note(self, records: Sequence[RequestRecord]) -> None:
        """Count the ended requests that show an engine's pace."""
        self._fresh += sum(map(is_pace_sample, records))

    def due(
        self, traffic: TrafficLog, replicas: Sequence[ReplicaSpec], until: float, now: float
    ) -> EngineFitTask | None:
        """Return a check or fit to carry out now. The next one requires its result or failure first.

        Args:
            until: arrival of the oldest request that has not ended; `now` if there is none.
        """
        is_known = bool(self._models(replicas))
        needed = self._settings.check_requests if is_known else self._settings.first_requests
        if not replicas or self._fresh < needed or now < self._next_at:
            return None
        self._fresh = 0
        return EngineFitTask(
            records=tuple(traffic.recent(until)),
            plans=self._plans(replicas),
            until=until,
            current=self._models(replicas),
            fitted_until=self._fitted_until,
            is_fitted=bool(self._fitted),
        )

    def finish(self, result: EngineFitResult | None, now: float) -> None:
        """Process the result of a task; None if it failed."""
        if result is not None:
            self._fitted_until = result.until
            if result.error is not None:
                is_wrong = result.error.max_abs > self._settings.max_error_ratio
                self._fruitless = self._fruitless + 1 if is_wrong and self._fits else 0
                self.error = result.error
            if result.engines:
                self._fitted = result.engines
                self._fits += 1
        # Engines that no step times describe are checked less and less often, because each fit takes CPU
        # seconds.
        self._next_at = now + self._settings.every_s * 2.0 ** min(self._fruitless, _MAX_DOUBLINGS)

    def engines(self, replicas: Sequence[ReplicaSpec]) -> tuple[ReplicaPlan, ...] | None:
        """Return simulated replicas like the connected ones; None while their step times are not known."""
        return self._plans(replicas) if self._models(replicas) else None

    # Reports and persistence

    def source(self) -> str:
        """Return the origin of the current step times in words."""
        if self._fitted:
            # Restored step times were fitted by an earlier tuner.
            times = {0: "before a restart", 1: "once"}
            return f"fitted to the engines ({times.get(self._fits, f'{self._fits:,} times')})"
        return "unknown" if self._profile is None else f"profile {self._profile_name}"

    def document(self) -> dict[str, Any]:
        """Return the state of the calibration."""
        return {
            "step_times": self.source(),
            "error": None if self.error is None else asdict(self.error),
            "max_error_ratio": self._settings.max_error_ratio,
            "obstacle": self.obstacle,
            "engines": self.state(),
        }

    def state(self) -> dict[str, Any]:
        """Return the fitted step times by pool and by unlike replica, in plain values."""
        return engines_as_json(self._fitted)

    def restore(self, state: object) -> None:
        """Begin with the step times that `state` returned. Their error has to be measured again.

        Raises:
            ValueError: they are invalid; nothing is restored then.
        """
        self._fitted = engines_of_json(state)

    def _models(self, replicas: Sequence[ReplicaSpec]) -> dict[str, FittedEngine]:
        """Return step times of every pool and of unlike replicas; empty while they are not known."""
        pools = {spec.pool for spec in replicas}
        if self._profile is not None:
            latency_s = 2 * SimulationSettings().control_latency_s
            first = FittedEngine(step_time=self._profile.step_time, latency_s=latency_s)
        elif self._fitted:
            # For a pool that has joined since the fit.
            first = next(iter(self._fitted.values()))
        else:
            return {}
        of_replicas = {spec.replica_id for spec in replicas} & self._fitted.keys()
        return {
            **{pool: self._fitted.get(pool, first) for pool in sorted(pools)},
            **{name: self._fitted[name] for name in sorted(of_replicas)},
        }

    def _plans(self, replicas: Sequence[ReplicaSpec]) -> tuple[ReplicaPlan, ...]:
        """Return simulated replicas like the connected ones, even if their step times are unknown."""
        models = self._models(replicas)
        return tuple(
            self._plan(spec, (models.get(spec.replica_id) or models.get(spec.pool, _UNKNOWN)).step_time)
            for spec in replicas
        )

    def _plan(self, spec: ReplicaSpec, step_time: StepTimeModel) -> ReplicaPlan:
        known, chunk = self._profile, spec.long_prefill_token_threshold
        budget = spec.max_num_batched_tokens or (known.max_num_batched_tokens if known else _DEFAULT_BUDGET)
        if chunk is None:
            chunk = known.step_time.chunk_tokens() if known else 0
        kv_tokens = _DEFAULT_KV_TOKENS if spec.kv_tokens is None else spec.kv_tokens
        max_num_seqs = _DEFAULT_NUM_SEQS if spec.max_num_seqs is None else spec.max_num_seqs
        engine = EngineModelSettings(
            kv_tokens=kv_tokens,
            # A server may report a context that its cache cannot hold.
            max_model_len=min(spec.max_model_len, kv_tokens // _BLOCK * _BLOCK),
            block_size=_BLOCK,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(budget, max_num_seqs),
            long_prefill_token_threshold=chunk,
        )
        return ReplicaPlan(replica_id=spec.replica_id, pool=spec.pool, engine=engine, step_time=step_time)
