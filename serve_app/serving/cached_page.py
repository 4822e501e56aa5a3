"""Cached pages for scrapers, with a bounded cost however often they are requested."""

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

# Share of one CPU: a page that takes 1 ms is at most 20 ms old, one of 1,000 replicas about a second.
_SHARE = 0.05

Content = TypeVar("Content")


class CachedPage(Generic[Content]):
    """A page that is rendered in a thread when it is requested and the last one is too old.

    Concurrent requests share a rendering. A page is valid for twenty times the CPU time that it took.

    Args:
        gather: takes a snapshot of the content; called on the event loop.
        render: renders the page; called in a thread.
    """

    def __init__(self, gather: Callable[[], Awaitable[Content]], render: Callable[[Content], str]) -> None:
        self._gather = gather
        self._render = render
        self._page = ""
        self._fresh_until = 0.0
        self._renewal: asyncio.Task[None] | None = None

    async def text(self) -> str:
        """Return the page, rendered again if it is too old."""
        loop = asyncio.get_running_loop()
        if self._renewal is None and loop.time() >= self._fresh_until:
            # In an empty context, because Ray Serve cancels a request's tasks with the request.
            self._renewal = loop.create_task(self._renew(), context=contextvars.Context())
        if self._renewal is not None:
            await asyncio.shield(self._renewal)
        return self._page

    async def _renew(self) -> None:
        try:
            content = await self._gather()
            self._page, cpu_s = await asyncio.to_thread(self._timed, content)
            self._fresh_until = asyncio.get_running_loop().time() + cpu_s / _SHARE
        finally:
            self._renewal = None

    def _timed(self, content: Content) -> tuple[str, float]:
        # CPU time of this thread, because waiting for the GIL is no cost of the page.
        began = time.thread_time()
        page = self._render(content)
        return page, time.thread_time() - began
