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
from serve_app.tuning.digital_twin import TwinPlan
from serve_app.tuning.objective import reward_of
from serve_app.tuning.parameter_search import ParameterTuningSettings, Searched, SearchTask, engines_of
from serve_app.tuning.retune import Retune
from serve_app.tuning.rollout import Rollout
from serve_app.tuning.rollout_settings import Apply
from serve_app.tuning.search_space import Part, SearchSpace
from serve_app.tuning.swings import swings_of
from serve_app.tuning.traffic import TrafficLog
from serve_app.tuning.tunable import Tunable, parameters_of, space_of

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
        self._searching = False
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
        return self._orders(applies)

    def search_due(self, seen: Seen) -> SearchTask | None:
        """A search to carry out now; `searched` or `search_failed` has to follow before there is another."""
        if self._searching or seen.at < self._next_search_at or not seen.replicas:
            return None
        if not self.rollout.is_ready(seen.at):
            return None
        traffic = self._traffic.trace(seen.settled_until)
        if traffic is None or len(traffic.requests) < self._settings.min_requests:
            return None
        configured = _space(self._configured)
        tunable = Tunable(scheduler=self._configured).with_values(self.rollout.incumbent, configured)
        self._searching = True
        plan = TwinPlan(
            tunable=tunable,
            space=_space(tunable.scheduler),
            engines=engines_of(seen.replicas, self._settings.profile),
            traffic=traffic,
            objective=self._settings.objective,
            settings=replace(self._settings.twin, seed=len(self._studies)),
        )
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
        reason = f"reward {found.mean:+.4f} in the twin, over {finding.trials} candidates"
        swings = swings_of(
            self._recent,
            self._steady_since,
            self._settled_until,
            self._settings.objective,
            self._settings.rollout,
        )
        return self._orders(self.rollout.propose(finding.best.values, now, reason, swings))

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
    names = [each.name for each in parameters_of(settings) if each.part is Part.SCHEDULER]
    return space_of(Tunable(scheduler=settings), only=names)
