"""The frames of the dashboard: one picture of all schedulers each second, while anybody watches.

Whoever watches waits for the next frame. Nobody has a queue of frames, so a browser that reads slowly skips
some, and one that does not read at all holds one.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Mapping
from typing import Any, Self

from serve_app.serving.gateway.answer.responses import encode
from serve_app.serving.gateway.scheduler_views import SchedulerViews

logger = logging.getLogger("ray.serve")

INTERVAL_S = 1.0
# A scheduler that is being replaced must not hold up the picture of the others.
_ANSWER_TIMEOUT_S = 2.0


class Frames:
    """Draws up the frames; a context manager around each one's watching.

    Args:
        views: by model.
        gateway_id: told in each frame, since each gateway has watchers of its own.
        interval_s: between two frames.

    Attributes:
        watchers: browsers that watch now.
        drawn: frames so far.
    """

    def __init__(
        self, views: Mapping[str, SchedulerViews], gateway_id: str, interval_s: float = INTERVAL_S
    ) -> None:
        self._views = views
        self._gateway_id = gateway_id
        self._interval_s = interval_s
        self._drawing: asyncio.Task[None] | None = None
        self._latest = b""
        self._is_new = asyncio.Event()
        self._closed = False
        self.watchers = 0
        self.drawn = 0

    def __repr__(self) -> str:
        return f"<Frames watchers={self.watchers} drawn={self.drawn}>"

    def __enter__(self) -> Self:
        self.watchers += 1
        if self._drawing is None and not self._closed:
            # In an empty context: Ray Serve cancels what a request has started with the request.
            self._drawing = asyncio.get_running_loop().create_task(
                self._draw(), context=contextvars.Context()
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.watchers -= 1
        if not self.watchers:
            self._stop()

    async def next(self) -> bytes | None:
        """The next frame, as JSON; None when there will be no more."""
        if not self._closed:
            await self._is_new.wait()
        return None if self._closed else self._latest

    def close(self) -> None:
        """Draw up no more; whoever watches hears of it."""
        self._closed = True
        self._stop()
        self._is_new.set()

    def _stop(self) -> None:
        if self._drawing is not None:
            self._drawing.cancel()
            self._drawing = None

    async def _draw(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                self._latest = await self._frame()
            except Exception:
                # Those who watch see that nothing comes, and the log says why.
                logger.exception("event=dashboard_fault")
            else:
                self.drawn += 1
                is_new, self._is_new = self._is_new, asyncio.Event()
                is_new.set()
            await asyncio.sleep(max(0.0, began + self._interval_s - loop.time()))

    async def _frame(self) -> bytes:
        models = await asyncio.gather(*(self._model(name, each) for name, each in self._views.items()))
        return encode(
            {
                "at": time.time(),
                "interval_s": self._interval_s,
                "gateway": {"id": self._gateway_id, "watchers": self.watchers},
                "models": models,
            }
        )

    async def _model(self, name: str, views: SchedulerViews) -> Mapping[str, Any]:
        try:
            return await asyncio.wait_for(views.overview(), _ANSWER_TIMEOUT_S)
        except TimeoutError:
            return {"model": name, "error": f"its scheduler has not answered for {_ANSWER_TIMEOUT_S:g} s"}
        except Exception as error:  # noqa: BLE001 - whatever keeps one scheduler from answering
            return {"model": name, "error": f"its scheduler does not answer: {error!r}"}
