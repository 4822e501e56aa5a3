"""The tuner of the scheduler's settings: the loop of `tuning.online.parameter_loop` beside a live scheduler.

The tuner actor drives it. `update` takes the scheduler's observations and returns orders for it, and never
blocks. Its work runs in one thread of low priority that pauses now and then, so that it takes only its share
of a core.
Values in force and decisions are kept in the state store.
"""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from serve_app.scheduling import SchedulerSettings
from serve_app.serving.scheduler.learned_queues import Observed
from serve_app.serving.state.calls import LOAD_TIMEOUT_S, SAVE_TIMEOUT_S, StoreCalls
from serve_app.serving.state.store import StateError, StateStore
from serve_app.tuning.online.outcome_window import record_of
from serve_app.tuning.online.parameter_loop import Observation, ParameterLoop
from serve_app.tuning.online.parameter_search import (
    ParameterTuningSettings,
    SearchResult,
    SearchTask,
    throttled_fit,
    throttled_forecast,
    throttled_replay,
    throttled_search,
)
from serve_app.tuning.online.replay import ReplayResult, ReplayTask
from serve_app.tuning.online.rollout_settings import Retune
from serve_app.tuning.partition.settings import RefineAndPruneSettings
from serve_app.tuning.twin.engine_fit import EngineFitResult, EngineFitTask
from serve_app.tuning.twin.forecast import ForecastResult

logger = logging.getLogger("ray.serve")

# Of the thread that searches: everything else of the machine goes first.
_NICENESS = 10

Result = TypeVar("Result")
Task = TypeVar("Task")
Searcher = Callable[[SearchTask], Coroutine[Any, Any, SearchResult]]
Replayer = Callable[[ReplayTask], Coroutine[Any, Any, ReplayResult]]
Fitter = Callable[[EngineFitTask], Coroutine[Any, Any, EngineFitResult]]


class ParameterTuner:
    """Tunes one model's scheduler.

    Args:
        store: keeps values in force and decisions across restarts; None keeps nothing.
        searcher: runs a search; None runs it in a thread, at its share of a core.
        replayer, fitter: the same for a replay, and for a fit of the twin's engines.

    Attributes:
        queues: how the application learns its length queues, for the twin; to be set at once.
        freeze_due: why the scheduler is to be frozen, because the one before was; empty when it is not.
    """

    def __init__(
        self,
        model: str,
        settings: ParameterTuningSettings,
        store: StateStore | None = None,
        searcher: Searcher | None = None,
        replayer: Replayer | None = None,
        fitter: Fitter | None = None,
    ) -> None:
        self._model, self._settings = model, settings
        self._kept = None if store is None else (store, StoreCalls(store))
        self.queues = RefineAndPruneSettings()
        self._loop: ParameterLoop | None = None
        self._incarnation: int | None = None
        self._searcher = searcher or self._throttled_search
        self._search: asyncio.Task[SearchResult] | None = None
        self._replayer = replayer or self._throttled_replay
        self._replay: asyncio.Task[ReplayResult] | None = None
        self._fitter = fitter or self._throttled_fit
        self._fit: asyncio.Task[EngineFitResult] | None = None
        self._forecast: asyncio.Task[ForecastResult] | None = None
        self._stop = threading.Event()
        # One thread, so that all work together takes no more than its share.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tuner", initializer=_give_way)
        self.freeze_due = ""
        self._saw_requests = False
        self._saved: Mapping[str, Any] | None = None
        self._store_is_unreachable = False

    def __repr__(self) -> str:
        return f"<ParameterTuner {self._model} {self._loop}>"

    @property
    def is_searching(self) -> bool:
        """Whether a search is under way."""
        return self._search is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing happens: no requests, no trial, no work."""
        works = self._search is not None or self._replay is not None or self._fit is not None
        trying = self._loop is not None and self._loop.rollout.target is not None
        return not (works or trying or self._saw_requests)

    def stop(self) -> None:
        """Begin no further search; one under way ends after its window."""
        self._stop.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def load(self) -> None:
        """Read the state of an earlier tuner; call it once, before the first update."""
        if self._kept is None:
            return
        store, calls = self._kept
        try:
            self._saved = await calls.answer(store.load, LOAD_TIMEOUT_S)
        except StateError as error:
            logger.warning("event=tuner_state_unreachable model=%s reason=%r", self._model, error)

    async def save(self) -> None:
        """Store the state that a restart needs."""
        if self._kept is None or self._loop is None:
            return
        store, calls = self._kept
        state = self._loop.state()
        try:
            await calls.answer(lambda: store.save(state), SAVE_TIMEOUT_S)
            self._store_is_unreachable = False
        except StateError as error:
            if not self._store_is_unreachable:
                logger.warning("event=tuner_state_unreachable model=%s reason=%r", self._model, error)
            self._store_is_unreachable = True

    def update(self, observed: Observed) -> list[Retune]:
        """Take the scheduler's observations; returns orders for it, to be carried out in sequence."""
        if observed.settings is None:
            return []
        self._saw_requests = bool(observed.outcomes) or observed.settled_until < observed.at
        orders: list[Retune] = []
        if self._loop is None or observed.incarnation != self._incarnation:
            orders += self._begin(observed, observed.settings)
            self.freeze_due = self._loop.rollout.frozen if self._loop is not None else ""
        assert self._loop is not None
        if observed.frozen:
            self.freeze_due = ""
        observation = Observation(
            at=observed.at,
            settled_until=observed.settled_until,
            records=[record_of(row) for row in observed.outcomes],
            replicas=observed.replicas,
            frozen=observed.frozen or self.freeze_due,
            active_share=observed.settings.active_share,
        )
        orders += self._loop.observe(observation)
        self._end_fit(self._loop, observed.at)
        self._end_forecast(self._loop, observed.at)
        orders += self._end_search(self._loop, observed.at)
        orders += self._end_replay(self._loop, observed.at)
        if not self._stop.is_set():
            self._begin_work(self._loop, observation)
        return orders

    def document(self) -> dict[str, Any]:
        """The state of this tuner, for status pages."""
        if self._loop is None:
            return {"mode": self._settings.rollout.mode, "state": "waiting for the scheduler"}
        return self._loop.document()

    def _begin(self, observed: Observed, configured: SchedulerSettings) -> list[Retune]:
        """Begin with a new scheduler."""
        self._incarnation, state = observed.incarnation, None
        if self._loop is None:
            self._loop = ParameterLoop(configured, self._settings, observed.at, self.queues)
            if self._saved is None:
                return []
            state = self._saved
        try:
            return self._loop.begin(configured, observed.at, state)
        except ValueError as error:
            logger.warning("event=tuner_state_refused model=%s reason=%r", self._model, str(error))
            return []

    def _begin_work(self, loop: ParameterLoop, observation: Observation) -> None:
        """Start the work that is due."""
        fit_task = loop.fit_due(observation)
        if fit_task is not None:
            self._fit = asyncio.get_running_loop().create_task(self._fitter(fit_task))
        forecast_task = loop.forecast_due(observation)
        if forecast_task is not None:
            work = self._in_thread(throttled_forecast, forecast_task)
            self._forecast = asyncio.get_running_loop().create_task(work)
        search_task = loop.search_due(observation)
        if search_task is not None:
            self._search = asyncio.get_running_loop().create_task(self._searcher(search_task))
        replay_task = loop.replay_due()
        if replay_task is not None:
            self._replay = asyncio.get_running_loop().create_task(self._replayer(replay_task))

    async def _throttled_search(self, task: SearchTask) -> SearchResult:
        return await self._in_thread(throttled_search, task)

    async def _throttled_replay(self, task: ReplayTask) -> ReplayResult:
        return await self._in_thread(throttled_replay, task)

    async def _throttled_fit(self, task: EngineFitTask) -> EngineFitResult:
        return await self._in_thread(throttled_fit, task)

    async def _in_thread(
        self, work: Callable[[Task, ParameterTuningSettings, threading.Event], Result], task: Task
    ) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, task, self._settings, self._stop)

    def _end_fit(self, loop: ParameterLoop, now: float) -> None:
        """Pass the result of a finished check or fit to the loop."""
        if self._fit is None or not self._fit.done():
            return
        ended, self._fit = self._fit, None
        result = self._result(ended, "fit")
        if result is None:
            loop.calibration.on_failure(now)
            return
        loop.calibration.on_result(result, now)
        error = result.error
        logger.info(
            "event=twin_checked model=%s fitted=%s requests=%d ttft_error=%s tpot_error=%s",
            self._model,
            result.engines is not None,
            0 if error is None else error.requests,
            "-" if error is None else f"{error.ttft_ratio:+.3f}",
            "-" if error is None else f"{error.tpot_ratio:+.3f}",
        )

    def _end_forecast(self, loop: ParameterLoop, now: float) -> None:
        """Pass the result of a finished forecast to the loop."""
        if self._forecast is not None and self._forecast.done():
            ended, self._forecast = self._forecast, None
            loop.forecasts.on_result(self._result(ended, "forecast"), now)

    def _end_search(self, loop: ParameterLoop, now: float) -> list[Retune]:
        """Pass the result of a finished search to the loop."""
        if self._search is None or not self._search.done():
            return []
        ended, self._search = self._search, None
        result = self._result(ended, "search")
        if result is None:
            loop.on_search_failure(now)
            return []
        logger.info(
            "event=tuner_searched model=%s trials=%d confident=%s reason=%r",
            self._model,
            result.finding.trials,
            result.finding.confident,
            result.finding.reason,
        )
        return loop.on_search_result(result, now)

    def _end_replay(self, loop: ParameterLoop, now: float) -> list[Retune]:
        """Pass the result of a finished replay to the loop."""
        if self._replay is None or not self._replay.done():
            return []
        ended, self._replay = self._replay, None
        result = self._result(ended, "replay")
        return loop.on_replay_failure(now) if result is None else loop.on_replay_result(result, now)

    def _result(self, ended: "asyncio.Task[Result]", work: str) -> Result | None:
        """The result of finished work; None when it failed, which is logged unless the tuner has stopped."""
        if ended.cancelled():
            return None
        if (error := ended.exception()) is not None:
            if not self._stop.is_set():
                logger.error("event=tuner_%s_failed model=%s", work, self._model, exc_info=error)
            return None
        return ended.result()


def _give_way() -> None:
    """Lower the priority of this thread, where the system has priorities of threads."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
