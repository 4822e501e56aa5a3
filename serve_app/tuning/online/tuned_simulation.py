"""A simulated production that is tuned while it runs: the loop of the live tuner, at simulated time.

The scheduler, its engines and its requests are those of `simulation.world`. Every second the tuner's loop
(`parameter_loop`) sees what the live one would be told, and what it orders is done as the live scheduler's
desk does it: values for good stay, values on trial run out. A search is carried out when it is ordered, and
its result comes as much later as it would have taken beside a live scheduler.

So that a run can be repeated to the byte, the clock of a search counts simulated requests, at a stated pace.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from serve_app.metrics.record import RequestRecord
from serve_app.scheduling import SchedulerSettings
from serve_app.scheduling.events import Arrived, Retuned
from serve_app.scheduling.retuning import checked_retuning
from serve_app.simulation.partitions import PartitionLearner
from serve_app.simulation.replica import ReplicaPlan
from serve_app.simulation.simulation import Decision, SimulatedRequest, Simulation, SimulationSettings
from serve_app.simulation.timeline import Rank
from serve_app.tuning.online.outcome_window import OutcomeWindow, record_of
from serve_app.tuning.online.parameter_loop import ParameterLoop, Seen
from serve_app.tuning.online.parameter_search import ParameterTuningSettings, Searched, SearchTask, search
from serve_app.tuning.online.replay import Replayed, ReplayTask, replay
from serve_app.tuning.online.retune import Retune
from serve_app.tuning.search.scoreboard import Job
from serve_app.tuning.search.settings_path import with_values
from serve_app.tuning.search.study_run import Budget, Twin
from serve_app.tuning.search.tunable import with_weights
from serve_app.tuning.twin.digital_twin import Played

Searcher = Callable[[SearchTask], Searched]

Replayer = Callable[[ReplayTask], Replayed]

PACE_REQUESTS_PER_S = 2_000.0
"""Requests that a core simulates in a second."""
LOOK_INTERVAL_S = 1.0
"""Between two looks of the tuner, as of the live one when it tunes values."""


def counting_search(settings: ParameterTuningSettings, pace_requests_per_s: float) -> Searcher:
    """Searches whose clock counts simulated requests.

    Args:
        pace_requests_per_s: how many a core simulates in a second; what `settings.search_cpu_s` is spent at.

    Raises:
        ValueError: the pace is not positive.
    """
    if not 0 < pace_requests_per_s < math.inf:
        raise ValueError(f"pace_requests_per_s must be a positive number, got {pace_requests_per_s}")

    def searcher(task: SearchTask) -> Searched:
        counted = _Counted()
        budget = Budget(clock=lambda: counted.requests / pace_requests_per_s, seconds=settings.search_cpu_s)
        return search(task, settings, budget, counted.around)

    return searcher


def counting_replay(pace_requests_per_s: float = PACE_REQUESTS_PER_S) -> Replayer:
    """Replays whose clock counts simulated requests, as `counting_search` does."""

    def replayer(task: ReplayTask) -> Replayed:
        result = replay(task)
        return replace(result, seconds=result.requests / pace_requests_per_s)

    return replayer


class _Counted:
    """A twin that counts what it plays."""

    def __init__(self) -> None:
        self.requests = 0
        self._twin: Twin | None = None

    def around(self, twin: Twin) -> Twin:
        self._twin = twin
        return self

    def play(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Played]]:
        assert self._twin is not None
        for job, played in self._twin.play(jobs):
            self.requests += played.requests
            yield job, played


@dataclass(slots=True)
class TunedSimulation:
    """One run.

    Args:
        searcher: carries out a search; its `seconds` are those of one core.
        replayer: carries out a replay, in the same way.
        learner: of length queues, as for `Simulation`.
        on_decision: as for `Simulation`.

    Attributes:
        loop: the tuner's.
        orders: what it ordered, each with its time.
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
    world: Simulation = field(init=False)
    loop: ParameterLoop = field(init=False)
    orders: list[tuple[float, Retune]] = field(init=False, default_factory=list)
    searches: int = field(init=False, default=0)
    _outcomes: OutcomeWindow = field(init=False, default_factory=OutcomeWindow)
    _for_good: SchedulerSettings = field(init=False)
    # What a search has found, and when it would have ended beside a live scheduler.
    _found: tuple[float, Searched] | None = field(init=False, default=None)
    _replayed: tuple[float, Replayed] | None = field(init=False, default=None)
    _last_arrival: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.world = Simulation(self.scheduler_settings, self.plans, self.settings, self._note, self.learner)
        self._for_good = with_weights(self.scheduler_settings)
        # As a live one, it begins with its first look.
        self.loop = ParameterLoop(self._for_good, self.tuning, LOOK_INTERVAL_S)

    def run(self, requests: Sequence[SimulatedRequest]) -> list[RequestRecord]:
        """Play all requests to their end and return their records; the tuner looks until the last arrives."""
        self._last_arrival = max((each.request.arrived_at for each in requests), default=0.0)
        self._plan_look()
        return self.world.run(requests)

    def _note(self, decision: Decision) -> None:
        """The scheduler has handled an event; its commands are still to be carried out."""
        event = decision.event
        if isinstance(event, Arrived):
            entry = self.world.scheduler.find(event.request.request_id)
            if entry is not None:
                self._outcomes.on_arrival(entry)
        self._outcomes.fed(event, list(decision.commands), decision.at)
        if self.on_decision is not None:
            self.on_decision(decision)

    def _plan_look(self) -> None:
        at = self.world.timeline.now + LOOK_INTERVAL_S
        if at <= self._last_arrival:
            self.world.timeline.at(at, Rank.FEEDBACK, self._look)

    def _look(self) -> None:
        now = self.world.timeline.now
        seen = Seen(
            at=now,
            settled_until=self._outcomes.settled_until(now),
            records=[record_of(row) for row in self._outcomes.take()],
            replicas=[plan.spec for plan in self.plans],
        )
        self._carry_out(self.loop.see(seen))
        if self._found is not None and now >= self._found[0]:
            (_, result), self._found = self._found, None
            self._carry_out(self.loop.searched(result, now))
        if self._replayed is not None and now >= self._replayed[0]:
            (_, expected), self._replayed = self._replayed, None
            self._carry_out(self.loop.replayed(expected, now))
        self._begin_work(seen)
        self._plan_look()

    def _begin_work(self, seen: Seen) -> None:
        """Carry out at once what is due; its result comes when a live tuner would have it."""
        search_task = self.loop.search_due(seen)
        if search_task is not None:
            found = self.searcher(search_task)
            self.searches += 1
            self._found = (seen.at + found.seconds / self.tuning.core_share, found)
        replay_task = self.loop.replay_due()
        if replay_task is not None:
            replayed = self.replayer(replay_task)
            self._replayed = (seen.at + replayed.seconds / self.tuning.core_share, replayed)

    def _carry_out(self, orders: Sequence[Retune]) -> None:
        for order in orders:
            self.orders.append((self.world.timeline.now, order))
            self._retune(order)

    def _retune(self, order: Retune) -> None:
        """As `serving.tuner_desk` does it; the parity test holds them together."""
        wanted = with_values(self._for_good, order.values)
        self.world.feed(Retuned(checked_retuning(self.world.scheduler.settings, wanted)))
        if order.valid_s is None:
            self._for_good = wanted
        else:
            count, at = len(self.orders), self.world.timeline.now + order.valid_s
            self.world.timeline.at(at, Rank.FEEDBACK, partial(self._go_back, count))

    def _go_back(self, count: int) -> None:
        """The time of an order is over; nothing happens when another one came since."""
        if count == len(self.orders):
            self.world.feed(Retuned(self._for_good))
