"""The pages under `/debug`: a look into every model's scheduler, for admins.

GET   /debug/queue, /debug/status, /debug/usage, /debug/tuner
POST  /debug/tuner/freeze, /debug/tuner/thaw
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from serve_app.serving.gateway.answer.responses import encode, send_json
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.request.reader import RequestReader
from serve_app.serving.gateway.scheduler_views import Question, SchedulerViews, ask_each

_FROZEN = (
    "the tuner is frozen: values on trial are withdrawn, those in force stay, and no others are tried until "
    "POST /debug/tuner/thaw"
)
_THAWED = "the tuner is thawed: other values may be tried again"


class DebugPages:
    """Serves the pages.

    Args:
        views: by model.
    """

    def __init__(self, views: Mapping[str, SchedulerViews], reader: RequestReader) -> None:
        self._views = views
        self._reader = reader

    @property
    def routes(self) -> dict[str, tuple[str, Callable[[IncomingRequest], Awaitable[None]]]]:
        """Method and handler of each path."""
        pages: dict[str, tuple[str, Question]] = {
            "/debug/queue": ("GET", lambda _model, views: views.queue()),
            "/debug/status": ("GET", lambda _model, views: views.status()),
            "/debug/scaling": ("GET", lambda _model, views: views.scaling()),
            "/debug/usage": ("GET", lambda _model, views: views.usage()),
            "/debug/tuner": ("GET", _tuner),
            "/debug/tuner/freeze": ("POST", partial(_freeze, "frozen by an admin")),
            "/debug/tuner/thaw": ("POST", partial(_freeze, "")),
        }
        return {path: (method, partial(self._show, question)) for path, (method, question) in pages.items()}

    async def _show(self, question: Question, incoming: IncomingRequest) -> None:
        self._reader.authenticate(incoming).check_admin()
        models = await ask_each(self._views, question)
        await send_json(incoming.send, 200, encode({"models": models}), [])


async def _tuner(model: str, views: SchedulerViews) -> Mapping[str, Any]:
    """The part of the status that is about the tuner."""
    status = await views.status()
    return {"model": model, **status["tuner"]}


async def _freeze(reason: str, model: str, views: SchedulerViews) -> Mapping[str, Any]:
    """Stop the tuner for a reason, or let it go on without one, and say what that means."""
    await views.freeze(reason)
    return {"model": model, "frozen": reason, "message": _FROZEN if reason else _THAWED}
