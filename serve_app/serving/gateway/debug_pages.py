"""The pages under `/debug`: a look into every model's scheduler, for admins.

GET   /debug/queue, /debug/status, /debug/usage, /debug/costs, /debug/tuner
GET   /debug/costs.csv: the same as `/debug/costs`, as a table
GET   /debug/requests/ID: where the time of a request went, for ten minutes after its end
GET   /debug/requests/ID/recording: the minutes around it, for a replay; no text
GET   /debug/requests/ID/what-if: what would have helped it, by replays beside this gateway
GET   /debug/capture: the requests of that time as a trace without text, one JSON document a line
POST  /debug/tuner/freeze, /debug/tuner/thaw
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

from serve_app.counterfactuals.recording import named, request_of_tenant
from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import (
    JSON_TYPE,
    RequestRefused,
    encode,
    send_body,
    send_json,
)
from serve_app.serving.gateway.cost_table import cost_table
from serve_app.serving.gateway.replays import Replays
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.request.reader import RequestReader
from serve_app.serving.gateway.scheduler_views import Question, SchedulerViews, ask, ask_each

_FROZEN = (
    "the tuner is frozen: values on trial are withdrawn, those in force stay, and no others are tried until "
    "POST /debug/tuner/thaw"
)
RECEIPTS_PATH = "/debug/requests/"
RECORDING, WHAT_IF = "/recording", "/what-if"
_RECORDING_TIMEOUT_S = 15.0
_NO_RECEIPT = (
    "no receipt of this request: receipts are kept for ten minutes after its end, of the last 20,000 "
    "requests, and not across a restart of the scheduler. What a gateway refuses by itself has none, since "
    "no scheduler was asked: a body, key or model that is not allowed, or no scheduler that could be "
    "reached. Its answer and its line in the log say why. Ask with the x-request-id of its answer"
)
_UNDER_WAY = (
    "this request is under way, or was admitted by an earlier scheduler: the minutes around a request are "
    "known once it has ended"
)
_LINES = (b"content-type", b"application/jsonl")
_TABLE = (b"content-type", b"text/csv; charset=utf-8")
_THAWED = "the tuner is thawed: other values may be tried again"


class DebugPages:
    """Serves the pages.

    Args:
        views: by model.
    """

    def __init__(self, views: Mapping[str, SchedulerViews], reader: RequestReader) -> None:
        self._views = views
        self._reader = reader
        self._replays = Replays()

    @property
    def routes(self) -> dict[str, tuple[str, Callable[[IncomingRequest], Awaitable[None]]]]:
        """Method and handler of each path."""
        pages: dict[str, tuple[str, Question]] = {
            "/debug/queue": ("GET", lambda _model, views: views.ask("queue")),
            "/debug/status": ("GET", lambda _model, views: views.ask("status")),
            "/debug/scaling": ("GET", lambda _model, views: views.ask("scaling")),
            "/debug/usage": ("GET", lambda _model, views: views.ask("usage")),
            "/debug/costs": ("GET", lambda _model, views: views.ask("costs")),
            "/debug/tuner": ("GET", _tuner),
            "/debug/tuner/freeze": ("POST", partial(_freeze, "frozen by an admin")),
            "/debug/tuner/thaw": ("POST", partial(_freeze, "")),
        }
        shown = {path: (method, partial(self._show, question)) for path, (method, question) in pages.items()}
        return {
            **shown,
            "/debug/capture": ("GET", self._capture),
            "/debug/costs.csv": ("GET", self._cost_table),
        }

    async def receipt(self, incoming: IncomingRequest) -> None:
        """The receipt of one request, whichever model it was for, or what its path asks for besides.

        Raises:
            RequestRefused: the caller is no admin, or no scheduler knows the request.
        """
        self._reader.authenticate(incoming).check_admin()
        name = incoming.path.removeprefix(RECEIPTS_PATH)
        if name.endswith((RECORDING, WHAT_IF)):
            await self._replay(incoming, unquote(name.rpartition("/")[0]))
            return
        request_id = unquote(name)
        found_by = await ask_each(self._views, lambda _, views: views.ask("receipt", request_id=request_id))
        for found in found_by:
            if "request_id" in found:
                await send_json(incoming.send, 200, encode(found), [])
                return
        raise RequestRefused(Outcome.REJECTED_INVALID, _NO_RECEIPT, code="not_found", status=404)

    async def _replay(self, incoming: IncomingRequest, request_id: str) -> None:
        """The minutes around a request, or what would have helped it."""
        for model, views in self._views.items():
            recording = await ask(model, views, "recording", _RECORDING_TIMEOUT_S, request_id=request_id)
            if recording and incoming.path.endswith(RECORDING):
                await send_body(incoming.send, 200, [JSON_TYPE], recording.encode())
                return
            if recording:
                told = await _with_name(await self._replays.what_if(recording), model, views)
                await send_json(incoming.send, 200, encode(told), [])
                return
            if "request_id" in await ask(model, views, "receipt", request_id=request_id):
                raise RequestRefused(Outcome.REJECTED_INVALID, _UNDER_WAY, code="under_way", status=409)
        raise RequestRefused(Outcome.REJECTED_INVALID, _NO_RECEIPT, code="not_found", status=404)

    async def _capture(self, incoming: IncomingRequest) -> None:
        self._reader.authenticate(incoming).check_admin()
        lines = b""
        for model, views in self._views.items():
            for line in await ask(model, views, "capture"):
                lines += encode({**line, "model": model}) + b"\n"
        await send_body(incoming.send, 200, [_LINES], lines)

    async def _cost_table(self, incoming: IncomingRequest) -> None:
        self._reader.authenticate(incoming).check_admin()
        models = await ask_each(self._views, lambda _model, views: views.ask("costs"))
        if errors := [f"{model['model']}: {model['error']}" for model in models if "error" in model]:
            # Half a table looks like a whole one.
            message = "; ".join(errors)
            raise RequestRefused(Outcome.FAILED, message, code="scheduler_unavailable", status=503)
        await send_body(incoming.send, 200, [_TABLE], cost_table(models).encode())

    async def _show(self, question: Question, incoming: IncomingRequest) -> None:
        self._reader.authenticate(incoming).check_admin()
        models = await ask_each(self._views, question)
        await send_json(incoming.send, 200, encode({"models": models}), [])


async def _with_name(told: dict[str, Any], model: str, views: SchedulerViews) -> dict[str, Any]:
    """What would have helped, with the name of the tenant that is left out if its receipt is still there."""
    example = request_of_tenant(told)
    receipt = await ask(model, views, "receipt", request_id=example) if example else {}
    return named(told, receipt["tenant"]) if "tenant" in receipt else told


async def _tuner(model: str, views: SchedulerViews) -> Mapping[str, Any]:
    """The part of the status that is about the tuner."""
    status = await views.ask("status")
    return {"model": model, **status["tuner"]}


async def _freeze(reason: str, model: str, views: SchedulerViews) -> Mapping[str, Any]:
    """Stop the tuner for a reason, or let it go on without one, and say what that means."""
    await views.ask("freeze", reason=reason)
    return {"model": model, "frozen": reason, "message": _FROZEN if reason else _THAWED}
