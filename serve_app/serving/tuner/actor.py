"""The tuner of one model: learns length queues away from the scheduler, and sends them there.

Every few seconds it pulls the lengths of the prompts that arrived, asks its strategic loop whether other
queues are due, and sends them. The scheduler never waits for it. When the tuner dies, the scheduler goes on
with the queues it has, and the next tuner learns from what arrives then. When the scheduler dies, the next
one has another incarnation, and is sent the queues in force.
"""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, Protocol, TypeVar

from serve_app.serving.scheduler.learned_queues import Observed, PartitionUpdate
from serve_app.serving.state.store import StateStore
from serve_app.serving.tuner.parameter_tuner import ParameterTuner, Searcher
from serve_app.settings_base import POSITIVE, settings
from serve_app.tuning.online.parameter_search import ParameterTuningSettings
from serve_app.tuning.online.retune import Retune
from serve_app.tuning.partition.strategic_loop import PartitionChange, StrategicLoop, StrategicSettings

logger = logging.getLogger("ray.serve")

Answer = TypeVar("Answer")

RESTORED = "restored"
"""The reason of an update that a new scheduler is sent."""

# A scheduler that is well answers in milliseconds; one that is being replaced, not at all.
_CALL_TIMEOUT_S = 10.0
# Slices of a trial begin and end by the clock, so it is looked at often where there may be one.
_TRIAL_INTERVAL_S = 1.0


@settings(block="tuner")
class TunerSettings:
    """How one model's scheduler is tuned while it runs.

    Attributes:
        mode: on, off, or auto: on when the scheduler's policy learns its queues. A policy that is changed in
            the running application does not bring a tuner with it.
    """

    mode: bool | Literal["auto"] = "auto"
    # Queues are learned from hundreds of requests: sooner would find nothing new, later would let drift wait.
    pull_interval_s: Annotated[float, POSITIVE.hint("5 is usual")] = 5.0
    strategic: StrategicSettings = field(default_factory=StrategicSettings)
    # Settings of the scheduler are tuned where this is given, and left alone where it is not.
    parameters: ParameterTuningSettings | None = None


class SchedulerCalls(Protocol):
    """The calls of a scheduler that a tuner makes; they raise when there is none."""

    async def observed(self, *, outcomes: bool) -> Observed:
        """What happened since the last pull."""
        ...

    async def put_in_force(self, update: PartitionUpdate) -> None:
        """Go on with these queues."""
        ...

    async def retune(self, order: Retune) -> None:
        """Go on with these values."""
        ...

    async def show_tuner(self, document: Mapping[str, Any]) -> None:
        """Keep what the tuner tells of itself."""
        ...


class TunerActor:
    """Runs the strategic loop of one model. Must be constructed on a running event loop.

    Args:
        store: as for `ParameterTuner`.
        searcher: as for `ParameterTuner`.
    """

    def __init__(
        self,
        model: str,
        settings: TunerSettings,
        scheduler: SchedulerCalls,
        store: StateStore | None = None,
        searcher: Searcher | None = None,
    ) -> None:
        self._model, self._settings, self._scheduler = model, settings, scheduler
        self._loop = asyncio.get_running_loop()
        self._strategic = StrategicLoop(settings.strategic)
        self._parameters = None
        if settings.parameters is not None:
            self._parameters = ParameterTuner(model, settings.parameters, store, searcher)
        self._delivered: tuple[int, PartitionChange] | None = None
        self._is_alone = False
        self._shown: tuple[int, Mapping[str, Any]] | None = None
        self._was_searching = False
        # In an empty context: Serve cancels what was started in the context of a request along with it.
        self._turns = self._loop.create_task(self._run(), context=contextvars.Context())

    def __repr__(self) -> str:
        return f"<TunerActor {self._model} {self._strategic}>"

    async def check_health(self) -> None:
        """Raise what ended the loop, if it has ended."""
        if self._turns.done():
            await self._turns

    def stop(self) -> None:
        """Learn no more."""
        self._turns.cancel()
        if self._parameters is not None:
            self._parameters.stop()

    async def _run(self) -> None:
        interval_s = self._settings.pull_interval_s
        if self._parameters is not None:
            await self._parameters.load()
            interval_s = min(interval_s, _TRIAL_INTERVAL_S)
        while True:
            await asyncio.sleep(interval_s)
            await self._turn()

    async def _turn(self) -> None:
        observed = await self._ask(self._scheduler.observed(outcomes=self._parameters is not None))
        if observed is None:
            return
        for length in observed.lengths:
            self._strategic.observe(length)
        # Aside, because a full run takes a moment, and importing what it needs takes seconds.
        await asyncio.to_thread(self._strategic.due, self._loop.time())
        change = self._strategic.change
        if change is not None and self._delivered != (observed.incarnation, change):
            await self._deliver(change, observed.incarnation)
        if self._parameters is not None:
            await self._tune(self._parameters, observed)

    async def _tune(self, parameters: ParameterTuner, observed: Observed) -> None:
        """Carry out what the parameter tuner wants, and let people see it."""
        orders = parameters.turn(observed)
        for order in orders:
            await self._ask(self._told(self._scheduler.retune(order)))
        # A new scheduler has been shown nothing.
        shown = (observed.incarnation, parameters.document())
        if shown != self._shown and await self._ask(self._told(self._scheduler.show_tuner(shown[1]))):
            self._shown = shown
        if orders or parameters.is_searching is not self._was_searching:
            await parameters.save()
        self._was_searching = parameters.is_searching

    async def _told(self, call: Awaitable[None]) -> bool:
        await call
        return True

    async def _deliver(self, change: PartitionChange, incarnation: int) -> None:
        known = self._delivered is not None and self._delivered[1] == change
        update = PartitionUpdate(
            partition=change.partition,
            reason=RESTORED if known else change.reason.value,
            lengths=change.lengths,
            distance=change.distance,
            age_s=self._loop.time() - change.at,
        )
        if await self._ask(self._confirmed(update)):
            self._delivered = (incarnation, change)

    async def _confirmed(self, update: PartitionUpdate) -> bool:
        await self._scheduler.put_in_force(update)
        return True

    async def _ask(self, call: Awaitable[Answer]) -> Answer | None:
        """The scheduler's answer; None while there is none to be had, which the log tells once."""
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                answer = await call
        except Exception as error:  # noqa: BLE001 - whatever it is, the next turn tries again
            if not self._is_alone:
                logger.warning("event=tuner_without_scheduler model=%s reason=%r", self._model, error)
            self._is_alone = True
            return None
        self._is_alone = False
        return answer
