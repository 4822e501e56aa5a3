"""Questions of admins about one model's scheduler, as gateways send them over the control channel.

Each public method is a question. Its answer is sent as JSON, in parts where it is long.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve_app.engines.model.step_time import StepTimeModel
from serve_app.errors import ChannelError
from serve_app.serving.process import in_parts
from serve_app.serving.scheduler.costs import KeptCosts
from serve_app.serving.scheduler.documents import SUB_QUEUES_SHOWN, most_costly, overview
from serve_app.serving.scheduler.live_scaling import LiveScaling
from serve_app.serving.scheduler.live_scheduler import LiveScheduler
from serve_app.serving.scheduler.recordings import captured, known_step_times
from serve_app.serving.scheduler.usage import KeptUsage
from serve_app.tuning.counterfactuals.recording import encode_recording

_encoder = msgspec.json.Encoder()


QUESTIONS = frozenset(
    (
        "status",
        "queue",
        "overview",
        "costs",
        "scaling",
        "usage",
        "receipt",
        "recording",
        "capture",
        "mode",
        "change_mode",
        "freeze",
    )
)
"""The methods of `AdminQuestions` that a gateway may call by name."""


@dataclass(slots=True, eq=False, kw_only=True)
class AdminQuestions:
    """Answers questions about a live scheduler.

    Attributes:
        earlier_costs: of the schedulers before it.
        live_scaling, kept_usage: those of its process; None where it has none.
        step_times: of engines whose profile is known, by pool.
        save: keeps what the scheduler has learned.
    """

    live: LiveScheduler
    earlier_costs: KeptCosts = field(default_factory=KeptCosts)
    live_scaling: LiveScaling | None = None
    kept_usage: KeptUsage | None = None
    step_times: Mapping[str, StepTimeModel] = field(default_factory=dict)
    save: Callable[[], Awaitable[None]] | None = None

    @property
    def _model(self) -> str:
        return self.live.core.settings.model

    async def answer(self, question: str, arguments: bytes) -> bytes:
        """Return the answer, in JSON.

        Raises:
            ChannelError: there is no such question, or the scheduler schedules no more.
            SettingsError: an argument is not possible.
        """
        if question not in QUESTIONS:
            raise ChannelError(f"this scheduler knows no question {question!r}")
        found = await getattr(self, question)(**msgspec.json.decode(arguments, type=dict[str, Any]))
        # Some have megabytes; grants go out meanwhile.
        return await asyncio.to_thread(_encoder.encode, found)

    async def status(self) -> dict[str, Any]:
        """Return the numbers of waiting requests, the replicas and their reports."""
        return self.live.status()

    async def queue(self) -> dict[str, Any]:
        """Return which requests wait where, for how long, and why."""
        return self.live.queue()

    async def overview(self) -> dict[str, Any]:
        """Return all that the page for admins shows of this model."""
        live = self.live
        found = overview(live.status(), live.queue(SUB_QUEUES_SHOWN), live.activity.document())
        return {**found, "scaling": await self.scaling(), "costs": most_costly(await self.costs())}

    async def costs(self) -> dict[str, Any]:
        """Return what the requests of each tenant cost: engine time, and delay of others."""
        costs = self.earlier_costs.with_those_of(self.live.core)
        gpus = self.live_scaling.gpus() if self.live_scaling is not None else {}
        return {"model": self._model, **costs.document(gpus)}

    async def scaling(self) -> dict[str, Any]:
        """Return how many replicas each pool should have, and why."""
        return self.live_scaling.described() if self.live_scaling is not None else {}

    async def usage(self) -> dict[str, Any]:
        """Return what was used with each API key, day by day."""
        return self.kept_usage.shown() if self.kept_usage is not None else {"model": self._model, "rows": []}

    async def receipt(self, request_id: str) -> dict[str, Any]:
        """Return where the time of a request went, or goes; empty for an unknown one."""
        return await self.live.receipt(request_id)

    async def recording(self, request_id: str) -> str:
        """Return the minutes around a request that has ended lately; empty for an unknown one."""
        live = self.live
        step_times = known_step_times(live.tuner.shown, self.step_times)
        # Of thousands of requests: others get their grants meanwhile.
        found = await in_parts(live.recorder.recording(request_id, step_times, live.now()))
        return "" if found is None else await asyncio.to_thread(encode_recording, found)

    async def capture(self) -> list[dict[str, Any]]:
        """Return the requests that completed lately, as lines of a trace without any text."""
        return captured(self.live.history.ended())

    async def mode(self) -> dict[str, Any]:
        """Return which share of the traffic is scheduled, what both parts have waited, and the forecast."""
        forecast = self.live.tuner.status().get("forecast")
        return {"model": self._model, **self.live.mode.described(), "forecast": forecast}

    async def change_mode(self, active_share: float) -> None:
        """Schedule another share of the requests from now on; kept with what is learned."""
        self.live.mode.change(active_share)
        if self.save is not None:
            await self.save()

    async def freeze(self, reason: str) -> None:
        """Stop the tuner for a reason; let it go on where there is none."""
        if reason:
            self.live.tuner.freeze(reason)
        else:
            self.live.tuner.thaw()
