"""The loop of `tuning.parameter_loop` beside a live scheduler: its searches in a thread, its state in a file.

Driven by the tuner actor. `turn` takes what the scheduler observed and returns orders for it, and never
blocks: a search runs in a thread that rests between its windows, so that it takes no more than its share of a
core.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from serve_app.scheduling import SchedulerSettings
from serve_app.serving.scheduler.learned_queues import Observed
from serve_app.serving.state.store import StateError, StateStore
from serve_app.tuning.online.outcome_window import record_of
from serve_app.tuning.online.parameter_loop import ParameterLoop, Seen
from serve_app.tuning.online.parameter_search import (
    ParameterTuningSettings,
    Searched,
    SearchTask,
    replay_aside,
    search_aside,
)
from serve_app.tuning.online.replay import Replayed, ReplayTask
from serve_app.tuning.online.retune import Retune

logger = logging.getLogger("ray.serve")

Searcher = Callable[[SearchTask], Coroutine[Any, Any, Searched]]
Replayer = Callable[[ReplayTask], Coroutine[Any, Any, Replayed]]


class ParameterTuner:
    """Tunes one model's scheduler.

    Args:
        store: where values in force and decisions survive a restart; None keeps nothing.
        searcher: carries out a search; None: in a thread, at its share of a core.
        replayer: the same for a replay.
    """

    def __init__(
        self,
        model: str,
        settings: ParameterTuningSettings,
        store: StateStore | None = None,
        searcher: Searcher | None = None,
        replayer: Replayer | None = None,
    ) -> None:
        self._model, self._settings, self._store = model, settings, store
        self._loop: ParameterLoop | None = None
        self._incarnation: int | None = None
        self._searcher = searcher or self._search_aside
        self._search: asyncio.Task[Searched] | None = None
        self._replayer = replayer or self._replay_aside
        self._replay: asyncio.Task[Replayed] | None = None
        self._stop = threading.Event()
        self._saved: Mapping[str, Any] | None = None
        self._store_is_away = False

    def __repr__(self) -> str:
        return f"<ParameterTuner {self._model} {self._loop}>"

    @property
    def is_searching(self) -> bool:
        """Whether a search is under way."""
        return self._search is not None

    @property
    def is_replaying(self) -> bool:
        """Whether slices are being replayed."""
        return self._replay is not None

    def stop(self) -> None:
        """Search no more; a search that is under way ends after its window."""
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
        """Store what a restart has to know."""
        if self._store is None or self._loop is None:
            return
        try:
            await asyncio.to_thread(self._store.save, self._loop.state())
            self._store_is_away = False
        except StateError as error:
            if not self._store_is_away:
                logger.warning("event=tuner_state_unreachable model=%s reason=%r", self._model, error)
            self._store_is_away = True

    def turn(self, observed: Observed) -> list[Retune]:
        """Orders for the scheduler, in this order, given what it has observed."""
        if observed.settings is None:
            return []
        orders: list[Retune] = []
        if self._loop is None or observed.incarnation != self._incarnation:
            orders += self._begin(observed, observed.settings)
        assert self._loop is not None
        seen = Seen(
            at=observed.at,
            settled_until=observed.settled_until,
            records=[record_of(row) for row in observed.outcomes],
            replicas=observed.replicas,
            frozen=observed.frozen,
        )
        orders += self._loop.see(seen)
        orders += self._end_search(self._loop, observed.at)
        orders += self._end_replay(self._loop, observed.at)
        if not self._stop.is_set():
            self._begin_work(self._loop, seen)
        return orders

    def document(self) -> dict[str, Any]:
        """What this tuner does, for people."""
        if self._loop is None:
            return {"mode": self._settings.rollout.mode, "state": "waiting for the scheduler"}
        return self._loop.document()

    def _begin(self, observed: Observed, configured: SchedulerSettings) -> list[Retune]:
        """A scheduler that has not heard of this tuner."""
        self._incarnation, state = observed.incarnation, None
        if self._loop is None:
            self._loop = ParameterLoop(configured, self._settings, observed.at)
            if self._saved is None:
                return []
            state = self._saved
        try:
            return self._loop.begin(configured, observed.at, state)
        except ValueError as error:
            logger.warning("event=tuner_state_refused model=%s reason=%r", self._model, str(error))
            return []

    def _begin_work(self, loop: ParameterLoop, seen: Seen) -> None:
        """Have carried out what is due."""
        search_task = loop.search_due(seen)
        if search_task is not None:
            self._search = asyncio.get_running_loop().create_task(self._searcher(search_task))
        replay_task = loop.replay_due()
        if replay_task is not None:
            self._replay = asyncio.get_running_loop().create_task(self._replayer(replay_task))

    async def _search_aside(self, task: SearchTask) -> Searched:
        return await asyncio.to_thread(search_aside, task, self._settings, self._stop)

    async def _replay_aside(self, task: ReplayTask) -> Replayed:
        return await asyncio.to_thread(replay_aside, task, self._settings, self._stop)

    def _end_replay(self, loop: ParameterLoop, now: float) -> list[Retune]:
        """Tell the loop of a replay that has ended."""
        if self._replay is None or not self._replay.done():
            return []
        ended, self._replay = self._replay, None
        if ended.cancelled() or ended.exception() is not None:
            if not ended.cancelled() and not self._stop.is_set():
                logger.error("event=tuner_replay_failed model=%s", self._model, exc_info=ended.exception())
            return loop.replay_failed(now)
        return loop.replayed(ended.result(), now)

    def _end_search(self, loop: ParameterLoop, now: float) -> list[Retune]:
        """Tell the loop of a search that has ended."""
        if self._search is None or not self._search.done():
            return []
        ended, self._search = self._search, None
        if ended.cancelled() or ended.exception() is not None:
            if not ended.cancelled() and not self._stop.is_set():
                logger.error("event=tuner_search_failed model=%s", self._model, exc_info=ended.exception())
            loop.search_failed(now)
            return []
        result = ended.result()
        logger.info(
            "event=tuner_searched model=%s trials=%d speed_factor=%.2f confident=%s reason=%r",
            self._model,
            result.finding.trials,
            result.speed_factor,
            result.finding.confident,
            result.finding.reason,
        )
        return loop.searched(result, now)
