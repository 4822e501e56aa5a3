"""Digital twin: replays recent traffic on simulated engines with other settings.

- `DigitalTwin`: plays windows of traffic with the settings of a candidate.
- `TrafficLog`, `resampled`: recent traffic, and windows drawn from it.
- `TwinCalibration`: the twin's engines, from a profile or without one, fitted to the real engines.
- `search_twin`: a search in the twin: presets, and on request the candidates of an optimiser.

`DigitalTwin`. The twin runs the production scheduler (`lab.simulation.simulation`) on simulated replicas, and
scores the records by the objective of the live system. It starts with what production has learned so far:
output lengths, prefill costs, and the boundary of long prompts. Its length queues are those that
Refine-and-Prune finds with the candidate's parameters.

The twin has three known limitations:

- It has no prefix cache hits.
- It starts each window with an empty fleet, without the requests that waited in production. So it does not
  measure the first part of a window.
- Its engine model has an error. `engine_fit` measures it, and fits the step times if it is large.

`TrafficLog` stores lengths, classes, tenants and times of requests that have ended, and no text. `resampled`
draws a window from a trace by the block bootstrap: it concatenates blocks of consecutive requests with their
gaps. Bursts and length patterns shorter than a block are preserved; longer ones are mixed. A window of one
seed and number is the same for every candidate (common random numbers), so candidates differ only by their
settings.

Source of the block bootstrap: Kuensch, The Jackknife and the Bootstrap for General Stationary Observations
(Annals of Statistics, 1989); blocks wrap around the end, so that each request is drawn with equal
probability.

`TwinCalibration`. This is a state machine without a clock, like the loop that owns it. It hands out a task
(`engine_fit`) when enough requests are new, and processes the result, which has the error of the current
model on requests after its fit. While that error is large or unknown, `obstacle` explains why there should be
no search: a twin with wrong engines proposes candidates that lose in production.

`search_twin`. A preset is what an operator would try first. Each changes a few values and leaves the others
as they are. Together they cover each tunable mechanism in both directions from the defaults, so a short
search also finds what is far from the current values.
"""

import bisect
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np

from serve_app.core import SchedulerSettings
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import NOT_ATTRIBUTABLE
from serve_app.core.policies import learns_queues
from serve_app.core.policies.length_queues import Partition
from serve_app.core.routing.estimation.estimate import EstimatorState
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.core.settings_base import (
    FINITE_NOT_NEGATIVE,
    FINITE_POSITIVE,
    NOT_NEGATIVE,
    at_least,
    settings,
    share_below,
)
from serve_app.engines.model.model import EngineModelSettings
from serve_app.engines.model.roofline import load_profile
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.lab.calibration import FittedEngine
from serve_app.lab.simulation.baselines import SIMULATED_POLICIES
from serve_app.lab.simulation.run import Disclosure, fit, requests_of
from serve_app.lab.simulation.simulation import (
    FixedPartition,
    ReplicaPlan,
    SimulatedRequest,
    Simulation,
    SimulationSettings,
)
from serve_app.lab.workloads import Trace, TraceRequest, stream
from serve_app.request import Usage
from serve_app.tuning.engine_fit import (
    EngineFitResult,
    EngineFitTask,
    Engines,
    TwinError,
    engines_as_json,
    engines_of_json,
    is_pace_sample,
)
from serve_app.tuning.objective import ObjectiveSettings, Reward, reward_of
from serve_app.tuning.search_space import SearchSpace, TpeOptimiser, Tunable, Values
from serve_app.tuning.strategic_loop import RefineAndPruneSettings, refine_and_prune
from serve_app.tuning.study import Budget, Finding, PlayWindow, Study, StudySettings, WindowResult

# Maximum age relative to the latest arrival: ten minutes are long enough for a mix of tenants, and short
# enough to be current.
_SPAN_S = 600.0
# Maximum number of requests, some 4 MB: ten minutes at 33 requests/s.
_CAPACITY = 20_000


class TrafficLog:
    """Requests of the last ten minutes."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=_CAPACITY)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"<TrafficLog {len(self)} requests>"

    def add(self, record: RequestRecord) -> None:
        """Add a request that has ended, unless it was rejected for a client error."""
        if record.outcome not in NOT_ATTRIBUTABLE and record.prompt_tokens >= 1:
            self._records.append(record)

    def recent(self, until: float) -> list[RequestRecord]:
        """Return the requests of the span up to the last arrival before `until`, by arrival."""
        records = [record for record in self._records if record.arrived_at < until]
        latest = max((record.arrived_at for record in records), default=0.0)
        return sorted(
            (record for record in records if record.arrived_at >= latest - _SPAN_S),
            key=_by_arrival,
        )

    def trace(self, until: float) -> Trace | None:
        """Return the requests that arrived before `until` as a trace that begins at 0; None without any.

        The unknown length of a response that did not complete is replaced by that of a completed one with
        about the same prompt length.

        Args:
            until: arrival of the oldest request that has not ended, on the clock of the records. Of later
                arrivals only the quickly served ones are known, which do not represent the traffic.
        """
        kept = self.recent(until)
        if not kept:
            return None
        outputs = _RecordedOutputs(kept)
        requests = tuple(
            TraceRequest(
                arrival_s=record.arrived_at - kept[0].arrived_at,
                prompt_tokens=record.prompt_tokens,
                output_tokens=outputs.of(record),
                tenant=record.tenant,
                priority=record.priority,
            )
            for record in kept
        )
        return Trace(name="live", source=f"{len(kept):,} recorded requests", requests=requests)


def _by_arrival(record: RequestRecord) -> tuple[float, str]:
    return record.arrived_at, record.request_id


class _RecordedOutputs:
    """Output lengths: as recorded, or that of the completed request with the nearest prompt length."""

    def __init__(self, records: list[RequestRecord]) -> None:
        self._known = sorted(
            (record.prompt_tokens, max(1, record.output_tokens)) for record in records if record.completed
        )

    def of(self, record: RequestRecord) -> int:
        if record.completed or not self._known:
            return max(1, record.output_tokens)
        place = bisect.bisect_left(self._known, (record.prompt_tokens, 0))
        _, output = min(
            self._known[max(0, place - 1) : place + 1], key=lambda known: abs(known[0] - record.prompt_tokens)
        )
        return max(output, record.output_tokens)


def resampled(traffic: Trace, requests: int, block: int, *, seed: int, number: int) -> Trace:
    """Return window `number` of a seed, drawn in blocks of `block` requests; a shorter trace is one block."""
    have = len(traffic.requests)
    rng = stream(seed, f"window {number}")
    block = min(block, have)
    starts = rng.integers(have, size=-(-requests // block))
    places = (starts[:, None] + np.arange(block)[None, :]).ravel()[:requests] % have
    arrivals = np.array([one.arrival_s for one in traffic.requests])
    mean_gap = traffic.span_s / max(1, have - 1)
    # The gap before the first request is unknown, so use the mean.
    gaps = np.diff(arrivals, prepend=arrivals[0] - mean_gap)
    times = np.cumsum(gaps[places])
    times -= times[0]
    drawn = tuple(
        replace(traffic.requests[int(place)], arrival_s=float(at))
        for place, at in zip(places, times, strict=True)
    )
    return replace(traffic, requests=drawn, source=f"{traffic.source}, window {number} of seed {seed}")


@settings(block="twin")
class TwinSettings:
    """Settings for drawing and playing windows in the digital twin."""

    # Requests per window: at 10 requests/s a minute of traffic, in which queues build up and drain. More
    # requests reduce the noise per window and take more time.
    window_requests: Annotated[int, at_least(1)] = 600
    # Consecutive requests that are drawn together. With shorter blocks, windows are more similar than real
    # minutes are.
    block_requests: Annotated[int, at_least(1)] = 100
    # Share of a window, by arrival, that is excluded from measurement while the fleet fills.
    warm_up_ratio: Annotated[float, share_below(1)] = 0.15
    # Requests from which the twin's scheduler has learned before a window begins.
    learned_requests: Annotated[int, NOT_NEGATIVE] = 500
    # Seed of the windows.
    seed: Annotated[int, NOT_NEGATIVE] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinPlan:
    """All inputs of a twin.

    Attributes:
        tunable: the incumbent settings; a candidate changes some of them.
        space: the parameters of candidates.
        engines: one plan per replica, as connected now.
        traffic: requests to draw windows from, at their own rate.
    """

    tunable: Tunable
    space: SearchSpace
    engines: tuple[ReplicaPlan, ...]
    traffic: Trace
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    settings: TwinSettings = field(default_factory=TwinSettings)
    simulation: SimulationSettings = field(default_factory=SimulationSettings)

    @property
    def independent_windows(self) -> float:
        """Length of the traffic in windows. Drawing more windows adds no information."""
        return max(1.0, len(self.traffic.requests) / self.settings.window_requests)


class DigitalTwin:
    """Plays windows. The same plan, values and window number give the same records."""

    def __init__(self, plan: TwinPlan) -> None:
        self._longest = max(each.engine.max_model_len for each in plan.engines)
        self._plan = replace(plan, traffic=fit(plan.traffic, self._longest).trace)
        self._lengths = tuple(one.prompt_tokens for one in self._plan.traffic.requests)
        self._estimates = self._estimator_state()

    def play(self, values: Values, number: int) -> WindowResult:
        """Return the result of window `number` with these values.

        A window that fails has no reward, which never counts as good.
        """
        try:
            records = self.records(values, number)
        except Exception as error:  # noqa: BLE001 - one candidate must not end the search
            reason = f"{type(error).__name__}: {error}"
            return WindowResult(reward=Reward(value=None, reason=reason), requests=0)
        skipped = round(self._plan.settings.warm_up_ratio * len(records))
        reward = reward_of(records[skipped:], self._plan.objective)
        return WindowResult(reward=reward, requests=len(records))

    def records(self, values: Values, number: int) -> list[RequestRecord]:
        """Return the records of window `number` with these values, by arrival."""
        settings = self._plan.settings
        window = resampled(
            self._plan.traffic,
            settings.window_requests,
            settings.block_requests,
            seed=settings.seed,
            number=number,
        )
        return self.serve(values, window)

    def serve(self, values: Values, arrivals: Trace) -> list[RequestRecord]:
        """Return the records of a trace with these values, by arrival, except requests that fit no engine."""
        arrivals = fit(arrivals, self._longest).trace
        plan = self._plan
        tunable = plan.tunable.with_values(values, plan.space)
        learner = None
        if learns_queues(tunable.scheduler.policy, SIMULATED_POLICIES):
            learner = FixedPartition(_partition(self._lengths, tunable.refine_and_prune)).learner()
        simulation = Simulation(tunable.scheduler, plan.engines, plan.simulation, learner=learner)
        self._transfer_state(simulation)
        records = simulation.run(list(self._requests(arrivals)))
        return sorted(records, key=lambda record: (record.arrived_at, record.request_id))

    def _requests(self, arrivals: Trace) -> Iterator[SimulatedRequest]:
        timeouts = self._plan.tunable.scheduler.queue_timeout_s
        disclosure = Disclosure(model=self._plan.tunable.scheduler.model)
        for simulated in requests_of(arrivals, disclosure, self._plan.engines[0].engine.block_size):
            request = simulated.request
            expires_at = request.arrived_at + timeouts.of(request.priority)
            yield replace(simulated, request=replace(request, expires_at=expires_at))

    def _estimator_state(self) -> EstimatorState:
        """Return the state of an estimator that has observed the recent traffic."""
        plan = self._plan
        estimator = Simulation(plan.tunable.scheduler, plan.engines, plan.simulation).scheduler.estimator
        recent = replace(self._plan.traffic, requests=self._recent())
        for simulated in requests_of(recent, Disclosure(), self._plan.engines[0].engine.block_size):
            prompt_tokens = simulated.request.shape.prompt_tokens or 0
            estimator.observe(
                simulated.request,
                Usage(prompt_tokens=prompt_tokens, output_tokens=simulated.output_tokens),
            )
        return estimator.state()

    def _transfer_state(self, simulation: Simulation) -> None:
        """Initialise a new scheduler with what the production scheduler has learned."""
        scheduler = simulation.scheduler
        scheduler.estimator.restore(self._estimates)
        recent = self._recent()
        for one in recent:
            scheduler.isolation.observe(one.prompt_tokens)
        # A few dozen observations outweigh the prior. Each costs a sum over its chunks.
        for one in recent[:: max(1, len(recent) // 64)]:
            # One plan per pool is enough, because the run continues to learn.
            for pool, plan in {each.pool: each for each in self._plan.engines}.items():
                budget = plan.engine.max_num_batched_tokens
                seconds = plan.step_time.prefill_s(one.prompt_tokens, max_num_batched_tokens=budget)
                scheduler.prefill_costs.observe(pool, one.prompt_tokens, seconds)

    def _recent(self) -> tuple[TraceRequest, ...]:
        learned = self._plan.settings.learned_requests
        return self._plan.traffic.requests[-learned:] if learned else ()


@lru_cache(maxsize=256)
def _partition(lengths: tuple[int, ...], settings: RefineAndPruneSettings) -> Partition:
    """Learn the length queues of the traffic. Cached, because many candidates share these parameters."""
    return refine_and_prune(lengths, settings)


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


SearchKind = Literal["presets", "tpe"]
"""Candidates of a search: presets, or presets and then those that TPE proposes."""

PRESETS: Mapping[str, Values] = {
    "shallow engine queues": {"target_waiting": 1},
    "deep engine queues": {"target_waiting": 8},
    "few long prefills": {"max_long_prefills": 1, "max_longest_prefills": 1},
    "more long prefills": {"max_long_prefills": 4, "max_longest_prefills": 2},
    "many long prefills": {"max_long_prefills": 8, "max_longest_prefills": 4},
    "fewer short prompts": {"short_work_share": 0.12, "longest_work_share": 0.4},
    "more short prompts": {"short_work_share": 0.45, "longest_work_share": 0.7},
    "tight delay bound": {"wait_ratio": 0.6},
    "loose delay bound": {"wait_ratio": 4.0},
    "shortest first": {"a_u": 0.0, "b_u": 0.01},
    "longest wait first": {"a_u": 1e-3, "b_u": 5.0},
}
"""Changed values by name of the preset."""


def preset_candidates(tunable: Tunable, space: SearchSpace) -> list[Values]:
    """Return the candidates of all presets, and the defaults, without the current values and repetitions.

    Values of parameters that are not in the space are left out.
    """
    scheduler = SchedulerSettings(
        model=tunable.scheduler.model, policy=tunable.scheduler.policy, routing=tunable.scheduler.routing
    )
    defaults = Tunable(scheduler=scheduler)
    changes = [{each.name: defaults.value(each) for each in space}, *PRESETS.values()]
    candidates: list[Values] = []
    for changed in changes:
        known = {name: value for name, value in changed.items() if name in space.names}
        values = space.clipped({**space.current, **known})
        if values != space.current and values not in candidates:
            candidates.append(values)
    return candidates


def search_twin(
    plan: TwinPlan, settings: StudySettings, play: PlayWindow, budget: Budget, kind: SearchKind
) -> Finding:
    """Compare the incumbent of a twin with the candidates of a search."""
    first = [plan.space.current, *preset_candidates(plan.tunable, plan.space)]
    optimiser = TpeOptimiser(plan.space, seed=plan.settings.seed) if kind == "tpe" else None
    return Study(settings, play, budget, plan.independent_windows).run(first, optimiser)
