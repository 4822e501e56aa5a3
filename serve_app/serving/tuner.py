"""The tuner process of a model: learns length queues, and searches for better settings of the scheduler.

- `TunerDeployment`: a Ray Serve deployment of one replica: Ray places it, and replaces it when it dies.
- `TunerActor`: learns length queues outside the scheduler, and sends them to it.
- `ParameterTuner`: the loop of `tuning.parameter_loop` for a live scheduler.

`ParameterTuner`. The tuner actor drives it. `update` takes the scheduler's observations and returns orders,
without blocking. Work runs in one thread of low priority with pauses, so that it uses only its share of a
core. Adopted values and decisions are persisted in the state store.

`TunerActor`. Every few seconds it pulls the prompt lengths of new requests, and its strategic loop decides
whether new queues are due. The scheduler never waits for the tuner. If the tuner dies, the scheduler retains
its queues, and the next tuner learns from later arrivals. A new scheduler has another incarnation, and
receives the current queues.

`TunerDeployment`. Without a persisted state, it starts when its scheduler has enough requests to learn from
(`serving.autoscaling`). An application without traffic then runs one process less.
"""

import asyncio
import contextvars
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from ray.serve.handle import DeploymentHandle

from serve_app.core import SchedulerSettings
from serve_app.serving.scheduler.tuning_endpoint import PartitionUpdate
from serve_app.serving.state import StateError, StateStore, StoreCalls
from serve_app.tuning.engine_fit import EngineFitResult
from serve_app.tuning.parameter_loop import ParameterLoop, Result, Work, carry_out
from serve_app.tuning.rollout import Observation, Retune
from serve_app.tuning.settings import ParameterTuningSettings, TunerSettings
from serve_app.tuning.strategic_loop import PartitionChange, RefineAndPruneSettings, StrategicLoop
from serve_app.tuning.study import Finding

logger = logging.getLogger("ray.serve")

# Priority of the working thread, and of the process in addition, of at most 19: all others of the machine
# have precedence, so that requests are served and health checks answered.
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
        self._state = None if store is None else StoreCalls(store)
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
        try:
            self._saved = await self._state.load()
        except StateError as error:
            logger.warning("event=tuner_state_unreachable model=%s reason=%r", self._model, error)

    async def save(self) -> None:
        """Write the state that a restart needs."""
        if self._state is None or self.loop is None:
            return
        try:
            await self._state.save(self.loop.state())
            self._store_is_unreachable = False
        except StateError as error:
            if not self._store_is_unreachable:
                logger.warning("event=tuner_state_unreachable model=%s reason=%r", self._model, error)
            self._store_is_unreachable = True

    def update(self, observed: Observation) -> list[Retune]:
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
        observation = replace(observed, frozen=observed.frozen or self.freeze_due)
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

    def _begin(
        self, observed: Observation, configured: SchedulerSettings
    ) -> tuple[ParameterLoop, list[Retune]]:
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
            if state is not None and self._state is not None:
                self._state.reject(str(error))
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


Answer = TypeVar("Answer")

LEARNED, RESTORED = "learned", "restored"
"""Reasons of an update: new queues, and the same for a new scheduler."""

# A healthy scheduler answers in milliseconds, and one that is being replaced does not answer.
_CALL_TIMEOUT_S = 10.0
# Queues are learned from hundreds of requests, so a shorter interval brings nothing new. A longer one delays
# the reaction to a change of traffic.
_PULL_INTERVAL_S = 5.0
# Slices of a trial begin and end by the clock.
_TRIAL_INTERVAL_S = 1.0


class TunerActor:
    """Strategic loop and parameter tuner of one model. Must be constructed on a running event loop."""

    def __init__(
        self,
        model: str,
        settings: TunerSettings,
        scheduler: DeploymentHandle[Any],
        store: StateStore | None = None,
    ) -> None:
        self._model, self._settings, self._scheduler = model, settings, scheduler
        self._loop = asyncio.get_running_loop()
        self._strategic = StrategicLoop(settings.strategic)
        self._parameters = None
        if settings.parameters is not None:
            queues = settings.strategic.refine_and_prune
            self._parameters = ParameterTuner(model, settings.parameters, store, queues=queues)
        self._delivered: tuple[int, PartitionChange] | None = None
        self._is_disconnected = False
        self._shown: tuple[int, Mapping[str, Any]] | None = None
        self._saved_progress = (0, 0)
        # In an empty context, because Serve cancels the tasks of a request's context with the request.
        self._task = self._loop.create_task(self._run(), context=contextvars.Context())

    def __repr__(self) -> str:
        return f"<TunerActor {self._model} {self._strategic}>"

    async def check_health(self) -> None:
        """Raise the error that ended the loop, if it has ended."""
        if self._task.done():
            await self._task

    def stop(self) -> None:
        """Stop the loop and the parameter tuner's work."""
        self._task.cancel()
        if self._parameters is not None:
            self._parameters.stop()

    async def _run(self) -> None:
        if self._parameters is not None:
            await self._parameters.load()
        while True:
            await asyncio.sleep(self._interval_s())
            await self._update()

    def _interval_s(self) -> float:
        is_trying = self._parameters is not None and self._parameters.is_trying
        return _TRIAL_INTERVAL_S if is_trying else _PULL_INTERVAL_S

    async def _update(self) -> None:
        observed = await self._ask(self._observed())
        if observed is None:
            return
        for length in observed.lengths:
            self._strategic.observe(length)
        # In a thread, because learning takes a moment, and the first import takes seconds.
        await asyncio.to_thread(self._strategic.due, self._loop.time())
        change = self._strategic.change
        if change is not None and self._delivered != (observed.incarnation, change):
            await self._deliver(change, observed.incarnation)
        if self._parameters is not None:
            await self._tune(self._parameters, observed)

    async def _observed(self) -> Observation:
        """Return the scheduler's observations since the last pull."""
        outcomes = self._parameters is not None
        observed: Observation = await self._scheduler.observed.remote(outcomes=outcomes)
        return observed

    async def _tune(self, parameters: ParameterTuner, observed: Observation) -> None:
        """Execute the parameter tuner's orders, and publish its state."""
        orders = parameters.update(observed)
        if parameters.freeze_due:
            await self._ask(_confirmed(self._scheduler.freeze_tuning, parameters.freeze_due))
        for order in orders:
            await self._ask(_confirmed(self._scheduler.retune, order))
        # A new scheduler has no document yet.
        shown = (observed.incarnation, parameters.document())
        if shown != self._shown and await self._ask(_confirmed(self._scheduler.show_tuner, shown[1])):
            self._shown = shown
        if orders or parameters.progress != self._saved_progress:
            self._saved_progress = parameters.progress
            await parameters.save()

    async def _deliver(self, change: PartitionChange, incarnation: int) -> None:
        known = self._delivered is not None and self._delivered[1] == change
        update = PartitionUpdate(
            partition=change.partition,
            reason=RESTORED if known else LEARNED,
            lengths=change.lengths,
            distance=change.distance,
            age_s=self._loop.time() - change.at,
        )
        if await self._ask(_confirmed(self._scheduler.apply_partition, update)):
            self._delivered = (incarnation, change)

    async def _ask(self, call: Awaitable[Answer]) -> Answer | None:
        """Return the scheduler's answer; None if it does not answer, which is logged once."""
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                answer = await call
        except Exception as error:  # noqa: BLE001 - the next update retries
            if not self._is_disconnected:
                logger.warning("event=tuner_scheduler_unreachable model=%s reason=%r", self._model, error)
            self._is_disconnected = True
            return None
        self._is_disconnected = False
        return answer


async def _confirmed(method: DeploymentHandle[Any], argument: object) -> bool:
    """Call a method of the scheduler, and return True once the call has returned."""
    await method.remote(argument)
    return True


# Options for `serve.deployment`, besides its scale. The tuner has no open requests at its end.
TUNER_DEPLOYMENT_OPTIONS: Mapping[str, Any] = {
    "graceful_shutdown_timeout_s": 5.0,
    "graceful_shutdown_wait_loop_s": 0.1,
}


class TunerDeployment:
    """Serve deployment that runs one `TunerActor`."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it, which mypy cannot know
        self,
        model: str,
        settings: TunerSettings,
        scheduler: DeploymentHandle[Any],
        state_uri: str | None = None,
    ) -> None:
        # Requests have priority; a search may use the remaining CPU time.
        os.nice(_NICENESS)
        store = None if state_uri is None else StateStore(state_uri, "tuner", model)
        self._tuner = TunerActor(model, settings, scheduler, store)

    async def check_health(self) -> None:
        """Raise if the tuner must be replaced."""
        await self._tuner.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_tuner"):
            self._tuner.stop()
