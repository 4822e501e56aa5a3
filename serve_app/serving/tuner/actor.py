"""The tuner of one model: it learns length queues outside the scheduler, and sends them to it.

Every few seconds it pulls the lengths of the prompts that arrived, and asks its strategic loop whether new
queues are due. The scheduler never waits for the tuner. When the tuner dies, the scheduler keeps its queues,
and the next tuner learns from later arrivals. When the scheduler dies, the next one has another incarnation,
and gets the queues in force.
"""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, TypeVar

from serve_app.serving.scheduler.tuning_endpoint import Observed, PartitionUpdate
from serve_app.serving.state import StateStore
from serve_app.serving.tuner.parameter_tuner import ParameterTuner, Worker
from serve_app.tuning.rollout import Retune
from serve_app.tuning.settings import TunerSettings
from serve_app.tuning.strategic_loop import PartitionChange, StrategicLoop

logger = logging.getLogger("ray.serve")

Answer = TypeVar("Answer")

RESTORED = "restored"
"""The reason of an update that a new scheduler gets."""

# A healthy scheduler answers in milliseconds; one that is being replaced does not answer.
_CALL_TIMEOUT_S = 10.0
# Queues are learned from hundreds of requests: a shorter interval finds nothing new, a longer one delays the
# reaction to drift.
_PULL_INTERVAL_S = 5.0
# The slices of a trial begin and end by the clock, so a tuner with trials looks often.
_TRIAL_INTERVAL_S = 1.0


class SchedulerCalls(Protocol):
    """The scheduler's calls that a tuner uses; they raise when there is no scheduler."""

    async def observed(self, *, outcomes: bool) -> Observed:
        """The observations since the last pull."""
        ...

    async def put_in_force(self, update: PartitionUpdate) -> None:
        """Use these length queues."""
        ...

    async def retune(self, order: Retune) -> None:
        """Use these values of settings."""
        ...

    async def freeze_tuning(self, reason: str) -> None:
        """Try nothing until it is thawed."""
        ...

    async def show_tuner(self, document: Mapping[str, Any]) -> None:
        """Store the tuner's description of its state, for status pages."""
        ...


class TunerActor:
    """Runs the strategic loop of one model. Must be constructed on a running event loop.

    Args:
        store: as for `ParameterTuner`.
        worker: as for `ParameterTuner`.
    """

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
        # In an empty context: Serve cancels a task that was started in the context of a request with it.
        self._task = self._loop.create_task(self._run(), context=contextvars.Context())

    def __repr__(self) -> str:
        return f"<TunerActor {self._model} {self._strategic}>"

    async def check_health(self) -> None:
        """Raise the error that ended the loop, if it has ended."""
        if self._task.done():
            await self._task

    def stop(self) -> None:
        """End the loop."""
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
        is_idle = self._parameters is None or self._parameters.is_idle
        return _PULL_INTERVAL_S if is_idle else _TRIAL_INTERVAL_S

    async def _update(self) -> None:
        observed = await self._ask(self._scheduler.observed(outcomes=self._parameters is not None))
        if observed is None:
            return
        for length in observed.lengths:
            self._strategic.observe(length)
        # In a thread: a run takes a moment, and its first import takes seconds.
        await asyncio.to_thread(self._strategic.due, self._loop.time())
        change = self._strategic.change
        if change is not None and self._delivered != (observed.incarnation, change):
            await self._deliver(change, observed.incarnation)
        if self._parameters is not None:
            await self._tune(self._parameters, observed)

    async def _tune(self, parameters: ParameterTuner, observed: Observed) -> None:
        """Carry out the parameter tuner's orders, and publish its state."""
        orders = parameters.update(observed)
        if parameters.freeze_due:
            await self._ask(_confirmed(self._scheduler.freeze_tuning(parameters.freeze_due)))
        for order in orders:
            await self._ask(_confirmed(self._scheduler.retune(order)))
        # A new scheduler has no description yet.
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
            reason=RESTORED if known else change.reason.value,
            lengths=change.lengths,
            distance=change.distance,
            age_s=self._loop.time() - change.at,
        )
        if await self._ask(_confirmed(self._scheduler.put_in_force(update))):
            self._delivered = (incarnation, change)

    async def _ask(self, call: Awaitable[Answer]) -> Answer | None:
        """The scheduler's answer; None while it does not answer, which is logged once."""
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                answer = await call
        except Exception as error:  # noqa: BLE001 - whatever it is, the next update tries again
            if not self._is_disconnected:
                logger.warning("event=tuner_without_scheduler model=%s reason=%r", self._model, error)
            self._is_disconnected = True
            return None
        self._is_disconnected = False
        return answer


async def _confirmed(call: Awaitable[None]) -> bool:
    """True once the call has returned."""
    await call
    return True
