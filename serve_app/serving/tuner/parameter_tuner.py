"""The tuner of the scheduler's settings: the loop of `tuning.parameter_loop` for a live scheduler.

The tuner actor drives it. `update` takes the scheduler's observations and returns orders, without blocking.
Work runs in one thread of low priority with pauses, so that it uses only its share of a core. Adopted values
and decisions are persisted in the state store.
"""

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serve_app.core import SchedulerSettings
from serve_app.serving.scheduler.tuning_endpoint import Observed
from serve_app.serving.state.calls import LOAD_TIMEOUT_S, SAVE_TIMEOUT_S, StoreCalls
from serve_app.serving.state.store import StateError, StateStore
from serve_app.tuning.engine_fit import EngineFitResult
from serve_app.tuning.outcome_window import record_of
from serve_app.tuning.parameter_loop import Observation, ParameterLoop, Result, Work, carry_out
from serve_app.tuning.refine_and_prune import RefineAndPruneSettings
from serve_app.tuning.rollout import Retune
from serve_app.tuning.settings import ParameterTuningSettings
from serve_app.tuning.study import Finding

logger = logging.getLogger("ray.serve")

# Priority of the working thread; all other threads of the machine have precedence.
_NICENESS = 10
_USUAL_QUEUES = RefineAndPruneSettings()

Worker = Callable[[Work], Awaitable[Result]]


class StoppedError(Exception):
    """The tuner was stopped during its work."""


class ParameterTuner:
    """Tuner of one model's scheduler.

    Args:
        queues: how the application learns its length queues, for the twin.
        store: persists adopted values and decisions; None disables persistence.
        worker: executes work; None executes it in a thread with a limited share of a core.

    Attributes:
        loop: None until the scheduler has answered.
        freeze_due: why the scheduler must be frozen, because its predecessor was; empty if not.
    """

    def __init__(
        self,
        model: str,
        settings: ParameterTuningSettings,
        store: StateStore | None = None,
        worker: Worker | None = None,
        queues: RefineAndPruneSettings = _USUAL_QUEUES,
    ) -> None:
        self._model, self._settings, self._queues = model, settings, queues
        self._state = None if store is None else (store, StoreCalls(store))
        self.loop: ParameterLoop | None = None
        self._incarnation: int | None = None
        self._worker = worker or self._in_thread
        self._work: asyncio.Future[Result] | None = None
        self._ended = 0
        # CPU seconds of the current work.
        self._cpu_s = 0.0
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tuner", initializer=_give_way)
        self.freeze_due = ""
        self._saved: Mapping[str, Any] | None = None
        self._store_is_unreachable = False

    def __repr__(self) -> str:
        return f"<ParameterTuner {self._model} {self.loop}>"

    @property
    def progress(self) -> tuple[int, int]:
        """Number of decisions and of finished work; a change of either requires a save."""
        return (0 if self.loop is None else self.loop.rollout.decisions.total(), self._ended)

    @property
    def is_trying(self) -> bool:
        """True during a trial."""
        return self.loop is not None and self.loop.rollout.target is not None

    def stop(self) -> None:
        """Start no further work; a running search ends after its window."""
        self._stop.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def load(self) -> None:
        """Read the state of an earlier tuner; call this once, before the first update."""
        if self._state is None:
            return
        store, calls = self._state
        try:
            self._saved = await calls.answer(store.load, LOAD_TIMEOUT_S)
        except StateError as error:
            logger.warning("event=tuner_state_unreachable model=%s reason=%r", self._model, error)

    async def save(self) -> None:
        """Write the state that a restart needs."""
        if self._state is None or self.loop is None:
            return
        store, calls = self._state
        state = self.loop.state()
        try:
            await calls.answer(lambda: store.save(state), SAVE_TIMEOUT_S)
            self._store_is_unreachable = False
        except StateError as error:
            if not self._store_is_unreachable:
                logger.warning("event=tuner_state_unreachable model=%s reason=%r", self._model, error)
            self._store_is_unreachable = True

    def update(self, observed: Observed) -> list[Retune]:
        """Process the scheduler's observations, and return orders to execute in sequence."""
        if observed.settings is None:
            return []
        orders: list[Retune] = []
        if self.loop is None or observed.incarnation != self._incarnation:
            self.loop, begun = self._begin(observed, observed.settings)
            orders += begun
            self.freeze_due = self.loop.rollout.frozen
        if observed.frozen:
            self.freeze_due = ""
        observation = Observation(
            at=observed.at,
            completed_until=observed.completed_until,
            records=[record_of(row) for row in observed.outcomes],
            replicas=observed.replicas,
            frozen=observed.frozen or self.freeze_due,
        )
        orders += self.loop.observe(observation)
        if self._work is not None and self._work.done():
            ended, self._work = self._work, None
            self._ended += 1
            cpu_s, self._cpu_s = self._cpu_s, 0.0
            orders += self.loop.finish(self._result(ended), observed.at, cpu_s)
        if self._work is None and not self._stop.is_set():
            work = self.loop.work_due(observation)
            if work is not None:
                self._work = asyncio.ensure_future(self._worker(work))
        return orders

    def document(self) -> dict[str, Any]:
        """Return the state of this tuner, for status pages."""
        if self.loop is None:
            return {"mode": self._settings.rollout.mode, "state": "waiting for the scheduler"}
        return self.loop.document()

    def _begin(self, observed: Observed, configured: SchedulerSettings) -> tuple[ParameterLoop, list[Retune]]:
        """Begin with a new scheduler, and return the loop and its first orders."""
        self._incarnation, state, loop = observed.incarnation, None, self.loop
        if loop is None:
            loop = ParameterLoop(configured, self._settings, observed.at, self._queues)
            if self._saved is None:
                return loop, []
            state = self._saved
        try:
            return loop, loop.begin(configured, observed.at, state)
        except ValueError as error:
            logger.warning("event=tuner_state_rejected model=%s reason=%r", self._model, str(error))
            return loop, []

    async def _in_thread(self, work: Work) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._throttled, work)

    def _throttled(self, work: Work) -> Result:
        """Execute work in this thread, within its share of a core."""
        began_s = worked_s = time.thread_time()

        def yield_cpu() -> None:
            nonlocal worked_s
            if self._stop.wait((time.thread_time() - worked_s) * (1 / self._settings.burst_share - 1)):
                raise StoppedError
            worked_s = time.thread_time()

        try:
            return carry_out(work, time.thread_time, yield_cpu)
        finally:
            self._cpu_s = time.thread_time() - began_s

    def _result(self, ended: "asyncio.Future[Result]") -> Result | None:
        """Log and return the result of finished work; None if it failed."""
        if ended.cancelled():
            return None
        if (error := ended.exception()) is not None:
            if not self._stop.is_set():
                logger.error("event=tuner_work_failed model=%s", self._model, exc_info=error)
            return None
        result = ended.result()
        if isinstance(result, Finding):
            logger.info(
                "event=tuner_search_finished model=%s candidates=%d confident=%s reason=%r",
                self._model,
                result.candidates,
                result.confident,
                result.reason,
            )
        elif isinstance(result, EngineFitResult):
            fault = result.error
            logger.info(
                "event=twin_validated model=%s fitted=%s requests=%d ttft_error=%s tpot_error=%s",
                self._model,
                result.engines is not None,
                0 if fault is None else fault.requests,
                "-" if fault is None else f"{fault.ttft_ratio:+.3f}",
                "-" if fault is None else f"{fault.tpot_ratio:+.3f}",
            )
        return result


def _give_way() -> None:
    """Lower the priority of this thread, on systems with thread priorities."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
