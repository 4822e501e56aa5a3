"""Better values for the settings of a running scheduler, as a machine without a clock.

What was seen goes in, orders for the scheduler come out, and now and then a search to carry out. The tuner
actor drives it beside a live scheduler (`serving.parameter_tuner`), and `tuned_world` beside a simulated
one; what is measured there is the code that runs.

All times are on the scheduler's clock. A new scheduler has another clock, and is given the values that an
earlier one had for good (`begin`).

Only the scheduler's own settings are tuned here. Those of Refine-and-Prune (alpha, the number of queues)
change the queues themselves, and cannot be tried in slices of a minute: `python -m serve_app tune` covers
them offline.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serve_app.metrics.record import RequestRecord
from serve_app.routing.replica import ReplicaSpec
from serve_app.routing.snapshot import Snapshot
from serve_app.scheduling import SchedulerSettings
from serve_app.simulation.replica import ReplicaPlan
from serve_app.tuning.objective.objective import Reward, reward_of
from serve_app.tuning.online.control_variate import control_of
from serve_app.tuning.online.parameter_search import ParameterTuningSettings, Searched, SearchTask, engines_of
from serve_app.tuning.online.replay import LEAD_SLICES, MOST_REQUESTS, Replayed, ReplayTask
from serve_app.tuning.online.retune import Retune
from serve_app.tuning.online.rollout import Rollout
from serve_app.tuning.online.rollout_settings import Apply
from serve_app.tuning.online.slice_noise import (
    SLICES,
    Interval,
    Measured,
    Neighbours,
    neighbours_in,
    rewards_in,
    slice_noise_of,
    steady_slices,
)
from serve_app.tuning.search.search_space import SearchSpace, SettingPart
from serve_app.tuning.search.tunable import Tunable, parameters_of, space_of
from serve_app.tuning.twin.digital_twin import TwinPlan, with_speed
from serve_app.tuning.twin.traffic import TrafficLog
from serve_app.workloads.trace import Trace

_RECENT = 50_000
"""Outcomes that slices are judged by: two slices at 400 requests/s."""
_AUDITS_SHOWN = 12
_STUDIES_KEPT = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the scheduler has seen since the last time.

    Attributes:
        at: now, on the scheduler's clock, which all times here are on.
        settled_until: when the oldest request arrived that is not over yet; `at`, when none is open.
        records: of the requests that were concluded.
        replicas: those that are connected.
        frozen: why nothing may be tried; empty when something may.
    """

    at: float
    settled_until: float
    records: Sequence[RequestRecord]
    replicas: Sequence[ReplicaSpec]
    frozen: str = ""


class ParameterLoop:
    """Tunes one scheduler.

    Args:
        configured: the settings that it began with.

    Attributes:
        rollout: what is in force and on trial, and the decisions so far.
    """

    def __init__(self, configured: SchedulerSettings, settings: ParameterTuningSettings, now: float) -> None:
        self._settings = settings
        self._studies: deque[dict[str, Any]] = deque(maxlen=_STUDIES_KEPT)
        self._searching = self._replaying = False
        # By how much engines were slower than their profile when that was measured last.
        self._speed_factor = 1.0
        self._start(configured, now)

    def _start(self, configured: SchedulerSettings, now: float) -> None:
        self._configured, self._now = configured, now
        space = _space(configured)
        self.rollout = Rollout(space, space.current, self._settings.rollout)
        # Times of a scheduler before are on another clock.
        self._traffic, self._next_search_at = TrafficLog(), now
        self._recent: deque[RequestRecord] = deque(maxlen=_RECENT)
        # Since when nothing was changed, and until when all that came is over.
        self._steady_since = self._settled_until = now
        # Slices before the last trial, what came of them, and those of them that are to be replayed.
        self._steady: tuple[Reward, ...] = ()
        self._to_replay: tuple[Interval, ...] = ()
        # Neighbouring slices of one side that the twin was asked of, the latest.
        self._neighbours: deque[Neighbours] = deque(maxlen=SLICES)
        # The replay that a trial waits for, since when, what came of its slices if they are steady ones, and
        # whether it is still to be handed out.
        self._awaited: ReplayTask | None = None
        self._awaited_for: tuple[Reward, ...] = ()
        self._awaited_since, self._is_replay_due = now, False

    def __repr__(self) -> str:
        searching = " searching" if self._searching else ""
        return f"<ParameterLoop {self.rollout}{searching} {self._traffic}>"

    @property
    def is_searching(self) -> bool:
        """Whether a search was ordered that has not ended."""
        return self._searching

    # What happens

    def begin(self, configured: SchedulerSettings, now: float, state: Snapshot | None = None) -> list[Retune]:
        """A scheduler that has not heard of this loop: give it what the one before had for good.

        Args:
            state: what `state` returned, of an earlier loop; None: of this one.

        Raises:
            ValueError: the state is of other settings than those of today, or broken; nothing of it is taken
                over then, and the loop has begun without it.
        """
        known = self.state() if state is None else state
        rollout, studies = known.get("rollout"), known.get("studies")
        self._start(configured, now)
        if state is not None and isinstance(studies, list):
            self._studies.extend(studies)
        return self._orders(self.rollout.restore(rollout, now)) if isinstance(rollout, Mapping) else []

    def see(self, seen: Seen) -> list[Retune]:
        """Time has passed and requests are over; to be called every second or so."""
        now = self._now = seen.at
        self._settled_until = seen.settled_until
        applies: list[Apply] = []
        for record in seen.records:
            self._traffic.add(record)
            self._recent.append(record)
        if seen.frozen and not self.rollout.frozen:
            applies += self.rollout.freeze(now, seen.frozen)
        elif self.rollout.frozen and not seen.frozen:
            applies += self.rollout.thaw(now)
        applies += self.rollout.tick(now)
        for part in self.rollout.to_judge(now, seen.settled_until):
            arrived = [each for each in self._recent if part.start <= each.arrived_at < part.end]
            reward = reward_of(arrived, self._settings.objective)
            applies += self.rollout.judged(part, reward, now, seen.settled_until)
        return self._orders(applies + self._await_replay(seen))

    def replay_due(self) -> ReplayTask | None:
        """Slices to replay now; `replayed` or `replay_failed` has to follow before there is another."""
        if self._replaying or not self._is_replay_due:
            return None
        self._replaying, self._is_replay_due = True, False
        return self._awaited

    def replayed(self, result: Replayed, now: float) -> list[Retune]:
        """The replay has ended: what the twin expects of some slices."""
        self._replaying = False
        if result.task is not self._awaited:
            return []
        self._awaited = None
        if not result.task.numbers:
            measured = map(Measured, self._awaited_for, result.expected)
            self._neighbours.extend(neighbours_in(measured))
            return self._orders(self.rollout.controlled(control_of(self._neighbours), now))
        expected = dict(zip(result.task.numbers, result.expected, strict=True))
        return self._orders(self.rollout.expected(result.task.trial, expected, now))

    def replay_failed(self, now: float) -> list[Retune]:
        """The replay has ended without a result; the trial goes on without."""
        self._replaying = False
        if self._awaited is None:
            return []
        self._awaited = None
        return self._orders(self.rollout.not_expected(now))

    def search_due(self, seen: Seen) -> SearchTask | None:
        """A search to carry out now; `searched` or `search_failed` has to follow before there is another."""
        if self._searching or seen.at < self._next_search_at or not seen.replicas:
            return None
        if not self.rollout.is_ready(seen.at):
            return None
        traffic = self._traffic.trace(seen.settled_until)
        if traffic is None or len(traffic.requests) < self._settings.min_requests:
            return None
        self._searching = True
        plan = self._plan_of(traffic, engines_of(seen.replicas, self._settings.profile))
        plan = replace(plan, settings=replace(plan.settings, seed=len(self._studies)))
        # Of this very traffic: those of an earlier mix would say that the engines have changed their pace.
        observed = tuple(self._traffic.recent(seen.settled_until))
        return SearchTask(plan=plan, observed=observed, settled_until=seen.settled_until)

    def searched(self, result: Searched, now: float) -> list[Retune]:
        """The search has ended: propose what it found."""
        self._end_search(now)
        finding, found = result.finding, result.finding.confirmation
        self._studies.append(
            {
                "trials": finding.trials,
                "speed_factor": result.speed_factor,
                "confident": finding.confident,
                "reason": finding.reason,
                "best": dict(finding.best.values) if finding.best else None,
                "gain": found.mean if found else None,
            }
        )
        if not finding.confident or finding.best is None or found is None:
            return []
        self._speed_factor = result.speed_factor
        reason = f"reward {found.mean:+.4f} in the twin, over {finding.trials} candidates"
        self._neighbours.extend(self.rollout.take_neighbours())
        slices = steady_slices(self._steady_since, self._settled_until, self._settings.rollout)
        self._steady = rewards_in(slices, self._recent, self._settings.objective)
        self._to_replay = slices if self._settings.rollout.control_variates and len(slices) > 1 else ()
        known = deque(self._neighbours, maxlen=SLICES)
        known.extend(neighbours_in(Measured(reward) for reward in self._steady))
        control = control_of(self._neighbours) if self._settings.rollout.control_variates else None
        applies = self.rollout.propose(finding.best.values, now, reason, slice_noise_of(known), control)
        if self.rollout.target is None:
            self._to_replay = ()
        return self._orders(applies)

    def search_failed(self, now: float) -> None:
        """The search has ended without a result; the next one comes when it would have come."""
        self._end_search(now)

    # For people, and for a restart

    def document(self) -> dict[str, Any]:
        """What this loop does, for people."""
        state = "searching" if self._searching else "watching"
        if self.rollout.target is not None:
            state = "trying a step"
        return {
            "mode": self.rollout.mode,
            "state": state,
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
        }

    def state(self) -> dict[str, Any]:
        """What a restart has to know, in plain values."""
        return {"rollout": self.rollout.state(self._now), "studies": list(self._studies)}

    def _await_replay(self, seen: Seen) -> list[Apply]:
        """Ask for what the trial waits for, and do without what does not come."""
        if self._awaited is not None:
            if seen.at - self._awaited_since <= self._settings.rollout.judge_limit_s:
                return []
            self._awaited, self._is_replay_due = None, False
            return self.rollout.not_expected(seen.at)
        # Asked first, since this is done every second, and a trace of the traffic costs milliseconds.
        if self.rollout.target is None or not (self._to_replay or self.rollout.to_expect()):
            return []
        # First how far the twin is to be believed, then what it expects.
        steady, self._to_replay = self._to_replay, ()
        task = self._steady_task(seen, steady) if steady else self._pairs_task(seen)
        if task is not None:
            self._awaited, self._awaited_since, self._is_replay_due = task, seen.at, True
        elif not steady:
            return self.rollout.not_expected(seen.at)
        return []

    def _steady_task(self, seen: Seen, slices: Sequence[Interval]) -> ReplayTask | None:
        """The replay of the time before the trial; as much of it as is known and not too much."""
        for first in range(len(slices) - 1):
            task = self._task_of(seen, slices[first:])
            if task is not None:
                self._awaited_for = self._steady[first:]
                return task
        return None

    def _pairs_task(self, seen: Seen) -> ReplayTask | None:
        """The replay of what the trial waits for."""
        parts = self.rollout.to_expect()
        task = self._task_of(seen, [Interval(part.start, part.end) for part in parts])
        if task is None:
            return None
        return replace(task, numbers=tuple(part.number for part in parts), trial=self.rollout.trials)

    def _plan_of(self, traffic: Trace, engines: tuple[ReplicaPlan, ...]) -> TwinPlan:
        """The twin of what is in force."""
        tunable = Tunable(scheduler=self._configured)
        tunable = tunable.with_values(self.rollout.incumbent, _space(self._configured))
        return TwinPlan(
            tunable=tunable,
            space=_space(tunable.scheduler),
            engines=engines,
            traffic=traffic,
            objective=self._settings.objective,
            settings=self._settings.twin,
        )

    def _task_of(self, seen: Seen, slices: Sequence[Interval]) -> ReplayTask | None:
        """The replay of some slices; None when not all that came in them is known, or it is too much."""
        settings = self._settings.rollout
        lead_s = settings.settle_s + LEAD_SLICES * settings.slice_s
        traffic = self._traffic.trace(seen.settled_until)
        known = [
            arrivals
            for each in slices
            if (arrivals := self._traffic.stretch(each.start - lead_s, each.end)) is not None
        ]
        if traffic is None or not seen.replicas or len(known) < len(slices):
            return None
        engines = with_speed(engines_of(seen.replicas, self._settings.profile), self._speed_factor)
        task = ReplayTask(plan=self._plan_of(traffic, engines), slices=tuple(known), lead_s=lead_s)
        return task if task.requests <= MOST_REQUESTS else None

    def _end_search(self, now: float) -> None:
        self._searching = False
        self._next_search_at = now + self._settings.every_s

    def _orders(self, applies: Sequence[Apply]) -> list[Retune]:
        if applies:
            self._steady_since = self._now
        paths = {each.name: each.path for each in _space(self._configured)}
        latest = self.rollout.audit[-1] if self.rollout.audit else None
        reason = f"{latest.act.value}: {latest.reason}" if latest else "tuned before"
        return [
            Retune(
                values={paths[name]: value for name, value in apply.values.items()},
                valid_s=apply.valid_s,
                reason=reason,
            )
            for apply in applies
        ]


def _space(settings: SchedulerSettings) -> SearchSpace:
    """What can be tried under a running scheduler."""
    names = [each.name for each in parameters_of(settings) if each.part is SettingPart.SCHEDULER]
    return space_of(Tunable(scheduler=settings), only=names)
