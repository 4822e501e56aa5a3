"""Better values for the settings of a scheduler: searched in the twin now and then, tried live with care.

Driven by the tuner actor. `turn` takes what the scheduler observed and returns orders for it, and never
blocks: a search runs in a thread that rests between its rounds, so that it takes no more than its share of a
core. All times are on the scheduler's clock, which comes with every observation; a new scheduler has another
clock, and is given the values that an earlier one had for good.

Only the scheduler's own settings are tuned here. Those of Refine-and-Prune (alpha, the number of queues)
change the queues themselves, and cannot be tried in slices of a minute: `python -m serve_app tune` covers
them offline.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from serve_app.metrics.record import RequestRecord
from serve_app.scheduling import SchedulerSettings
from serve_app.serving.learned_queues import Observed
from serve_app.serving.outcome_window import record_of
from serve_app.serving.state_store import StateError, StateStore
from serve_app.serving.tuner_desk import Retune
from serve_app.tuning.digital_twin import TwinPlan
from serve_app.tuning.objective import reward_of
from serve_app.tuning.parameter_search import ParameterTuningSettings, engines_of, search
from serve_app.tuning.rollout import Rollout
from serve_app.tuning.rollout_settings import Apply
from serve_app.tuning.search_space import Part, SearchSpace
from serve_app.tuning.study import Finding
from serve_app.tuning.traffic import TrafficLog
from serve_app.tuning.tunable import Tunable, parameters_of, space_of

logger = logging.getLogger("ray.serve")

_RECENT = 50_000
"""Outcomes that slices are judged by: two slices at 400 requests/s."""
_AUDITS_SHOWN = 12
_STUDIES_KEPT = 50


class ParameterTuner:
    """Tunes one model's scheduler.

    Args:
        store: where values in force and decisions survive a restart; None keeps nothing.
    """

    def __init__(
        self, model: str, settings: ParameterTuningSettings, store: StateStore | None = None
    ) -> None:
        self._model, self._settings, self._store = model, settings, store
        self._rollout: Rollout | None = None
        self._incarnation: int | None = None
        self._configured: SchedulerSettings | None = None
        self._now = 0.0
        self._traffic = TrafficLog()
        self._recent: deque[RequestRecord] = deque(maxlen=_RECENT)
        self._search: asyncio.Task[tuple[Finding, float]] | None = None
        self._stop = threading.Event()
        self._next_search_at = 0.0
        self._studies: deque[dict[str, Any]] = deque(maxlen=_STUDIES_KEPT)
        self._saved: Mapping[str, Any] | None = None
        self._store_is_away = False

    def __repr__(self) -> str:
        searching = " searching" if self._search else ""
        return f"<ParameterTuner {self._model} {self._rollout}{searching} {self._traffic}>"

    @property
    def is_searching(self) -> bool:
        """Whether a search is under way."""
        return self._search is not None

    def stop(self) -> None:
        """Search no more; a search that is under way ends after its round."""
        self._stop.set()

    async def load(self) -> None:
        """Read what an earlier tuner has stored; to be called once, before the first turn."""
        if self._store is None:
            return
        try:
            self._saved = await asyncio.to_thread(self._store.load)
        except StateError as error:
            logger.warning("event=tuner_state_unreachable model=%s reason=%r", self._model, error)

    async def save(self) -> None:
        """Store what a restart has to know, if it has changed."""
        if self._store is None or self._rollout is None:
            return
        document = {"rollout": self._rollout.state(self._now), "studies": list(self._studies)}
        try:
            await asyncio.to_thread(self._store.save, document)
            self._store_is_away = False
        except StateError as error:
            if not self._store_is_away:
                logger.warning("event=tuner_state_unreachable model=%s reason=%r", self._model, error)
            self._store_is_away = True

    def turn(self, observed: Observed) -> list[Retune]:
        """Orders for the scheduler, in this order, given what it has observed."""
        if observed.settings is None:
            return []
        applies: list[Apply] = []
        if self._rollout is None or observed.incarnation != self._incarnation:
            applies += self._begin(observed, observed.settings)
        assert self._rollout is not None
        now = self._now = observed.at
        for row in observed.outcomes:
            record = record_of(row)
            self._traffic.add(record)
            self._recent.append(record)
        if observed.frozen and not self._rollout.frozen:
            applies += self._rollout.freeze(now, observed.frozen)
        elif self._rollout.frozen and not observed.frozen:
            applies += self._rollout.thaw(now)
        applies += self._rollout.tick(now)
        for part in self._rollout.to_judge(now, observed.settled_until):
            arrived = [each for each in self._recent if part.start <= each.arrived_at < part.end]
            reward = reward_of(arrived, self._settings.objective)
            applies += self._rollout.judged(part, reward, now, observed.settled_until)
        applies += self._end_search(now)
        self._begin_search(observed)
        return [self._order(apply) for apply in applies]

    def document(self) -> dict[str, Any]:
        """What this tuner does, for people."""
        if self._rollout is None:
            return {"mode": self._settings.rollout.mode, "state": "waiting for the scheduler"}
        state = "searching" if self._search else "watching"
        if self._rollout.target is not None:
            state = "trying a step"
        return {
            "mode": self._rollout.mode,
            "state": state,
            "audit": [
                {
                    "age_s": max(0.0, self._now - each.at),
                    "what": each.act.value.replace("_", " "),
                    "why": each.reason,
                    "values": dict(each.values),
                    "figures": dict(each.figures),
                }
                for each in reversed(self._rollout.audit[-_AUDITS_SHOWN:])
            ],
            "studies": list(self._studies)[-_AUDITS_SHOWN:],
        }

    # Beginnings

    def _begin(self, observed: Observed, configured: SchedulerSettings) -> list[Apply]:
        """A scheduler that has not heard of this tuner: give it what the one before had for good."""
        state = None
        if self._rollout is not None:
            state = self._rollout.state(self._now)
        elif self._saved is not None:
            state = self._saved.get("rollout")
            self._studies.extend(self._saved.get("studies", ()))
        space = _space(configured)
        rollout = Rollout(space, space.current, self._settings.rollout)
        self._rollout, self._incarnation, self._configured = rollout, observed.incarnation, configured
        # Times of the scheduler before are on another clock.
        self._traffic, self._next_search_at = TrafficLog(), observed.at
        self._recent.clear()
        if not isinstance(state, Mapping):
            return []
        try:
            return rollout.restore(state, observed.at)
        except ValueError as error:
            logger.warning("event=tuner_state_refused model=%s reason=%r", self._model, str(error))
            return []

    def _begin_search(self, observed: Observed) -> None:
        assert self._rollout is not None
        if self._search is not None or observed.at < self._next_search_at or self._stop.is_set():
            return
        if not self._rollout.is_ready(observed.at) or not observed.replicas:
            return
        traffic = self._traffic.trace(observed.settled_until)
        if traffic is None or len(traffic.requests) < self._settings.min_requests:
            return
        assert self._configured is not None
        tunable = Tunable(scheduler=self._configured).with_values(
            self._rollout.incumbent, _space(self._configured)
        )
        plan = TwinPlan(
            tunable=tunable,
            space=_space(tunable.scheduler),
            engines=engines_of(observed.replicas, self._settings.profile),
            traffic=traffic,
            objective=self._settings.objective,
            settings=replace(self._settings.twin, seed=len(self._studies)),
        )
        work = asyncio.to_thread(search, plan, list(self._recent), self._settings, self._stop)
        self._search = asyncio.get_running_loop().create_task(work)

    def _end_search(self, now: float) -> list[Apply]:
        """Propose what a search has found, if one has ended."""
        if self._search is None or not self._search.done():
            return []
        ended, self._search = self._search, None
        self._next_search_at = now + self._settings.every_s
        if ended.cancelled():
            return []
        if ended.exception() is not None:
            logger.error("event=tuner_search_failed model=%s", self._model, exc_info=ended.exception())
            return []
        finding, factor = ended.result()
        found = finding.confirmation
        self._studies.append(
            {
                "trials": finding.trials,
                "speed_factor": factor,
                "confident": finding.confident,
                "reason": finding.reason,
                "best": dict(finding.best.values) if finding.best else None,
                "gain": found.mean if found else None,
            }
        )
        logger.info(
            "event=tuner_searched model=%s trials=%d speed_factor=%.2f confident=%s reason=%r",
            self._model,
            finding.trials,
            factor,
            finding.confident,
            finding.reason,
        )
        if not finding.confident or finding.best is None or found is None or self._rollout is None:
            return []
        reason = f"reward {found.mean:+.4f} in the twin, over {finding.trials} candidates"
        return self._rollout.propose(finding.best.values, now, reason)

    def _order(self, apply: Apply) -> Retune:
        assert self._rollout is not None
        assert self._configured is not None
        paths = {each.name: each.path for each in _space(self._configured)}
        values = {paths[name]: value for name, value in apply.values.items()}
        latest = self._rollout.audit[-1] if self._rollout.audit else None
        reason = f"{latest.act.value}: {latest.reason}" if latest else "tuned before"
        return Retune(values=values, valid_s=apply.valid_s, reason=reason)


def _space(settings: SchedulerSettings) -> SearchSpace:
    """What can be tried under a running scheduler."""
    names = [each.name for each in parameters_of(settings) if each.part is Part.SCHEDULER]
    return space_of(Tunable(scheduler=settings), only=names)
