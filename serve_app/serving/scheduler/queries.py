"""Admins' queries to one model's scheduler, received from gateways over the control channel.

Each public method is a query. Answers are sent as JSON, in parts if they are long.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from serve_app.errors import ChannelError
from serve_app.serving.event_loop import run_in_parts
from serve_app.serving.scheduler.costs import PersistentCosts
from serve_app.serving.scheduler.documents import (
    SUB_QUEUES_SHOWN,
    captured,
    captured_in_full,
    most_costly,
    overview,
    slowest,
)
from serve_app.serving.scheduler.findings import findings_document
from serve_app.serving.scheduler.live_scaling import LiveScaling
from serve_app.serving.scheduler.live_scheduler import LiveScheduler
from serve_app.serving.scheduler.program_receipts import programs_named
from serve_app.serving.scheduler.usage import PersistentUsage

_encoder = msgspec.json.Encoder()


QUERIES = frozenset(
    (
        "status",
        "queue",
        "overview",
        "costs",
        "scaling",
        "usage",
        "spent",
        "receipt",
        "program",
        "capture",
        "mode",
        "change_mode",
        "freeze",
    )
)
"""Methods of `AdminQueries` that gateways may call by name."""


@dataclass(slots=True, eq=False, kw_only=True)
class AdminQueries:
    """Answers to admins' queries about a live scheduler.

    Attributes:
        previous_costs: costs counted by its predecessors.
        live_scaling, persistent_usage: of its process.
        save: persists the learned state.
    """

    live: LiveScheduler
    previous_costs: PersistentCosts
    live_scaling: LiveScaling
    persistent_usage: PersistentUsage
    save: Callable[[], Awaitable[None]]

    @property
    def _model(self) -> str:
        return self.live.core.settings.model

    async def answer(self, query: str, arguments: bytes) -> bytes:
        """Return the answer as JSON.

        Raises:
            ChannelError: the query is unknown, or the scheduler has ended.
            SettingsError: an argument is invalid.
        """
        if query not in QUERIES:
            raise ChannelError(f"unknown query {query!r}")
        found = await getattr(self, query)(**msgspec.json.decode(arguments, type=dict[str, Any]))
        # In a thread, because some answers have megabytes and must not delay grants.
        return await asyncio.to_thread(_encoder.encode, found)

    async def status(self) -> dict[str, Any]:
        """Return the numbers of waiting requests, the replicas and their reports."""
        return self.live.status()

    async def queue(self) -> dict[str, Any]:
        """Return what is queued, for how long and why."""
        return self.live.queue()

    async def overview(self) -> dict[str, Any]:
        """Return this model's data for the dashboard."""
        live = self.live
        status, queue = live.status(), live.queue(SUB_QUEUES_SHOWN)
        found = overview(status, queue, live.activity.document())
        found["findings"] = findings_document(status, queue)
        found["slowest"] = slowest(live.history, live.now())
        return {**found, "scaling": await self.scaling(), "costs": most_costly(await self.costs())}

    async def costs(self) -> dict[str, Any]:
        """Return the costs of each tenant: engine time and imposed delay."""
        costs = self.previous_costs.plus(self.live.core)
        return {"model": self._model, **costs.document(self.live_scaling.gpus())}

    async def scaling(self) -> dict[str, Any]:
        """Return the desired replicas of each pool, and why."""
        return self.live_scaling.status()

    async def usage(self) -> dict[str, Any]:
        """Return the usage of each API key by day."""
        return self.persistent_usage.shown()

    async def spent(self, keys: list[str]) -> dict[str, Any]:
        """Return what API keys have used in the current day and month."""
        return self.persistent_usage.ledger.spent(keys)

    async def receipt(self, request_id: str) -> dict[str, Any]:
        """Return the receipt of a request; empty if it is unknown."""
        return await self.live.receipts.document(request_id, self.live.now())

    async def program(self, program: str) -> dict[str, Any]:
        """Return where the time of the programs with an id went."""
        live = self.live
        return await programs_named(program, live.core, live.history, live.now())

    async def capture(self, *, full: bool = False) -> list[dict[str, Any]]:
        """Return recently completed requests as lines of a trace without text, or `captured_in_full`."""
        return (
            await run_in_parts(captured_in_full(self.live.history)) if full else captured(self.live.history)
        )

    async def mode(self) -> dict[str, Any]:
        """Return the scheduled share of the traffic, and times to first token of both parts."""
        return {"model": self._model, **self.live.mode.describe()}

    async def change_mode(self, active_share: float) -> None:
        """Schedule another share of the requests; persisted with the learned state."""
        self.live.mode.change(active_share)
        await self.save()

    async def freeze(self, reason: str) -> None:
        """Freeze the tuner with a reason, or thaw it with an empty one."""
        if reason:
            self.live.tuner.freeze(reason)
        else:
            self.live.tuner.thaw()
