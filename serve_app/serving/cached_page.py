"""Pages for scrapers that cost their process a bounded share of its time, however often they are asked."""

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

# Of one CPU: a page that takes 1 ms to draw up is at most 20 ms old, one of 1,000 replicas about a second.
_SHARE = 0.05

Content = TypeVar("Content")


class CachedPage(Generic[Content]):
    """A page that is drawn up in a thread, when it is asked for and the last one is too old.

    Those who ask meanwhile wait for the same page. A page is kept for twenty times the CPU time that it took.

    Args:
        gather: called on the event loop, takes a snapshot of what the page shows.
        render: called in a thread, makes the page of it.
    """

    def __init__(self, gather: Callable[[], Awaitable[Content]], render: Callable[[Content], str]) -> None:
        self._gather = gather
        self._render = render
        self._page = ""
        self._fresh_until = 0.0
        self._renewal: asyncio.Task[None] | None = None

    async def text(self) -> str:
        """The page, drawn up again if that is due."""
        loop = asyncio.get_running_loop()
        if self._renewal is None and loop.time() >= self._fresh_until:
            # In an empty context: Ray Serve cancels what a request has started with the request.
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
        # Of this thread alone: waiting for the interpreter's lock is no cost of the page.
        began = time.thread_time()
        page = self._render(content)
        return page, time.thread_time() - began
