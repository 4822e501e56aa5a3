"""Admin API for the share of requests that is scheduled. Without a model, it applies to all models.

GET   /admin/mode
POST  /admin/mode   {"active_share": 0.1, "model": "m"}
"""

from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec

from serve_app.errors import Outcome
from serve_app.serving.channel.scheduler_client import SchedulerQueries
from serve_app.serving.gateway.answer.responses import RequestRejected, encode, send_json
from serve_app.serving.gateway.audit import audit
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.request.reader import RequestReader
from serve_app.serving.gateway.router import HttpRoute
from serve_app.serving.gateway.scheduler_queries import query_all, query_scheduler

MODE_PATH = "/admin/mode"


class ModeChange(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request that changes the scheduled share."""

    active_share: Annotated[float, msgspec.Meta(ge=0, le=1)]
    model: str | None = None


class ModeAdmin:
    """The `/admin/mode` API, backed by each model's scheduler."""

    def __init__(self, queries: Mapping[str, SchedulerQueries], reader: RequestReader) -> None:
        self._queries = queries
        self._reader = reader

    def routes(self) -> Iterator[HttpRoute]:
        """Yield the routes of this API."""
        share = "share of the traffic that is scheduled; for admins"
        yield HttpRoute("GET", MODE_PATH, self._serve, share)
        yield HttpRoute("POST", MODE_PATH, self._serve, f"change the {share}")

    async def _serve(self, incoming: IncomingRequest) -> None:
        """Return each model's scheduled share and queue times, after applying a requested change."""
        caller = self._reader.authenticate(incoming)
        caller.check_admin()
        chosen = self._queries
        if incoming.method == "POST":
            chosen = await self._apply_change(incoming, caller)
        models = await query_all(chosen, lambda _model, scheduler: scheduler.query("mode"))
        await send_json(incoming.send, 200, encode({"models": models}), [])

    async def _apply_change(
        self, incoming: IncomingRequest, caller: Caller
    ) -> Mapping[str, SchedulerQueries]:
        example = '{"active_share": 0.1}, a share from 0 to 1'
        change = await self._reader.document(incoming, ModeChange, example)
        if change.model is not None and change.model not in self._queries:
            known = ", ".join(self._queries)
            raise RequestRejected(
                Outcome.REJECTED_INVALID,
                f"unknown model {change.model!r}; models: {known}",
                param="model",
            )
        chosen = self._queries if change.model is None else {change.model: self._queries[change.model]}
        for model, scheduler in chosen.items():
            await query_scheduler(model, scheduler, "change_mode", active_share=change.active_share)
            audit("mode_changed", caller, incoming, model=model, active_share=change.active_share)
        return chosen
