"""The digital twin: recent traffic, played again on simulated engines under other settings.

The twin runs the production scheduler (`lab.simulation.simulation`) on simulated replicas, and scores the
records by the objective of the live system. It knows from the first request on what production has learned by
now: output lengths, the cost of a prefill, and where "long" begins. The length queues are those that
Refine-and-Prune finds under the candidate's own parameters.

Three things it does not know. Prefixes: it has no cache hits. The requests that wait when a window begins: it
starts with an empty fleet and does not measure the first part. The error of the engine model: `engine_fit`
measures it, and fits the step times where it is large.

`TwinProcesses` plays windows in several processes, one twin in each. Each process gets the plan once, when it
starts. Results come in the order of the jobs, so a search takes the same course on any number of processes.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import TracebackType
from typing import Annotated, Any

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import first_token_figures
from serve_app.core.policies import learns_queues
from serve_app.core.policies.length_queues import Partition
from serve_app.core.settings_base import NOT_NEGATIVE, at_least, settings, share_below
from serve_app.lab.simulation.partitions import FixedPartition
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulatedRequest, Simulation, SimulationSettings
from serve_app.lab.simulation.workload import Disclosure, fit, requests_of
from serve_app.lab.workloads.trace import Trace, TraceRequest
from serve_app.request import Usage
from serve_app.tuning.objective import ObjectiveSettings, Reward, reward_of
from serve_app.tuning.refine_and_prune import RefineAndPruneSettings, refine_and_prune
from serve_app.tuning.search_space import SearchSpace, Tunable, Values
from serve_app.tuning.study import Job, WindowResult
from serve_app.tuning.traffic import resampled


@settings(block="twin")
class TwinSettings:
    """How windows are drawn and played."""

    # Requests in a window: at 10 requests/s a minute of traffic, in which queues build up and drain. More
    # requests mean less noise per window and more time.
    window_requests: Annotated[int, at_least(1)] = 600
    # Requests that stay together when windows are drawn. Shorter blocks make windows more alike than real
    # minutes are.
    block_requests: Annotated[int, at_least(1)] = 100
    # Share of a window, the first by arrival, that is not measured: the fleet fills during it.
    warm_up_ratio: Annotated[float, share_below(1)] = 0.15
    # Requests that the twin's scheduler has learned from before a window begins.
    learned_requests: Annotated[int, NOT_NEGATIVE] = 500
    # Of the windows that are drawn.
    seed: Annotated[int, NOT_NEGATIVE] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinPlan:
    """Everything that a twin depends on; a plain value, so it can be sent to other processes.

    Attributes:
        tunable: the settings in force; a candidate changes some of them.
        space: the parameters that candidates have values for.
        engines: one plan for each replica, as they are now.
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
        """Length of the traffic, in windows: drawing more windows adds no information."""
        return max(1.0, len(self.traffic.requests) / self.settings.window_requests)


class DigitalTwin:
    """Plays windows in this process. The same plan, values and number give the same records."""

    def __init__(self, plan: TwinPlan) -> None:
        self._longest = max(each.engine.max_model_len for each in plan.engines)
        self._plan = replace(plan, traffic=fit(plan.traffic, self._longest).trace)
        self._lengths = tuple(one.prompt_tokens for one in self._plan.traffic.requests)
        self._estimates = self._learned_estimates()

    def play(self, values: Values, number: int) -> WindowResult:
        """The result of window `number` under these values.

        Raises:
            SettingsError: the settings cannot have these values.
        """
        records = self.records(values, number)
        skipped = round(self._plan.settings.warm_up_ratio * len(records))
        reward = reward_of(records[skipped:], self._plan.objective)
        return WindowResult(reward=reward, requests=len(records))

    def records(self, values: Values, number: int) -> list[RequestRecord]:
        """Every request of window `number` under these values, by arrival."""
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
        """Every request of a trace that fits the engines, under these values, by arrival."""
        arrivals = fit(arrivals, self._longest).trace
        plan = self._plan
        tunable = plan.tunable.with_values(values, plan.space)
        learner = None
        if learns_queues(tunable.scheduler.policy):
            learner = FixedPartition(_partition(self._lengths, tunable.refine_and_prune)).learner()
        simulation = Simulation(tunable.scheduler, plan.engines, plan.simulation, learner=learner)
        self._teach(simulation)
        records = simulation.run(list(self._requests(arrivals)))
        return sorted(records, key=lambda record: (record.arrived_at, record.request_id))

    def _requests(self, arrivals: Trace) -> Iterator[SimulatedRequest]:
        timeouts = self._plan.tunable.scheduler.queue_timeout_s
        disclosure = Disclosure(model=self._plan.tunable.scheduler.model)
        for simulated in requests_of(arrivals, disclosure, self._plan.engines[0].engine.block_size):
            request = simulated.request
            expires_at = request.arrived_at + timeouts.of(request.priority)
            yield replace(simulated, request=replace(request, expires_at=expires_at))

    def _learned_estimates(self) -> dict[str, object]:
        """The state of an estimator that has seen this traffic."""
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

    def _teach(self, simulation: Simulation) -> None:
        """Give a new scheduler what the one in production has learned."""
        scheduler = simulation.scheduler
        scheduler.estimator.restore(self._estimates)
        recent = self._recent()
        for one in recent:
            scheduler.isolation.observe(one.prompt_tokens)
        # A few dozen observations outweigh the prior; each costs a sum over its chunks.
        for one in recent[:: max(1, len(recent) // 64)]:
            # The engines of a pool are alike.
            for pool, plan in {each.pool: each for each in self._plan.engines}.items():
                budget = plan.engine.max_num_batched_tokens
                seconds = plan.step_time.prefill_s(one.prompt_tokens, max_num_batched_tokens=budget)
                scheduler.prefill_costs.observe(pool, one.prompt_tokens, seconds)

    def _recent(self) -> tuple[TraceRequest, ...]:
        learned = self._plan.settings.learned_requests
        return self._plan.traffic.requests[-learned:] if learned else ()


@lru_cache(maxsize=256)
def _partition(lengths: tuple[int, ...], settings: RefineAndPruneSettings) -> Partition:
    """Queues of the traffic; cached, because many candidates share their partition parameters."""
    return refine_and_prune(lengths, settings)


_FORECAST_REQUESTS = 2_000
"""Simulated at most for each of the two ways of a forecast: a second or two of a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Times to first token (`metrics.first_tokens`) of the same requests, scheduled and passed by.

    Attributes:
        requests: played each way, those of the warm-up included.
    """

    scheduled: Mapping[str, Mapping[str, Any]]
    passed: Mapping[str, Mapping[str, Any]]
    requests: int


def forecast(plan: TwinPlan, rest: Callable[[], object] = lambda: None) -> Forecast:
    """Play the latest requests both ways: all of them scheduled, and all passed by.

    While only a part of the traffic is scheduled, this shows what it would be like if all were. What it says
    of the way that is in force can be held against what was measured.
    """
    arrivals = replace(plan.traffic, requests=plan.traffic.requests[-_FORECAST_REQUESTS:])
    found = []
    for share in (1.0, 0.0):
        scheduler = replace(plan.tunable.scheduler, active_share=share)
        twin = DigitalTwin(replace(plan, tunable=replace(plan.tunable, scheduler=scheduler)))
        records = twin.serve(plan.space.current, arrivals)
        measured = records[round(plan.settings.warm_up_ratio * len(records)) :]
        found.append(
            first_token_figures(
                (record.prompt_tokens, record.ttft_s) for record in measured if record.ttft_s is not None
            )
        )
        rest()
    return Forecast(scheduled=found[0], passed=found[1], requests=len(arrivals.requests))


_twin: DigitalTwin | None = None
"""The twin of a worker process."""


class TwinProcesses:
    """A twin in each of `jobs` processes; with one job, in this process. To be closed, or used in `with`."""

    def __init__(self, plan: TwinPlan, *, jobs: int = 1) -> None:
        if jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {jobs}")
        self._own = DigitalTwin(plan) if jobs == 1 else None
        self._processes = None
        if jobs > 1:
            # A fresh interpreter each: a fork of one that draws a progress bar may hang on the bar's lock.
            context = multiprocessing.get_context("spawn")
            self._processes = ProcessPoolExecutor(
                jobs, mp_context=context, initializer=_begin, initargs=(plan,)
            )

    def __enter__(self) -> "TwinProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes; unfinished jobs are lost."""
        if self._processes is not None:
            self._processes.shutdown(cancel_futures=True)

    def play(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, WindowResult]]:
        """Each job with its result, in the order of the jobs."""
        if self._own is not None:
            for job in jobs:
                yield job, _played(self._own, job)
            return
        assert self._processes is not None
        yield from zip(jobs, self._processes.map(_play, jobs), strict=True)


def _begin(plan: TwinPlan) -> None:
    global _twin  # noqa: PLW0603 - a process of the pool has nothing else to keep it in
    _twin = DigitalTwin(plan)


def _play(job: Job) -> WindowResult:
    assert _twin is not None
    return _played(_twin, job)


def _played(twin: DigitalTwin, job: Job) -> WindowResult:
    """The result of a job; one that fails has no reward, which never counts as good, and the reason."""
    try:
        return twin.play(job.values, job.window)
    except Exception as error:  # noqa: BLE001 - one candidate must not end the search, whatever it breaks
        reason = f"{type(error).__name__}: {error}"
        return WindowResult(reward=Reward(value=None, reason=reason), requests=0)
