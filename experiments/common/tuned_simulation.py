"""Simulated production with a running tuner: the live tuner's loop in simulated time.

Scheduler, engines and requests are those of `lab.simulation.simulation`. Every second the tuning loop
(`parameter_loop`) gets the observations that the live one would. Its orders are executed as by the live
tuning endpoint: permanent values stay, and trial values expire. Work starts when it is due, and its result is
delayed by the time that it would take beside a live scheduler.

The clock of work counts simulated requests at a stated pace, so runs can be repeated exactly.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from serve_app.core import Scheduler, SchedulerSettings
from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.decision_log import Decision
from serve_app.core.events import Arrived, FirstToken, Retuned
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.retuning import checked_retuning
from serve_app.lab.simulation.simulation import (
    PartitionLearner,
    Phase,
    ReplicaPlan,
    SimulatedRequest,
    Simulation,
    SimulationSettings,
)
from serve_app.serving.scheduler.journal import Entry, Journal, RequestHistory
from serve_app.tuning.digital_twin import DigitalTwin, TwinPlan, search_twin
from serve_app.tuning.engine_fit import EngineFitResult
from serve_app.tuning.parameter_loop import ParameterLoop, Result, SearchTask, Work, carry_out
from serve_app.tuning.rollout import Observation, Retune
from serve_app.tuning.search_space import Values, with_values
from serve_app.tuning.settings import ParameterTuningSettings
from serve_app.tuning.study import Budget, WindowResult

PACE_REQUESTS_PER_S = 2_000.0
"""Assumed number of requests that a core simulates per second."""
OBSERVATION_INTERVAL_S = 1.0
"""Interval of the tuner's observations, as of a live tuner of values."""

Worker = Callable[[Work], tuple[Result, float]]
"""Executes work; returns its result and the seconds of one core that it took."""


class CountingPlayer:
    """A twin whose clock counts its simulated requests."""

    def __init__(self, plan: TwinPlan, pace_requests_per_s: float = math.inf) -> None:
        self._twin = DigitalTwin(plan)
        self._pace_requests_per_s = pace_requests_per_s
        self.requests = 0

    def play(self, values: Values, window: int) -> WindowResult:
        """Return the result of a window with these values."""
        result = self._twin.play(values, window)
        self.requests += result.requests
        return result

    def clock(self) -> float:
        """Return CPU seconds at the stated pace."""
        return self.requests / self._pace_requests_per_s


def counting_worker(pace_requests_per_s: float = PACE_REQUESTS_PER_S) -> Worker:
    """Return a worker whose clock counts simulated requests.

    Args:
        pace_requests_per_s: requests that a core simulates per second.
    """

    def worker(work: Work) -> tuple[Result, float]:
        if not isinstance(work, SearchTask):
            result = carry_out(work, clock=lambda: 0.0)
            requests = result.requests if isinstance(result, EngineFitResult) else 0
            return result, requests / pace_requests_per_s
        player = CountingPlayer(work.plan, pace_requests_per_s)
        budget = Budget(clock=player.clock, seconds=work.cpu_s)
        return search_twin(work.plan, work.study, player.play, budget, work.kind), player.clock()

    return worker


@dataclass(slots=True)
class TunedSimulation:
    """One run.

    Args:
        worker: executes the tuner's work.
        learner: learner of length queues, as for `Simulation`.
        on_decision: as for `Simulation`.

    Attributes:
        loop: the tuner's loop.
        orders: the loop's orders with their times.
    """

    scheduler_settings: SchedulerSettings
    plans: Sequence[ReplicaPlan]
    tuning: ParameterTuningSettings
    worker: Worker = field(default_factory=counting_worker)
    settings: SimulationSettings = field(default_factory=SimulationSettings)
    learner: PartitionLearner | None = None
    on_decision: Callable[[Decision], None] | None = None
    simulation: Simulation = field(init=False)
    loop: ParameterLoop = field(init=False)
    orders: list[tuple[float, Retune]] = field(init=False, default_factory=list)
    # The live scheduler's history of requests, of which the tuner pulls the outcomes.
    _history: RequestHistory = field(init=False)
    _journal: Journal = field(init=False)
    _ends: int = field(init=False, default=0)
    _permanent: SchedulerSettings = field(init=False)
    # The result of the current work, and its end beside a live scheduler.
    _ending: tuple[float, Result, float] | None = field(init=False, default=None)
    _last_arrival: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.simulation = Simulation(
            self.scheduler_settings, self.plans, self.settings, self._on_decision, self.learner
        )
        self._history = RequestHistory(lambda _pool, _tokens: 0.0)
        self._history.is_pulled = True
        self._journal = Journal(on_error=_fail)
        self._journal.subscribe(self._history)
        self._permanent = self.scheduler_settings
        # Like a live loop, it begins with its first observation.
        self.loop = ParameterLoop(self._permanent, self.tuning, OBSERVATION_INTERVAL_S)

    def run(self, requests: Sequence[SimulatedRequest]) -> list[RequestRecord]:
        """Run all requests to their end and return their records; the tuner runs until the last arrival."""
        self._last_arrival = max((each.request.arrived_at for each in requests), default=0.0)
        self._plan_observation()
        return self.simulation.run(requests)

    def _on_decision(self, decision: Decision) -> None:
        """Note an event that the scheduler has handled; its commands follow."""
        # Others concern no request. They include the first ones, before there is a simulation.
        if decision.commands or isinstance(decision.event, Arrived | FirstToken):
            self._journal.append(_entry(self.simulation.scheduler, decision))
        if self.on_decision is not None:
            self.on_decision(decision)

    def _plan_observation(self) -> None:
        at = self.simulation.timeline.now + OBSERVATION_INTERVAL_S
        if at <= self._last_arrival:
            self.simulation.timeline.schedule(at, Phase.FEEDBACK, self._observe)

    def _observe(self) -> None:
        now = self.simulation.timeline.now
        observation = Observation(
            incarnation=1,
            lengths=[],
            at=now,
            completed_until=self._history.completed_until(now),
            outcomes=msgspec.msgpack.encode(self._history.outcomes_after(self._ends)),
            replicas=[plan.spec for plan in self.plans],
            frozen="" if self.scheduler_settings.active_share == 1 else "not all requests are scheduled",
        )
        self._ends = self._history.ends
        self._carry_out(self.loop.observe(observation))
        if self._ending is not None and now >= self._ending[0]:
            (_, result, cpu_s), self._ending = self._ending, None
            self._carry_out(self.loop.finish(result, now, cpu_s))
        if self._ending is None:
            work = self.loop.work_due(observation)
            if work is not None:
                result, seconds = self.worker(work)
                self._ending = (now + seconds / self.tuning.burst_share, result, seconds)
        self._plan_observation()

    def _carry_out(self, orders: Sequence[Retune]) -> None:
        for order in orders:
            self.orders.append((self.simulation.timeline.now, order))
            self._retune(order)

    def _retune(self, order: Retune) -> None:
        """Execute an order as `serving.scheduler.tuning_endpoint` does; a parity test compares them."""
        wanted = with_values(self._permanent, order.values)
        self.simulation.feed(Retuned(checked_retuning(self.simulation.scheduler.settings, wanted)))
        if order.valid_s is None:
            self._permanent = wanted
        else:
            count, at = len(self.orders), self.simulation.timeline.now + order.valid_s
            self.simulation.timeline.schedule(at, Phase.FEEDBACK, partial(self._expire, count))

    def _expire(self, count: int) -> None:
        """Restore the permanent values, unless another order arrived since."""
        if count == len(self.orders):
            self.simulation.feed(Retuned(self._permanent))


def _entry(core: Scheduler, decision: Decision) -> Entry:
    """Return the journal's entry of a decision that the scheduler has just made."""
    event, commands = decision.event, list(decision.commands)
    arrived = core.find(event.request.request_id) if isinstance(event, Arrived) else None
    requests = [
        core.ended.get(each.request_id) or core.find(each.request_id)
        if isinstance(each, Dispatch | Conclude)
        else None
        for each in commands
    ]
    return Entry(core, decision.now, event, commands, arrived, requests)


def _fail(observer: str) -> None:
    raise RuntimeError(f"{observer} failed")
