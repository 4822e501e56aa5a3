"""Digital twin: replays recent traffic on simulated engines with other settings.

The twin runs the production scheduler (`lab.simulation.simulation`) on simulated replicas, and scores the
records by the objective of the live system. It starts with what production has learned so far: output
lengths, prefill costs, and the boundary of long prompts. Its length queues are those that Refine-and-Prune
finds with the candidate's parameters.

The twin has three known limitations:

- It has no prefix cache hits.
- It starts each window with an empty fleet, without the requests that waited in production. So it does not
  measure the first part of a window.
- Its engine model has an error. `engine_fit` measures it, and fits the step times if it is large.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.policies import learns_queues
from serve_app.core.policies.length_queues import Partition
from serve_app.core.settings_base import NOT_NEGATIVE, at_least, settings, share_below
from serve_app.lab.simulation.baselines import SIMULATED_POLICIES
from serve_app.lab.simulation.run import Disclosure, fit, requests_of
from serve_app.lab.simulation.simulation import (
    FixedPartition,
    ReplicaPlan,
    SimulatedRequest,
    Simulation,
    SimulationSettings,
)
from serve_app.lab.workloads.trace import Trace, TraceRequest
from serve_app.request import Usage
from serve_app.tuning.objective import ObjectiveSettings, Reward, reward_of
from serve_app.tuning.refine_and_prune import RefineAndPruneSettings, refine_and_prune
from serve_app.tuning.search_space import SearchSpace, Tunable, Values
from serve_app.tuning.study import WindowResult
from serve_app.tuning.traffic import resampled


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

    def _estimator_state(self) -> dict[str, object]:
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
