"""Calls to a store of learned state from an event loop, which must not wait for a file system.

Each call has a thread of its own, one at a time, and a time limit. A call that hangs is abandoned, and no
other begins until it returns. The threads are daemons, so that a call that hangs does not keep the process
alive.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from serve_app.serving.state.store import StateError, StateStore

logger = logging.getLogger("ray.serve")

Answer = TypeVar("Answer")

LOAD_TIMEOUT_S = 5.0
"""A local file takes milliseconds, an object store a tenth of a second; a start waits no longer than this."""
SAVE_TIMEOUT_S = 20.0


class StoreCalls:
    """The calls to one store."""

    def __init__(self, store: StateStore) -> None:
        self._path = store.path
        self._under_way: asyncio.Future[Any] | None = None

    def __repr__(self) -> str:
        waits = self._under_way is not None and not self._under_way.done()
        return f"<StoreCalls {self._path}{' waits' if waits else ''}>"

    async def answer(self, work: Callable[[], Answer], timeout_s: float) -> Answer:
        """The store's answer, once earlier calls have returned.

        Raises:
            StateError: there is no answer in time, or `work` raised it.
        """
        before = self._under_way
        if before is not None:
            await asyncio.wait({before}, timeout=timeout_s)
            if not before.done():
                raise StateError(f"an earlier call has not returned from {self._path} yet")
        future = self.begin(work)
        await asyncio.wait({future}, timeout=timeout_s)
        if not future.done():
            raise StateError(f"no answer from {self._path} within {timeout_s:g} s")
        return future.result()

    def begin(self, work: Callable[[], Answer]) -> asyncio.Future[Answer]:
        """Call without waiting for it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def run() -> None:
            try:
                answer = work()
            except BaseException as exc:  # noqa: BLE001 - the caller gets it
                tell(partial(future.set_exception, exc))
            else:
                tell(partial(future.set_result, answer))

        def tell(what: Callable[[], None]) -> None:
            try:
                loop.call_soon_threadsafe(what)
            except RuntimeError:
                # The event loop has ended meanwhile, and with it the caller.
                logger.debug("event=state_answer_dropped path=%s", self._path)

        self._under_way = future
        # An error after the time limit was reported as a time-out already.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        threading.Thread(target=run, name="learned-state", daemon=True).start()
        return future
