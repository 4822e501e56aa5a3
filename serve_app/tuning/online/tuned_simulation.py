"""A simulated production that is tuned while it runs: the loop of the live tuner, in simulated time.

Scheduler, engines and requests are those of `simulation.simulation`. Every second the tuning loop
(`parameter_loop`) observes what the live one would. Its orders are carried out as the live tuning endpoint
does: permanent values stay, and values on trial expire. A search is carried out when it is due, and its
result comes as much later as it would have taken beside a live scheduler.

The clock of a search counts simulated requests at a stated pace, so a run can be repeated to the byte.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from serve_app.metrics.record import RequestRecord
from serve_app.scheduling import SchedulerSettings
from serve_app.scheduling.decision_log import Decision
from serve_app.scheduling.events import Arrived, Retuned
from serve_app.scheduling.retuning import checked_retuning
from serve_app.simulation.partitions import PartitionLearner
from serve_app.simulation.simulation import (
    Rank,
    ReplicaPlan,
    SimulatedRequest,
    Simulation,
    SimulationSettings,
)
from serve_app.tuning.online.outcome_window import OutcomeWindow, record_of
from serve_app.tuning.online.parameter_loop import Observation, ParameterLoop
from serve_app.tuning.online.parameter_search import (
    ParameterTuningSettings,
    SearchResult,
    SearchTask,
    search,
)
from serve_app.tuning.online.replay import ReplayResult, ReplayTask, replay
from serve_app.tuning.online.rollout_settings import Retune
from serve_app.tuning.search.settings_path import with_values
from serve_app.tuning.search.study import Job
from serve_app.tuning.search.study_run import Budget, WindowPlayer, WindowResult
from serve_app.tuning.search.tunable import with_weights
from serve_app.tuning.twin.engine_fit import EngineFitResult, EngineFitTask, fit_engines
from serve_app.tuning.twin.forecast import forecast

Searcher = Callable[[SearchTask], SearchResult]

Replayer = Callable[[ReplayTask], ReplayResult]

Fitter = Callable[[EngineFitTask], EngineFitResult]

PACE_REQUESTS_PER_S = 2_000.0
"""Requests that a core is assumed to simulate in a second."""
OBSERVATION_INTERVAL_S = 1.0
"""Between two observations of the tuner, as of the live one when it tunes values."""


def counting_search(settings: ParameterTuningSettings, pace_requests_per_s: float) -> Searcher:
    """Searches whose clock counts simulated requests.

    Args:
        pace_requests_per_s: how many a core simulates in a second of `settings.search_cpu_s`.

    Raises:
        ValueError: the pace is not positive.
    """
    if not 0 < pace_requests_per_s < math.inf:
        raise ValueError(f"pace_requests_per_s must be a positive number, got {pace_requests_per_s}")

    def searcher(task: SearchTask) -> SearchResult:
        counter = _RequestCounter()
        budget = Budget(clock=lambda: counter.requests / pace_requests_per_s, seconds=settings.search_cpu_s)
        return search(task, settings, budget, counter.around)

    return searcher


def counting_replay(pace_requests_per_s: float = PACE_REQUESTS_PER_S) -> Replayer:
    """Replays whose clock counts simulated requests, as `counting_search` does."""

    def replayer(task: ReplayTask) -> ReplayResult:
        result = replay(task)
        return replace(result, seconds=result.requests / pace_requests_per_s)

    return replayer


def counting_fit(pace_requests_per_s: float = PACE_REQUESTS_PER_S) -> Fitter:
    """Fits of the twin's engines whose clock counts simulated requests, as `counting_search` does."""

    def fitter(task: EngineFitTask) -> EngineFitResult:
        result = fit_engines(task)
        return replace(result, seconds=result.requests / pace_requests_per_s)

    return fitter


class _RequestCounter:
    """A player of windows that counts the requests it simulates."""

    def __init__(self) -> None:
        self.requests = 0
        self._player: WindowPlayer | None = None

    def around(self, player: WindowPlayer) -> WindowPlayer:
        self._player = player
        return self

    def play(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, WindowResult]]:
        assert self._player is not None
        for job, result in self._player.play(jobs):
            self.requests += result.requests
            yield job, result


@dataclass(slots=True)
class TunedSimulation:
    """One run.

    Args:
        searcher: carries out a search; the `seconds` of its result are those of one core.
        replayer: carries out a replay, likewise.
        fitter: carries out a fit of the twin's engines, likewise.
        learner: of length queues, as for `Simulation`.
        on_decision: as for `Simulation`.

    Attributes:
        loop: the tuner's.
        orders: the orders of the loop, each with its time.
        searches: how many were carried out.
    """

    scheduler_settings: SchedulerSettings
    plans: Sequence[ReplicaPlan]
    tuning: ParameterTuningSettings
    searcher: Searcher
    settings: SimulationSettings = field(default_factory=SimulationSettings)
    learner: PartitionLearner | None = None
    on_decision: Callable[[Decision], None] | None = None
    replayer: Replayer = field(default_factory=counting_replay)
    fitter: Fitter = field(default_factory=counting_fit)
    simulation: Simulation = field(init=False)
    loop: ParameterLoop = field(init=False)
    orders: list[tuple[float, Retune]] = field(init=False, default_factory=list)
    searches: int = field(init=False, default=0)
    _outcomes: OutcomeWindow = field(init=False, default_factory=OutcomeWindow)
    _permanent: SchedulerSettings = field(init=False)
    # The result of a search, a replay or a fit, and when it would have ended beside a live scheduler.
    _search_result: tuple[float, SearchResult] | None = field(init=False, default=None)
    _replay_result: tuple[float, ReplayResult] | None = field(init=False, default=None)
    _fit_result: tuple[float, EngineFitResult] | None = field(init=False, default=None)
    _last_arrival: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.simulation = Simulation(
            self.scheduler_settings, self.plans, self.settings, self._on_decision, self.learner
        )
        self._permanent = with_weights(self.scheduler_settings)
        # Like a live loop, it begins with its first observation.
        self.loop = ParameterLoop(self._permanent, self.tuning, OBSERVATION_INTERVAL_S)

    def run(self, requests: Sequence[SimulatedRequest]) -> list[RequestRecord]:
        """Play all requests to their end and return their records; the tuner runs until the last arrival."""
        self._last_arrival = max((each.request.arrived_at for each in requests), default=0.0)
        self._plan_observation()
        return self.simulation.run(requests)

    def _on_decision(self, decision: Decision) -> None:
        """The scheduler has handled an event; its commands are still to be carried out."""
        event = decision.event
        if isinstance(event, Arrived):
            scheduled = self.simulation.scheduler.find(event.request.request_id)
            if scheduled is not None:
                self._outcomes.on_arrival(scheduled)
        self._outcomes.on_event(event, list(decision.commands), decision.now)
        if self.on_decision is not None:
            self.on_decision(decision)

    def _plan_observation(self) -> None:
        at = self.simulation.timeline.now + OBSERVATION_INTERVAL_S
        if at <= self._last_arrival:
            self.simulation.timeline.at(at, Rank.FEEDBACK, self._observe)

    def _observe(self) -> None:
        now = self.simulation.timeline.now
        observation = Observation(
            at=now,
            settled_until=self._outcomes.settled_until(now),
            records=[record_of(row) for row in self._outcomes.take()],
            replicas=[plan.spec for plan in self.plans],
            frozen="" if self.scheduler_settings.active_share == 1 else "not all requests are scheduled",
            active_share=self.scheduler_settings.active_share,
        )
        self._carry_out(self.loop.observe(observation))
        if self._fit_result is not None and now >= self._fit_result[0]:
            (_, fitted), self._fit_result = self._fit_result, None
            self.loop.calibration.on_result(fitted, now)
        if self._search_result is not None and now >= self._search_result[0]:
            (_, found), self._search_result = self._search_result, None
            self._carry_out(self.loop.on_search_result(found, now))
        if self._replay_result is not None and now >= self._replay_result[0]:
            (_, replayed), self._replay_result = self._replay_result, None
            self._carry_out(self.loop.on_replay_result(replayed, now))
        self._begin_work(observation)
        self._plan_observation()

    def _begin_work(self, observation: Observation) -> None:
        """Carry out at once what is due; its result comes when a live tuner would have it."""
        fit_task = self.loop.fit_due(observation)
        if fit_task is not None:
            fitted = self.fitter(fit_task)
            self._fit_result = (observation.at + fitted.seconds / self.tuning.core_share, fitted)
        forecast_task = self.loop.forecast_due(observation)
        if forecast_task is not None:
            # Nothing in the simulation waits for it.
            self.loop.forecasts.on_result(forecast(forecast_task), observation.at)
        search_task = self.loop.search_due(observation)
        if search_task is not None:
            found = self.searcher(search_task)
            self.searches += 1
            self._search_result = (observation.at + found.seconds / self.tuning.core_share, found)
        replay_task = self.loop.replay_due()
        if replay_task is not None:
            replayed = self.replayer(replay_task)
            self._replay_result = (observation.at + replayed.seconds / self.tuning.core_share, replayed)

    def _carry_out(self, orders: Sequence[Retune]) -> None:
        for order in orders:
            self.orders.append((self.simulation.timeline.now, order))
            self._retune(order)

    def _retune(self, order: Retune) -> None:
        """Carry out an order as `serving.scheduler.tuning_endpoint` does; a parity test compares them."""
        wanted = with_values(self._permanent, order.values)
        self.simulation.feed(Retuned(checked_retuning(self.simulation.scheduler.settings, wanted)))
        if order.valid_s is None:
            self._permanent = wanted
        else:
            count, at = len(self.orders), self.simulation.timeline.now + order.valid_s
            self.simulation.timeline.at(at, Rank.FEEDBACK, partial(self._expire, count))

    def _expire(self, count: int) -> None:
        """Put the permanent values back in force, unless another order came since."""
        if count == len(self.orders):
            self.simulation.feed(Retuned(self._permanent))
