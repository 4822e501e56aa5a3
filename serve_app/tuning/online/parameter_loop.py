"""The tuning loop of a running scheduler, as a machine without a clock.

Observations go in; orders for the scheduler come out, and now and then work to carry out: a fit of the twin's
engines (`twin_calibration`), a search, or a replay. The
tuner actor drives it beside a live scheduler (`serving.tuner.parameter_tuner`), and `tuned_simulation` beside
a simulated one, so experiments measure the code that runs in production.

All times are on the scheduler's clock. A new scheduler has another clock, and is given the values that an
earlier one had for good (`begin`).

Only the scheduler's own settings are tuned here. Those of Refine-and-Prune (alpha, the number of queues)
change the queues themselves, and cannot be tried in slices of a minute: `python -m serve_app tune` covers
them offline.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serve_app.metrics.record import RequestRecord
from serve_app.routing.replica import ReplicaSpec
from serve_app.routing.snapshot import Snapshot
from serve_app.scheduling import SchedulerSettings
from serve_app.simulation.simulation import SimulationSettings
from serve_app.tuning.objective.objective import reward_of
from serve_app.tuning.online.parameter_search import (
    ParameterTuningSettings,
    SearchResult,
    SearchTask,
)
from serve_app.tuning.online.replay import ReplayResult, ReplayTask
from serve_app.tuning.online.rollout import Rollout
from serve_app.tuning.online.rollout_settings import Act, Apply, Retune
from serve_app.tuning.online.slice_noise import rewards_in, steady_slices
from serve_app.tuning.online.trial_replays import TrialReplays
from serve_app.tuning.online.twin_calibration import TwinCalibration
from serve_app.tuning.partition.settings import RefineAndPruneSettings
from serve_app.tuning.search.search_space import SearchSpace, SettingPart
from serve_app.tuning.search.tunable import Tunable, parameters_of, space_of
from serve_app.tuning.twin.digital_twin import TwinPlan
from serve_app.tuning.twin.engine_fit import EngineFitTask
from serve_app.tuning.twin.forecast import Forecasts, ForecastTask
from serve_app.tuning.twin.traffic import TrafficLog
from serve_app.workloads.trace import Trace

_RECENT = 50_000
"""Outcomes that slices are judged by: two slices at 400 requests/s."""
_AUDITS_SHOWN = 12
_USUAL_QUEUES = RefineAndPruneSettings()
_STUDIES_KEPT = 50
_MOST_DOUBLINGS = 2
"""Of the interval between two searches, while they find nothing: a search takes a minute of CPU time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the scheduler has observed since the last time.

    Attributes:
        at: now, on the scheduler's clock, as all times here.
        settled_until: arrival of the oldest request that is still open; `at`, when none is.
        records: of the requests that were concluded.
        replicas: those that are connected.
        frozen: why nothing may be tried; empty when something may.
        active_share: of the requests, which are scheduled.
    """

    at: float
    settled_until: float
    records: Sequence[RequestRecord]
    replicas: Sequence[ReplicaSpec]
    frozen: str = ""
    active_share: float = 1.0


class ParameterLoop:
    """Tunes one scheduler.

    Args:
        configured: the settings that it began with.
        queues: how the application learns its length queues; the twin learns its own in the same way.

    Attributes:
        rollout: the values in force and on trial, and the decisions so far.
        calibration: the engines of the twin.
        forecasts: of what it would be like if all requests were scheduled.
    """

    def __init__(
        self,
        configured: SchedulerSettings,
        settings: ParameterTuningSettings,
        now: float,
        queues: RefineAndPruneSettings = _USUAL_QUEUES,
    ) -> None:
        self._settings, self._queues = settings, queues
        self._studies: deque[dict[str, Any]] = deque(maxlen=_STUDIES_KEPT)
        self._searching = self._replaying = False
        self._searches = self._trials = 0
        # Searches in a row that found nothing.
        self._in_vain = 0
        self._acts: Counter[Act] = Counter()
        self.calibration = TwinCalibration(settings.calibration, settings.profile)
        self.forecasts = Forecasts()
        self._start(configured, now)

    def _start(self, configured: SchedulerSettings, now: float) -> None:
        # Nothing is tried while a part of the requests passes by, so a twin schedules all of them.
        self._configured, self._now = replace(configured, active_share=1.0), now
        configured = self._configured
        self._space = _space(configured)
        self.rollout = Rollout(self._space, self._space.current, self._settings.rollout)
        # Counts go on with the next scheduler.
        self.rollout.acts = self._acts
        # Times of an earlier scheduler are on another clock.
        self._traffic, self._next_search_at = TrafficLog(), now
        self.calibration.restart()
        # Requests since the last search began.
        self._unsearched = 0
        self._recent: deque[RequestRecord] = deque(maxlen=_RECENT)
        # The time of the last change, and the arrival of the oldest open request.
        self._steady_since = self._settled_until = now
        self._replays = TrialReplays(self._settings.rollout, self.rollout, self._traffic, self._twin)

    def __repr__(self) -> str:
        searching = " searching" if self._searching else ""
        return f"<ParameterLoop {self.rollout}{searching} {self._traffic}>"

    @property
    def is_searching(self) -> bool:
        """Whether a search was handed out that has not ended."""
        return self._searching

    # Events

    def begin(self, configured: SchedulerSettings, now: float, state: Snapshot | None = None) -> list[Retune]:
        """Begin with a new scheduler: give it the values that the one before had for good.

        Args:
            state: what `state` returned, of an earlier loop; None: of this one.

        Raises:
            ValueError: the state is of other settings, or broken; nothing of it is taken over then, and the
                loop has begun without it.
        """
        known = self.state() if state is None else state
        rollout, studies = known.get("rollout"), known.get("studies")
        self._start(configured, now)
        if state is not None and isinstance(studies, list):
            self._studies.extend(studies)
        if state is not None and "twin" in known:
            self.calibration.restore(known["twin"])
        return self._orders(self.rollout.restore(rollout, now)) if isinstance(rollout, Mapping) else []

    def observe(self, observation: Observation) -> list[Retune]:
        """Take in what happened since the last call; to be called every second or so."""
        now = self._now = observation.at
        self._settled_until = observation.settled_until
        applies: list[Apply] = []
        for record in observation.records:
            self._traffic.add(record)
            self._recent.append(record)
        self.calibration.note(observation.records)
        self._unsearched += len(observation.records)
        if observation.frozen and not self.rollout.frozen:
            applies += self.rollout.freeze(now, observation.frozen)
        elif self.rollout.frozen and not observation.frozen:
            applies += self.rollout.thaw(now)
        applies += self.rollout.tick(now)
        for part in self.rollout.to_judge(now, observation.settled_until):
            arrived = [each for each in self._recent if part.start <= each.arrived_at < part.end]
            reward = reward_of(arrived, self._settings.objective)
            applies += self.rollout.judge(part, reward, now, observation.settled_until)
        applies += self._replays.advance(now, observation.settled_until, observation.replicas)
        return self._orders(applies)

    def replay_due(self) -> ReplayTask | None:
        """Slices to replay now; their result or failure has to follow before there are others."""
        task = None if self._replaying else self._replays.take_due()
        self._replaying = self._replaying or task is not None
        return task

    def on_replay_result(self, result: ReplayResult, now: float) -> list[Retune]:
        """Take in what the twin expects of some slices."""
        self._replaying = False
        return self._orders(self._replays.on_result(result, now))

    def on_replay_failure(self, now: float) -> list[Retune]:
        """Go on without the result of a replay."""
        self._replaying = False
        return self._orders(self._replays.on_failure(now))

    def fit_due(self, observation: Observation) -> EngineFitTask | None:
        """A fit of the twin's engines to carry out now; its result or failure has to follow."""
        if self._settings.rollout.mode == "off":
            return None
        return self.calibration.due(
            self._traffic, observation.replicas, observation.settled_until, observation.at
        )

    def forecast_due(self, observation: Observation) -> ForecastTask | None:
        """A forecast to make now; its result or failure has to follow."""

        def plan() -> TwinPlan | None:
            traffic = self._traffic.trace(observation.settled_until)
            return None if traffic is None else self._twin(traffic, observation.replicas)

        obstacle = self.calibration.obstacle or ("" if observation.replicas else "no replica is connected")
        return self.forecasts.due(observation.active_share, obstacle, plan, observation.at)

    def search_due(self, observation: Observation) -> SearchTask | None:
        """A search to carry out now; its result or failure has to follow before there is another."""
        if self._searching or observation.at < self._next_search_at or not observation.replicas:
            return None
        if not self.rollout.is_ready(observation.at) or self.calibration.obstacle:
            return None
        if 2 * self._unsearched < self._settings.min_requests:
            return None
        traffic = self._traffic.trace(observation.settled_until)
        if traffic is None or len(traffic.requests) < self._settings.min_requests:
            return None
        plan = self._twin(traffic, observation.replicas)
        if plan is None:
            return None
        self._searching, self._unsearched = True, 0
        return SearchTask(plan=replace(plan, settings=replace(plan.settings, seed=len(self._studies))))

    def on_search_result(self, result: SearchResult, now: float) -> list[Retune]:
        """Propose what a search has found."""
        self._in_vain = 0 if result.finding.confident else self._in_vain + 1
        self.on_search_failure(now)
        finding, found = result.finding, result.finding.confirmation
        self._searches += 1
        self._trials += finding.trials
        self._studies.append(
            {
                "trials": finding.trials,
                "confident": finding.confident,
                "reason": finding.reason,
                "best": dict(finding.best.values) if finding.best else None,
                "gain": found.mean if found else None,
            }
        )
        if not finding.confident or finding.best is None or found is None:
            return []
        reason = f"reward {found.mean:+.4f} in the twin, over {finding.trials} candidates"
        slices = steady_slices(self._steady_since, self._settled_until, self._settings.rollout)
        rewards = rewards_in(slices, self._recent, self._settings.objective)
        noise, control = self._replays.prepare_trial(slices, rewards)
        return self._orders(self.rollout.propose(finding.best.values, now, reason, noise, control))

    def on_search_failure(self, now: float) -> None:
        """Note that a search has ended; the next one comes later where several have found nothing."""
        self._searching = False
        self._next_search_at = now + self._settings.every_s * 2.0 ** min(self._in_vain, _MOST_DOUBLINGS)

    # For people, and for a restart

    def document(self) -> dict[str, Any]:
        """The state of the loop, for people."""
        return {
            "mode": self._settings.rollout.mode,
            "state": self._doing(),
            "twin": self.calibration.document(),
            "forecast": self.forecasts.document(self._now),
            "audit": [
                {
                    "age_s": max(0.0, self._now - each.at),
                    "what": each.act.value.replace("_", " "),
                    "why": each.reason,
                    "values": dict(each.values),
                    "figures": dict(each.figures),
                }
                for each in reversed(self.rollout.audit[-_AUDITS_SHOWN:])
            ],
            "studies": list(self._studies)[-_AUDITS_SHOWN:],
            "counts": {
                "searches": self._searches,
                "trials": self._trials,
                "decisions": {act.value: self._acts[act] for act in Act},
            },
        }

    def state(self) -> dict[str, Any]:
        """What a restart needs, in plain values."""
        return {
            "rollout": self.rollout.state(self._now),
            "studies": list(self._studies),
            "twin": self.calibration.state(),
        }

    def _doing(self) -> str:
        """What the loop does, or waits for, in words."""
        if self.rollout.target is not None:
            return "trying a step"
        if self._searching:
            return "searching"
        if self._settings.rollout.mode == "off":
            return "watching"
        if obstacle := self.calibration.obstacle:
            return f"watching: {obstacle}"
        if waits := self.rollout.why_not(self._now):
            return f"watching: {waits}"
        return "watching"

    def _twin(self, traffic: Trace, replicas: Sequence[ReplicaSpec]) -> TwinPlan | None:
        """The twin of the values in force; None while nothing is known of the engines."""
        engines = self.calibration.engines(replicas)
        if engines is None:
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

    def _orders(self, applies: Sequence[Apply]) -> list[Retune]:
        if applies:
            self._steady_since = self._now
        latest = self.rollout.audit[-1] if self.rollout.audit else None
        reason = f"{latest.act.value}: {latest.reason}" if latest else "tuned before"
        return [
            Retune(
                values={self._space[name].path: value for name, value in apply.values.items()},
                valid_s=apply.valid_s,
                reason=reason,
            )
            for apply in applies
        ]


def _space(settings: SchedulerSettings) -> SearchSpace:
    """The parameters that can be tried under a running scheduler."""
    names = [each.name for each in parameters_of(settings) if each.part is SettingPart.SCHEDULER]
    return space_of(Tunable(scheduler=settings), only=names)
