"""The digital twin: recent traffic, played again on simulated engines under other settings.

The twin runs the production scheduler (`simulation.simulation`) on simulated replicas, and scores the records
by the objective of the live system. It knows from the first request on what production has learned by now:
output lengths, the cost of a prefill, and where "long" begins. The length queues are those that
Refine-and-Prune finds under the candidate's own parameters.

Three things it does not know. Prefixes: it has no cache hits. The requests that wait when a window begins: it
starts with an empty fleet and does not measure the first part. The error of the engine model: `engine_fit`
measures it, and fits the step times where it is large.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated

from serve_app.metrics.record import RequestRecord
from serve_app.request import Usage
from serve_app.scheduling.decision_log import Decision
from serve_app.scheduling.policies import learns_queues
from serve_app.scheduling.policies.partition import Partition
from serve_app.settings_base import NOT_NEGATIVE, at_least, settings, share_below
from serve_app.simulation.partitions import FixedPartition
from serve_app.simulation.simulation import ReplicaPlan, SimulatedRequest, Simulation, SimulationSettings
from serve_app.simulation.workload import Disclosure, fit, requests_of
from serve_app.tuning.objective.objective import ObjectiveSettings, reward_of
from serve_app.tuning.partition.refine_and_prune import refine_and_prune
from serve_app.tuning.partition.settings import RefineAndPruneSettings
from serve_app.tuning.search.search_space import SearchSpace, Values
from serve_app.tuning.search.study_run import WindowResult
from serve_app.tuning.search.tunable import Tunable
from serve_app.tuning.twin.traffic import resampled
from serve_app.workloads.trace import Trace, TraceRequest


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

    def serve(
        self, values: Values, arrivals: Trace, on_decision: Callable[[Decision], None] | None = None
    ) -> list[RequestRecord]:
        """Every request of a trace that fits the engines, under these values, by arrival.

        Args:
            on_decision: called with every decision of the scheduler.
        """
        arrivals = fit(arrivals, self._longest).trace
        plan = self._plan
        tunable = plan.tunable.with_values(values, plan.space)
        learner = None
        if learns_queues(tunable.scheduler.policy):
            learner = FixedPartition(_partition(self._lengths, tunable.refine_and_prune)).learner()
        simulation = Simulation(tunable.scheduler, plan.engines, plan.simulation, on_decision, learner)
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


def with_speed(engines: Sequence[ReplicaPlan], factor: float) -> tuple[ReplicaPlan, ...]:
    """The same engines, every iteration of which takes `factor` times as long.

    Raises:
        ValueError: the factor is not positive.
    """
    if not 0 < factor < float("inf"):
        raise ValueError(
            f"speed factor must be a positive number, got {factor}: 1 leaves engines as they are"
        )
    return tuple(replace(engine, step_time=engine.step_time.scaled(factor)) for engine in engines)
