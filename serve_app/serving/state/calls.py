"""Calls to a store from an event loop, which must not wait for a file system.

Calls are made one at a time, each with a time limit. A call that hangs is abandoned, and no other one
starts until it returns.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from serve_app.serving.daemon_threads import DaemonThreads
from serve_app.serving.state.store import StateError, StateStore

Answer = TypeVar("Answer")

LOAD_TIMEOUT_S = 5.0
"""Limit of a start's wait; a local file takes milliseconds, an object store a tenth of a second."""
SAVE_TIMEOUT_S = 20.0


class StoreCalls:
    """Non-blocking calls to one store."""

    def __init__(self, store: StateStore) -> None:
        self._path = store.path
        self._thread = DaemonThreads(1, "learned-state")
        self._running: asyncio.Future[Any] | None = None

    def __repr__(self) -> str:
        waits = self._running is not None and not self._running.done()
        return f"<StoreCalls {self._path}{' waits' if waits else ''}>"

    async def answer(self, work: Callable[[], Answer], timeout_s: float) -> Answer:
        """Run a call once earlier ones have returned, and return its result.

        Raises:
            StateError: it did not return in time, or `work` raised it.
        """
        before = self._running
        if before is not None:
            await asyncio.wait({before}, timeout=timeout_s)
            if not before.done():
                raise StateError(f"an earlier call has not returned from {self._path} yet")
        future = self.begin(work)
        await asyncio.wait({future}, timeout=timeout_s)
        if not future.done():
            raise StateError(f"no response from {self._path} within {timeout_s:g} s")
        return future.result()

    def begin(self, work: Callable[[], Answer]) -> asyncio.Future[Answer]:
        """Start a call without waiting for it."""
        self._running = future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        # An error after the time limit has already been reported as a timeout.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future
