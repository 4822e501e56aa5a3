"""The admin API for the share of requests that is scheduled.

    GET   /admin/mode
    POST  /admin/mode   {"active_share": 0.1, "model": "m"}

Without a model it concerns all of them.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import RequestRefused, encode, send_json
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.request.reader import RequestReader
from serve_app.serving.gateway.scheduler_views import SchedulerViews, ask, ask_each

MODE_PATH = "/admin/mode"
MODE_METHODS = ("GET", "POST")


class ModeChange(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a change."""

    active_share: Annotated[float, msgspec.Meta(ge=0, le=1)]
    model: str | None = None


class ModeAdmin:
    """Serves the admin API.

    Args:
        views: by model.
    """

    def __init__(self, views: Mapping[str, SchedulerViews], reader: RequestReader) -> None:
        self._views = views
        self._reader = reader

    async def serve(self, incoming: IncomingRequest) -> None:
        """Show the share of each model and what was waited, after a change if one was asked for."""
        self._reader.authenticate(incoming).check_admin()
        chosen = self._views
        if incoming.scope["method"] == "POST":
            chosen = await self._changed(incoming)
        models = await ask_each(chosen, lambda _model, views: views.ask("mode"))
        await send_json(incoming.send, 200, encode({"models": models}), [])

    async def _changed(self, incoming: IncomingRequest) -> Mapping[str, SchedulerViews]:
        held = await self._reader.body(incoming)
        try:
            asked = msgspec.json.decode(held.data, type=ModeChange)
        except msgspec.DecodeError as exc:
            message = f'the body must be like {{"active_share": 0.1}}, a share from 0 to 1: {exc}'
            raise RequestRefused(Outcome.REJECTED_INVALID, message) from exc
        finally:
            held.release()
        if asked.model is not None and asked.model not in self._views:
            known = ", ".join(self._views)
            raise RequestRefused(
                Outcome.REJECTED_INVALID,
                f"there is no model {asked.model!r}; there are: {known}",
                param="model",
            )
        chosen = self._views if asked.model is None else {asked.model: self._views[asked.model]}
        for model, views in chosen.items():
            await ask(model, views, "change_mode", active_share=asked.active_share)
        return chosen
