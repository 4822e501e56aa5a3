"""The tuner of one model: learns length queues outside the scheduler, and sends them to it.

Every few seconds it pulls the prompt lengths of new requests, and its strategic loop decides whether new
queues are due. The scheduler never waits for the tuner. If the tuner dies, the scheduler retains its queues,
and the next tuner learns from later arrivals. A new scheduler has another incarnation, and receives the
current queues.
"""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, TypeVar

from serve_app.serving.scheduler.tuning_endpoint import Observed, PartitionUpdate
from serve_app.serving.state.store import StateStore
from serve_app.serving.tuner.parameter_tuner import ParameterTuner, Worker
from serve_app.tuning.rollout import Retune
from serve_app.tuning.settings import TunerSettings
from serve_app.tuning.strategic_loop import PartitionChange, StrategicLoop

logger = logging.getLogger("ray.serve")

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


class SchedulerCalls(Protocol):
    """Calls of the scheduler that a tuner uses; they raise without a scheduler."""

    async def observed(self, *, outcomes: bool) -> Observed:
        """Return the observations since the last pull."""
        ...

    async def apply_partition(self, update: PartitionUpdate) -> None:
        """Apply a learned partition."""
        ...

    async def retune(self, order: Retune) -> None:
        """Apply tuned values."""
        ...

    async def freeze_tuning(self, reason: str) -> None:
        """Reject trials until the tuner is thawed."""
        ...

    async def show_tuner(self, document: Mapping[str, Any]) -> None:
        """Store the tuner's state document, for status pages."""
        ...


class TunerActor:
    """Strategic loop and parameter tuner of one model. Must be constructed on a running event loop."""

    def __init__(
        self,
        model: str,
        settings: TunerSettings,
        scheduler: SchedulerCalls,
        store: StateStore | None = None,
        worker: Worker | None = None,
    ) -> None:
        self._model, self._settings, self._scheduler = model, settings, scheduler
        self._loop = asyncio.get_running_loop()
        self._strategic = StrategicLoop(settings.strategic)
        self._parameters = None
        if settings.parameters is not None:
            queues = settings.strategic.refine_and_prune
            self._parameters = ParameterTuner(model, settings.parameters, store, worker, queues)
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
        observed = await self._ask(self._scheduler.observed(outcomes=self._parameters is not None))
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

    async def _tune(self, parameters: ParameterTuner, observed: Observed) -> None:
        """Execute the parameter tuner's orders, and publish its state."""
        orders = parameters.update(observed)
        if parameters.freeze_due:
            await self._ask(_confirmed(self._scheduler.freeze_tuning(parameters.freeze_due)))
        for order in orders:
            await self._ask(_confirmed(self._scheduler.retune(order)))
        # A new scheduler has no document yet.
        shown = (observed.incarnation, parameters.document())
        if shown != self._shown and await self._ask(_confirmed(self._scheduler.show_tuner(shown[1]))):
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
        if await self._ask(_confirmed(self._scheduler.apply_partition(update))):
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


async def _confirmed(call: Awaitable[None]) -> bool:
    """Return True once the call has returned."""
    await call
    return True
