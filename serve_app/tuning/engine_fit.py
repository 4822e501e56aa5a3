"""Fit of the twin's step times to real engines, and measurement of the twin's error.

The fit does not use the traffic but the *dispatches*: each engine's requests with their dispatch times. The
time per output token grows with the batch, and the batch with the backlog, so an engine with a backlog would
look slow in a twin that begins empty. With the same dispatches the batches are equal if the model is right,
and the fit of `lab.calibration.fit_runs` makes it right.

First the current model is compared with the requests dispatched after its fit, which gives its error. If the
error is small the model remains, because a fit takes some CPU seconds. Pools with enough requests get
separate step times, because their hardware may differ. The others share those of the busiest pool.

If the engines of a pool differ in pace, the fit uses the busiest one and those with about its pace. The step
times of each engine are then scaled until a replay of its requests has its measured pace. The busiest of the
other engines are fitted from there, because hardware may differ more in prefills than in decoding.

Assumptions: engines serve in order of arrival, and there are no prefix cache hits. Violations show up in the
error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from msgspec import Struct

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.routing.snapshot import Number, decoded
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.lab.calibration import (
    CalibrationError,
    EngineRun,
    FitStart,
    FittedEngine,
    MeasuredRequest,
    fit_runs,
    initial_coefficients,
    measured,
    typical_step_s,
    with_latency,
)
from serve_app.lab.simulation.simulation import ReplicaPlan

_ENGINES = 4
"""Replayed engines per pool: those with the most requests. If engines differ in pace, all are replayed."""
_REPLAYED = 400
"""Replayed requests per pool: enough for means within a few percent. A fit takes seconds of CPU time."""
_MIN_OWN = 100
"""Minimum number of measured requests for separate step times of a pool."""
_UNLIKE_RATIO = 1.2
"""Ratio of the paces of two engines from which they differ. Less may be chance, or the length of prompts."""
_MIN_PACE = 5
"""Minimum number of measured requests for the pace of an engine."""
_SCALINGS = 3
"""Replays per engine that scale its step times. The pace also depends on the batch, and so on the scale."""
_MAX_ERROR_RATIO = 0.03
"""Error up to which the current model remains."""
_LATENCY_S = 0.003
"""Initial value for the latency between scheduler and engine: two hops in one data centre."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinError:
    """Relative error of the model's means: positive if the model is too slow.

    Attributes:
        ttft_ratio: error of the time from dispatch to first token, including queueing in the engine.
        tpot_ratio: error of the time per output token.
    """

    ttft_ratio: float
    tpot_ratio: float
    requests: int

    @property
    def max_abs(self) -> float:
        """The larger of the two errors, as an absolute value."""
        return max(abs(self.ttft_ratio), abs(self.tpot_ratio))


Engines = Mapping[str, FittedEngine]
"""Step times by pool, and by replica id for engines that differ from others of their pool."""


class _Latency(Struct):
    latency_s: Number


def engines_as_json(engines: Engines) -> dict[str, dict[str, float]]:
    """Return step times in plain values; `latency_s` is the round trip from scheduler to engine."""
    return {name: {"latency_s": each.latency_s, **asdict(each.step_time)} for name, each in engines.items()}


def engines_of_json(document: object) -> Engines:
    """Return the step times that `engines_as_json` wrote.

    Raises:
        ValueError: the document is invalid.
    """
    step_times = decoded(document, dict[str, StepTimeModel])
    return {
        name: FittedEngine(latency_s=each.latency_s, step_time=step_times[name])
        for name, each in decoded(document, dict[str, _Latency]).items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFitTask:
    """A check of the current model, and a new fit if it is wrong.

    Attributes:
        records: all requests dispatched in some interval, in any order.
        plans: the engines, with the replica ids of the records; their step times are ignored.
        until: arrival of the oldest request that has not ended. A request that ended before then shared its
            engine with recorded requests only.
        current: the current model; empty if there is none.
        fitted_until: requests dispatched before this time have already been fitted or compared.
        is_fitted: True if `current` was fitted to these engines, False if it is from a profile.
    """

    records: Sequence[RequestRecord]
    plans: Sequence[ReplicaPlan]
    until: float
    current: Engines = field(default_factory=dict)
    fitted_until: float = -math.inf
    is_fitted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFitResult:
    """Result of a task.

    Attributes:
        engines: the new model; None if the current one remains.
        error: error of the current model; None without a model or without requests to compare.
        until: requests dispatched before this time have been used.
        requests: number of simulated requests, for clocks that count them.
    """

    engines: Engines | None
    error: TwinError | None
    until: float
    requests: int


def measured_of(record: RequestRecord) -> MeasuredRequest | None:
    """Return a request as its engine saw it; None if the scheduler's record has too little information."""
    if record.dispatched_at is None or record.finished_at <= record.dispatched_at:
        return None
    first = record.first_token_at or record.finished_at
    try:
        return MeasuredRequest(
            prompt_tokens=record.prompt_tokens,
            output_tokens=max(1, record.output_tokens),
            queued_at=record.dispatched_at,
            scheduled_at=record.dispatched_at,
            first_token_at=first,
            last_token_at=record.finished_at,
        )
    except ValueError:
        return None


def is_pace_sample(record: RequestRecord) -> bool:
    """Return whether a request shows its engine's speed: completed and streamed, with two or more tokens."""
    return record.completed and record.tpot_s is not None and record.tpot_s > 0


def fit_engines(task: EngineFitTask, yield_cpu: Callable[[], object] = lambda: None) -> EngineFitResult:
    """Check the current model, and fit a new one if it is wrong, in this thread.

    Args:
        yield_cpu: called after each replay; a driver that is limited to a share of a core waits there.
    """
    counted = 0
    runs = _runs(task, task.until)

    def note(pools: Sequence["_PoolRun"]) -> None:
        nonlocal counted
        counted += sum(len(run.run.requests) for run in pools)
        yield_cpu()

    error = None
    if task.current:
        fresh = [run for run in (each.since(task.fitted_until) for each in runs) if run is not None]
        error = _error(fresh, task.current)
        note(fresh)
    engines = None
    if error is None or error.max_abs > _MAX_ERROR_RATIO:
        engines = _fitted(runs, task, note)
    return EngineFitResult(engines=engines or None, error=error, until=task.until, requests=counted)


@dataclass(frozen=True, slots=True)
class _PoolRun:
    """The requests that one engine of a pool served."""

    pool: str
    replica: str
    run: EngineRun

    def of(self, known: Engines) -> FittedEngine:
        """Return the step times of the engine."""
        return known.get(self.replica) or known[self.pool]

    def since(self, dispatched_at: float) -> "_PoolRun | None":
        """Return a copy that measures only requests dispatched later; None if there are none."""
        assert isinstance(self.run.part, list)
        part = [index for index in self.run.part if self.run.requests[index].queued_at >= dispatched_at]
        return replace(self, run=replace(self.run, part=part)) if part else None


def _error(runs: Sequence[_PoolRun], known: Engines) -> TwinError | None:
    compared = [each for each in runs if each.pool in known]
    if not compared:
        return None
    played = [
        with_latency([each.run.played(each.of(known).step_time)], each.of(known).latency_s)
        for each in compared
    ]
    simulated = with_latency(played, 0.0)
    observed = measured([request for each in compared for request in each.run.fitted])
    return TwinError(
        ttft_ratio=float(simulated.ttft_s.mean() / observed.ttft_s.mean()) - 1.0,
        tpot_ratio=float(simulated.tpot_s.mean() / observed.tpot_s.mean()) - 1.0,
        requests=len(observed.ttft_s),
    )


def _fitted(
    runs: Sequence[_PoolRun], task: EngineFitTask, note: Callable[[Sequence[_PoolRun]], None]
) -> dict[str, FittedEngine]:
    """Return the step times of every pool; empty if there are too few requests."""
    counts: dict[str, int] = {}
    for each in runs:
        counts[each.pool] = counts.get(each.pool, 0) + len(each.run.fitted)
    if not counts:
        return {}
    busiest = max(counts, key=lambda pool: counts[pool])
    own = {pool for pool, count in counts.items() if count >= _MIN_OWN} | {busiest}
    found: dict[str, FittedEngine] = {}
    scaled: dict[str, FittedEngine] = {}
    for pool in sorted(own):
        # The busiest pool's fit also uses the requests of pools that have too few for a separate fit.
        together = [each for each in runs if each.pool == pool or (pool == busiest and each.pool not in own)]
        alike = _alike(together)
        replayed = together if len(alike) == len(together) else alike[:_ENGINES]
        try:
            start = _start(replayed, task, pool)
            found[pool] = fit_runs([each.run for each in replayed], start, lambda: note(replayed))  # noqa: B023 - called within this round
        except CalibrationError:
            continue
        if len(alike) < len(together):
            own_fits = [each for each in together if each not in alike][:_ENGINES]
            for each in together:
                scaled[each.replica] = _of_one(each, found[pool], note, is_fitted=each in own_fits)
    if busiest in found:
        for plan in task.plans:
            found.setdefault(plan.pool, found[busiest])
    return found | scaled


def _alike(runs: Sequence[_PoolRun]) -> list[_PoolRun]:
    """Return the busiest engine and those with about its pace, the busiest first."""
    ordered = sorted(runs, key=lambda each: -len(each.run.fitted))
    paces_s = [typical_step_s(each.run.fitted) for each in ordered]
    return [
        each
        for each, pace_s in zip(ordered, paces_s, strict=True)
        if len(each.run.fitted) < _MIN_PACE or 1 / _UNLIKE_RATIO < pace_s / paces_s[0] < _UNLIKE_RATIO
    ]


def _of_one(
    each: _PoolRun, model: FittedEngine, note: Callable[[Sequence[_PoolRun]], None], *, is_fitted: bool
) -> FittedEngine:
    """Return the model at the pace of one engine, and fitted to it if its requests suffice."""
    observed = measured(each.run.fitted).tpot_s
    for _ in range(_SCALINGS if len(observed) >= _MIN_PACE else 0):
        ratio = float(np.median(observed / each.run.played(model.step_time).tpot_s))
        model = replace(model, step_time=model.step_time.scaled(ratio))
        note([each])
    if is_fitted and len(observed) >= _MIN_OWN:
        start = FitStart(
            step_time=model.step_time, latency_s=model.latency_s or _LATENCY_S, is_warm_start=True
        )
        return fit_runs([each.run], start, lambda: note([each]))
    return model


def _start(runs: Sequence[_PoolRun], task: EngineFitTask, pool: str) -> FitStart:
    """Return the current model at the engines' pace, or typical proportions if there is none."""
    seen = [request for each in runs for request in each.run.fitted]
    usual, current = initial_coefficients(seen), task.current.get(pool)
    if current is None:
        return FitStart(step_time=usual, latency_s=_LATENCY_S)
    step_time = current.step_time
    if not task.is_fitted:
        step_time = _at_pace(step_time, runs)
    # A coefficient that is 0 could never become positive in the fit.
    values = {
        name: value or asdict(usual)[name]
        for name, value in asdict(step_time).items()
        if not name.startswith("expert")
    }
    return FitStart(
        step_time=StepTimeModel(**values),
        latency_s=current.latency_s or _LATENCY_S,
        is_warm_start=task.is_fitted,
    )


def _at_pace(step_time: StepTimeModel, runs: Sequence[_PoolRun]) -> StepTimeModel:
    """Scale a profile's step times so that a typical step has its measured duration."""
    seen = [request for each in runs for request in each.run.fitted]
    played = with_latency([each.run.played(step_time) for each in runs], 0.0)
    factor = typical_step_s(seen) / float(np.percentile(played.tpot_s, 25.0))
    dense = replace(
        step_time,
        decode_base_s=step_time.decode_base_s + step_time.expert_read_s,
        decode_per_sequence_s=step_time.decode_per_sequence_s + step_time.decode_compute_s,
        decode_compute_s=0.0,
        expert_read_s=0.0,
        expert_share=0.0,
    )
    return dense.scaled(factor)


def _runs(task: EngineFitTask, until: float) -> list[_PoolRun]:
    """Return the last known requests of the busiest engines of each pool; of all engines if they differ."""
    plans = {plan.replica_id: plan for plan in task.plans}
    served: dict[str, list[RequestRecord]] = {}
    for record in task.records:
        plan = plans.get(record.replica)
        if plan is None or record.dispatched_at is None or record.dispatched_at >= until:
            continue
        if 0 < record.prompt_tokens <= plan.engine.max_model_len - max(1, record.output_tokens):
            served.setdefault(record.replica, []).append(record)
    runs = []
    for pool in sorted({plan.pool for plan in task.plans}):
        of_pool = [name for name in served if plans[name].pool == pool]
        busiest = sorted(of_pool, key=lambda name: (-len(served[name]), name))
        for limit in (_REPLAYED // max(1, min(_ENGINES, len(busiest))), _REPLAYED):
            known = [
                _PoolRun(pool, name, run)
                for name in busiest
                if (run := _run(served[name], plans[name], limit, until)) is not None
            ]
            if are_alike := len(_alike(known)) == len(known):
                break
        runs += known[:_ENGINES] if are_alike else known
    return runs


def _run(records: list[RequestRecord], plan: ReplicaPlan, limit: int, until: float) -> EngineRun | None:
    """Return the last requests of one engine, measuring those that shared it with known requests only."""
    ordered = sorted(records, key=lambda each: (each.dispatched_at or 0.0, each.request_id))
    kept, dropped = ordered[-limit:], ordered[:-limit]
    clean_from = max((each.finished_at for each in dropped), default=-math.inf)
    known = [(each, request) for each in kept if (request := measured_of(each)) is not None]
    part = [
        index
        for index, (record, request) in enumerate(known)
        if is_pace_sample(record) and request.queued_at >= clean_from and record.finished_at <= until
    ]
    if not part:
        return None
    return EngineRun(requests=[request for _, request in known], settings=plan.engine, part=part)
