"""Tuning loop of a running scheduler, as a state machine without a clock.

It receives observations, returns orders for the scheduler, and occasionally hands out work: a fit of the
twin's engines or a search, one at a time. The tuner actor drives the loop alongside a live scheduler
(`serving.tuner`), and experiments drive it with a simulated one, so they measure the code that runs in
production.

All times are on the scheduler's clock. A new scheduler has another clock, and receives the values that were
adopted with the earlier one (`begin`).

Only the scheduler's settings are tuned here. Those of Refine-and-Prune (alpha, the number of queues) change
the queues themselves and cannot be tried in slices of a minute.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from msgspec import Struct

from serve_app.core import SchedulerSettings
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.routing.snapshot import decoded, encoded
from serve_app.lab.simulation.simulation import SimulationSettings
from serve_app.tuning.digital_twin import (
    DigitalTwin,
    SearchKind,
    TrafficLog,
    TwinCalibration,
    TwinPlan,
    search_twin,
)
from serve_app.tuning.engine_fit import EngineFitResult, EngineFitTask, fit_engines
from serve_app.tuning.objective import Reward, reward_of
from serve_app.tuning.rollout import DecisionKind, Observation, Retune, Rollout, RolloutState
from serve_app.tuning.search_space import SearchSpace, Tunable, parameters_of, space_of
from serve_app.tuning.settings import ParameterTuningSettings
from serve_app.tuning.strategic_loop import RefineAndPruneSettings
from serve_app.tuning.study import Budget, Finding, StudySettings

_RECENT = 50_000
"""Outcomes that slices are judged by: two slices at 400 requests/s."""
_SHOWN = 12
_STUDIES_KEPT = 50
_MAX_DOUBLINGS = 2
"""Maximum doublings of the search interval after searches without a result. A search takes a CPU minute."""
_DEFAULT_QUEUES = RefineAndPruneSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTask:
    """A search in the twin of `plan`."""

    plan: TwinPlan
    study: StudySettings
    cpu_s: float
    kind: SearchKind = "presets"


Work = EngineFitTask | SearchTask
Result = EngineFitResult | Finding


def carry_out(
    work: Work, clock: Callable[[], float], yield_cpu: Callable[[], object] = lambda: None
) -> Result:
    """Carry out a piece of work in this thread.

    Args:
        clock: returns CPU seconds, for the budget of a search.
        yield_cpu: called now and then; a driver that is limited to a share of a core waits there.
    """
    if isinstance(work, EngineFitTask):
        return fit_engines(work, yield_cpu)
    budget = Budget(clock=clock, seconds=work.cpu_s, yield_cpu=yield_cpu)
    return search_twin(work.plan, work.study, DigitalTwin(work.plan).play, budget, work.kind)


class _State(Struct):
    rollout: RolloutState
    studies: list[dict[str, Any]] = []
    twin: dict[str, Any] = {}


class ParameterLoop:
    """Tuning loop of one scheduler.

    Args:
        configured: the settings that the scheduler started with.
        queues: how the application learns its length queues; the twin learns them in the same way.

    Attributes:
        rollout: the incumbent values, the values on trial, and the decisions so far.
        calibration: the engines of the twin.
        work: the piece of work that was handed out and has not ended; None if there is none.
    """

    def __init__(
        self,
        configured: SchedulerSettings,
        settings: ParameterTuningSettings,
        now: float,
        queues: RefineAndPruneSettings = _DEFAULT_QUEUES,
    ) -> None:
        self._settings, self._queues = settings, queues
        self._studies: deque[dict[str, Any]] = deque(maxlen=_STUDIES_KEPT)
        self._searches = self._candidates = 0
        # Consecutive searches without a result.
        self._fruitless = 0
        self._decisions: Counter[DecisionKind] = Counter()
        self.calibration = TwinCalibration(settings.calibration, settings.profile)
        self._start(configured, now)

    def _start(self, configured: SchedulerSettings, now: float) -> None:
        # Nothing is tried while a share of the requests is not scheduled, so the twin schedules all of them.
        self._configured, self._now = replace(configured, active_share=1.0), now
        self._space = _space(self._configured)
        self.rollout = Rollout(self._space, self._space.current, self._settings.rollout)
        # Counts continue with the next scheduler.
        self.rollout.decisions = self._decisions
        # Times of an earlier scheduler are on another clock, so its traffic and work are discarded.
        self._traffic = TrafficLog()
        self.work: Work | None = None
        self._work_began, self._rest_until = now, -math.inf
        self._next_search_at = now
        self.calibration.restart()
        # Requests since the last search began.
        self._unsearched = 0
        self._recent: deque[RequestRecord] = deque(maxlen=_RECENT)

    def __repr__(self) -> str:
        return f"<ParameterLoop {self.rollout} {self._traffic} work={type(self.work).__name__}>"

    # Events

    def begin(self, configured: SchedulerSettings, now: float, state: object = None) -> list[Retune]:
        """Begin with a new scheduler, and return orders that restore the adopted values.

        Args:
            state: result of `state` of an earlier loop; None for this one's.

        Raises:
            ValueError: the state is for other settings or invalid. Nothing of it is used, and the loop has
                begun without it.
        """
        rollout = self.rollout.state(self._now)
        self._start(configured, now)
        if state is not None:
            known = decoded(state, _State)
            self._studies.extend(known.studies)
            self.calibration.restore(known.twin)
            rollout = known.rollout
        return self.rollout.restore(rollout, now)

    def observe(self, observation: Observation) -> list[Retune]:
        """Process what happened since the last call. To be called about every second during a trial."""
        now, records = observation.at, observation.records
        self._now = now
        orders: list[Retune] = []
        for record in records:
            self._traffic.add(record)
        self._recent += records
        self.calibration.note(records)
        self._unsearched += len(records)
        if observation.frozen and not self.rollout.frozen:
            orders += self.rollout.freeze(now, observation.frozen)
        elif self.rollout.frozen and not observation.frozen:
            orders += self.rollout.thaw(now)
        return orders + self.rollout.tick(now, observation.completed_until, self._reward_between)

    def work_due(self, observation: Observation) -> Work | None:
        """Return a piece of work to carry out now. The next one requires a call of `finish` first."""
        if observation.at < self._rest_until:
            return None
        if self.work is None and observation.replicas and self._settings.rollout.mode != "off":
            self._work_began = observation.at
            self.work = self.calibration.due(
                self._traffic, observation.replicas, observation.completed_until, observation.at
            ) or self._search_due(observation)
            return self.work
        return None

    def finish(self, result: Result | None, now: float, cpu_s: float = 0.0) -> list[Retune]:
        """Process the result of the work that was handed out; None if it failed.

        Args:
            cpu_s: CPU seconds that it took. No further work is due until they are `core_share` of the time
                since it began.
        """
        work, self.work = self.work, None
        self._rest_until = self._work_began + cpu_s / self._settings.core_share
        if isinstance(work, EngineFitTask):
            self.calibration.finish(result if isinstance(result, EngineFitResult) else None, now)
        elif isinstance(work, SearchTask):
            return self._on_finding(result if isinstance(result, Finding) else None, now)
        return []

    def _on_finding(self, finding: Finding | None, now: float) -> list[Retune]:
        """Propose a search's candidate, and delay the next search if several had no result."""
        if finding is not None:
            self._fruitless = 0 if finding.confident else self._fruitless + 1
        self._next_search_at = now + self._settings.every_s * 2.0 ** min(self._fruitless, _MAX_DOUBLINGS)
        if finding is None:
            return []
        found = finding.confirmation
        self._searches += 1
        self._candidates += finding.candidates
        self._studies.append(
            {
                "candidates": finding.candidates,
                "confident": finding.confident,
                "reason": finding.reason,
                "best": dict(finding.best) if finding.best else None,
                "gain": found.mean if found else None,
            }
        )
        if not finding.confident or finding.best is None or found is None:
            return []
        reason = f"reward {found.mean:+.4f} in the twin, best of {finding.candidates} candidates"
        return self.rollout.propose(finding.best, now, reason)

    # Work

    def _search_due(self, observation: Observation) -> SearchTask | None:
        if observation.at < self._next_search_at or 2 * self._unsearched < self._settings.min_requests:
            return None
        if self.rollout.obstacle(observation.at) or self.calibration.obstacle:
            return None
        plan = self._twin(observation)
        if plan is None or len(plan.traffic.requests) < self._settings.min_requests:
            return None
        self._unsearched = 0
        plan = replace(plan, settings=replace(plan.settings, seed=len(self._studies)))
        return SearchTask(
            plan=plan,
            study=self._settings.study,
            cpu_s=self._settings.search_cpu_s,
            kind=self._settings.search,
        )

    def _twin(self, observation: Observation) -> TwinPlan | None:
        """Return the twin of the incumbent values and recent traffic; None if too little is known."""
        traffic = self._traffic.trace(observation.completed_until)
        engines = self.calibration.engines(observation.replicas)
        if traffic is None or engines is None:
            return None
        tunable = Tunable(scheduler=self._configured, refine_and_prune=self._queues)
        tunable = tunable.with_values(self.rollout.incumbent, self._space)
        return TwinPlan(
            tunable=tunable,
            space=_space(tunable.scheduler),
            engines=engines,
            traffic=traffic,
            objective=self._settings.objective,
            settings=self._settings.twin,
            simulation=SimulationSettings(control_latency_s=self.calibration.latency_s),
        )

    def _reward_between(self, start: float, end: float) -> Reward:
        arrived = [each for each in self._recent if start <= each.arrived_at < end]
        return reward_of(arrived, self._settings.objective)

    # Reports and persistence

    def document(self) -> dict[str, Any]:
        """Return the state of the loop for `status` and the dashboard."""
        return {
            "mode": self._settings.rollout.mode,
            "state": self._activity(),
            "twin": self.calibration.document(),
            "audit": [
                {
                    "age_s": max(0.0, self._now - each.at),
                    "what": each.kind.value.replace("_", " "),
                    "why": each.reason,
                    "values": dict(each.values),
                    "figures": dict(each.figures),
                }
                for each in reversed(self.rollout.audit[-_SHOWN:])
            ],
            "studies": list(self._studies)[-_SHOWN:],
            "counts": {
                "searches": self._searches,
                "candidates": self._candidates,
                "decisions": {kind.value: self._decisions[kind] for kind in DecisionKind},
            },
        }

    def state(self) -> dict[str, Any]:
        """Return the state to persist across restarts, in plain values."""
        rollout = self.rollout.state(self._now)
        return encoded(_State(rollout, list(self._studies), self.calibration.state()))

    def _activity(self) -> str:
        """Describe the current activity, or what the loop waits for."""
        if self.rollout.target is not None:
            return "trial in progress"
        if isinstance(self.work, SearchTask):
            return "searching"
        waits = self.calibration.obstacle or self.rollout.obstacle(self._now)
        return f"idle: {waits}" if waits and self._settings.rollout.mode != "off" else "idle"


def _space(settings: SchedulerSettings) -> SearchSpace:
    """Return the parameters that can be tried under a running scheduler."""
    names = [each.name for each in parameters_of(settings) if not each.is_queue_parameter]
    return space_of(Tunable(scheduler=settings), only=names)
