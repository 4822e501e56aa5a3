"""The step times of real engines, fitted to what they did, and the error of earlier ones.

The model is not given the traffic but the *dispatches*: each engine's requests at the times at which it got
them. The time per output token grows with the batch, and the batch with the backlog, so an engine under a
backlog would look slow in a twin that begins empty. With the same dispatches the batches are the same if the
model is right, and the fit of `lab.calibration.fit` makes it right.

First the model in force is held against the requests that came after its fit: that is its error. If the error
is small the model stays, since a fit takes some CPU seconds. Pools with enough requests get step times of
their own, because their hardware may differ. The others share those of the busiest pool.

Assumptions: the engine serves in the order of arrival, and there are no prefix cache hits. Where these are
wrong the error shows it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from serve_app.core.metrics.record import RequestRecord
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.lab.calibration.fit import (
    EngineRun,
    FitStart,
    FittedEngine,
    fit_runs,
    starting_point,
    typical_step_s,
    with_latency,
)
from serve_app.lab.calibration.measurements import CalibrationError, MeasuredRequest
from serve_app.lab.calibration.replay import measured
from serve_app.lab.simulation.simulation import ReplicaPlan

_ENGINES = 4
"""Engines of a pool that are replayed: those with the most requests. Others of the pool are like them."""
_REPLAYED = 400
"""Requests of a pool that are replayed: enough for means within a few percent; a fit takes seconds of CPU."""
_MIN_OWN = 100
"""Measured requests with which a pool gets step times of its own."""
_LATENCY_S = 0.003
"""Where the fit of the latency between scheduler and engine starts: two hops in one data centre."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinError:
    """Means of the model over means of what happened, less 1: positive where the model is too slow.

    Attributes:
        ttft_ratio: of the time from dispatch to first token, queueing in the engine included.
        tpot_ratio: of the time per output token.
        requests: that were compared.
    """

    ttft_ratio: float
    tpot_ratio: float
    requests: int

    @property
    def largest(self) -> float:
        """The larger of the two, without its sign."""
        return max(abs(self.ttft_ratio), abs(self.tpot_ratio))


Engines = Mapping[str, FittedEngine]
"""Step times by pool."""


def engines_as_json(engines: Engines) -> dict[str, dict[str, float]]:
    """Return step times by pool in plain values; `latency_s` is from the scheduler to an engine and back."""
    return {pool: {"latency_s": each.latency_s, **asdict(each.step_time)} for pool, each in engines.items()}


def engines_of_json(document: object) -> Engines:
    """Return the step times that `engines_as_json` wrote.

    Raises:
        ValueError: they are broken.
    """
    if not isinstance(document, Mapping):
        raise ValueError("learned state: the twin's step times are no mapping; delete it to begin anew")  # noqa: TRY004 - faults of states are alike
    try:
        return {
            str(pool): FittedEngine(
                latency_s=float(values["latency_s"]),
                step_time=StepTimeModel(
                    **{name: float(value) for name, value in values.items() if name != "latency_s"}
                ),
            )
            for pool, values in document.items()
        }
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"learned state: broken step times of the twin: {error}; delete it to begin anew"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFitTask:
    """A check of the model in force, and a fit of another one where it is wrong.

    Attributes:
        records: all requests dispatched in some interval, in any order.
        plans: the engines, with the replica ids of the records; their step times do not count.
        until: arrival of the oldest request that is still open. A request that was answered by then shared
            its engine with recorded requests only.
        known: the model in force; empty when there is none.
        fitted_until: requests dispatched before then have been fitted, or compared, already.
        is_fitted: whether `known` was fitted to these engines, or is that of a profile.
        keep_within: the error up to which the model in force stays.
    """

    records: Sequence[RequestRecord]
    plans: Sequence[ReplicaPlan]
    until: float
    known: Engines = field(default_factory=dict)
    fitted_until: float = -math.inf
    is_fitted: bool = False
    keep_within: float = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFitResult:
    """The result of a task.

    Attributes:
        engines: the new model; None when that in force stays.
        error: of the model in force; None when there was none, or nothing to compare it with.
        until: requests dispatched before then are known now.
        requests: simulated, for clocks that count them.
    """

    engines: Engines | None
    error: TwinError | None
    until: float
    requests: int


def measured_of(record: RequestRecord) -> MeasuredRequest | None:
    """A request as its engine saw it, as far as the scheduler knows; None when that is too little."""
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


def shows_pace(record: RequestRecord) -> bool:
    """Whether a request tells how fast its engine is: streamed, complete, with an answer of two tokens."""
    return record.completed and record.tpot_s is not None and record.tpot_s > 0


def fit_engines(task: EngineFitTask, rest: Callable[[], object] = lambda: None) -> EngineFitResult:
    """Check the model in force, and fit another where it is wrong, in this thread.

    Args:
        rest: called after each replay; a driver that may use only a share of a core waits there.
    """
    counted = 0
    runs = _runs(task, task.until)

    def note(pools: Sequence["_PoolRun"]) -> None:
        nonlocal counted
        counted += sum(len(run.run.requests) for run in pools)
        rest()

    error = None
    if task.known:
        fresh = [run for run in (each.since(task.fitted_until) for each in runs) if run is not None]
        error = _error(fresh, task.known)
        note(fresh)
    engines = None
    if error is None or error.largest > task.keep_within:
        engines = _fitted(runs, task, note)
    return EngineFitResult(engines=engines or None, error=error, until=task.until, requests=counted)


@dataclass(frozen=True, slots=True)
class _PoolRun:
    """What one engine of a pool served."""

    pool: str
    run: EngineRun

    def since(self, dispatched_at: float) -> "_PoolRun | None":
        """The same with only those requests measured that were dispatched later; None without any."""
        assert isinstance(self.run.part, list)
        part = [index for index in self.run.part if self.run.requests[index].queued_at >= dispatched_at]
        return _PoolRun(self.pool, replace(self.run, part=part)) if part else None


def _error(runs: Sequence[_PoolRun], known: Engines) -> TwinError | None:
    compared = [each for each in runs if each.pool in known]
    if not compared:
        return None
    played = [
        with_latency([each.run.played(known[each.pool].step_time)], known[each.pool].latency_s)
        for each in compared
    ]
    ours = with_latency(played, 0.0)
    theirs = measured([request for each in compared for request in each.run.fitted])
    return TwinError(
        ttft_ratio=float(ours.ttft_s.mean() / theirs.ttft_s.mean()) - 1.0,
        tpot_ratio=float(ours.tpot_s.mean() / theirs.tpot_s.mean()) - 1.0,
        requests=len(theirs.ttft_s),
    )


def _fitted(
    runs: Sequence[_PoolRun], task: EngineFitTask, note: Callable[[Sequence[_PoolRun]], None]
) -> dict[str, FittedEngine]:
    """Step times of every pool; empty when there is too little to fit."""
    counts: dict[str, int] = {}
    for each in runs:
        counts[each.pool] = counts.get(each.pool, 0) + len(each.run.fitted)
    if not counts:
        return {}
    busiest = max(counts, key=lambda pool: counts[pool])
    own = {pool for pool, count in counts.items() if count >= _MIN_OWN} | {busiest}
    found: dict[str, FittedEngine] = {}
    for pool in sorted(own):
        # The requests of pools without enough of their own tell something about the busiest one's hardware.
        together = [each for each in runs if each.pool == pool or (pool == busiest and each.pool not in own)]
        try:
            start = _start(together, task, pool)
            found[pool] = fit_runs([each.run for each in together], start, lambda: note(together))  # noqa: B023 - called within this round
        except CalibrationError:
            continue
    if busiest in found:
        for plan in task.plans:
            found.setdefault(plan.pool, found[busiest])
    return found


def _start(runs: Sequence[_PoolRun], task: EngineFitTask, pool: str) -> FitStart:
    """The model in force, at the engines' pace; usual proportions where there is none."""
    seen = [request for each in runs for request in each.run.fitted]
    usual, known = starting_point(seen), task.known.get(pool)
    if known is None:
        return FitStart(step_time=usual, latency_s=_LATENCY_S)
    step_time = known.step_time
    if not task.is_fitted:
        step_time = _at_pace(step_time, runs)
    # What is 0 in the one could never become positive.
    values = {
        name: value or asdict(usual)[name]
        for name, value in asdict(step_time).items()
        if not name.startswith("expert")
    }
    return FitStart(
        step_time=StepTimeModel(**values),
        latency_s=known.latency_s or _LATENCY_S,
        is_near=task.is_fitted,
    )


def _at_pace(step_time: StepTimeModel, runs: Sequence[_PoolRun]) -> StepTimeModel:
    """The step times of a profile, all scaled so that a typical step takes as long as it does."""
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
    return StepTimeModel(**{name: factor * value for name, value in asdict(dense).items()})


def _runs(task: EngineFitTask, until: float) -> list[_PoolRun]:
    """What the engines served, as far as it is known: the last requests of the busiest ones of each pool."""
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
        busiest = sorted(of_pool, key=lambda name: (-len(served[name]), name))[:_ENGINES]
        for name in busiest:
            run = _run(served[name], plans[name], _REPLAYED // len(busiest), until)
            if run is not None:
                runs.append(_PoolRun(pool, run))
    return runs


def _run(records: list[RequestRecord], plan: ReplicaPlan, limit: int, until: float) -> EngineRun | None:
    """The last requests of one engine; those that shared it with unknown ones are not measured."""
    ordered = sorted(records, key=lambda each: (each.dispatched_at or 0.0, each.request_id))
    kept, dropped = ordered[-limit:], ordered[:-limit]
    clean_from = max((each.finished_at for each in dropped), default=-math.inf)
    known = [(each, request) for each in kept if (request := measured_of(each)) is not None]
    part = [
        index
        for index, (record, request) in enumerate(known)
        if shows_pace(record) and request.queued_at >= clean_from and record.finished_at <= until
    ]
    if not part:
        return None
    return EngineRun(requests=[request for _, request in known], settings=plan.engine, part=part)
