"""The schedule of learned state: it is read at the start, and written periodically and at the end.

While a store is unreachable, nothing is kept. That is logged once until the store answers again, and counted.
"""

import asyncio
import contextvars
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from serve_app.serving.state.calls import LOAD_TIMEOUT_S, SAVE_TIMEOUT_S, StoreCalls
from serve_app.serving.state.store import StateError, StateStore

logger = logging.getLogger("ray.serve")

Answer = TypeVar("Answer")
Document = Mapping[str, Any]

# Serve ends a replica five seconds after it was told to stop.
_LAST_SAVE_TIMEOUT_S = 3.0


class StateKeeper:
    """Keeps the state of one learner; must be constructed on a running event loop.

    Args:
        store: reads and writes the state.
        model: label of the metrics.
        take: returns the present state, as plain values that do not change any more; called on the loop. None
            when there is nothing to keep.
        interval_s: between two writes; an unchanged state is not written.
    """

    def __init__(
        self, store: StateStore, model: str, take: Callable[[], Document | None], interval_s: float
    ) -> None:
        self._store, self._take, self._interval_s = store, take, interval_s
        self._loop = asyncio.get_running_loop()
        self._calls = StoreCalls(store)
        self._is_unreachable = False
        self._task: asyncio.Task[None] | None = None
        self._registry = CollectorRegistry()
        labels = ("model",)
        text = "Reads and writes of learned state that failed."
        failures = Counter("ewsjf_state_failures", text, (*labels, "operation"), registry=self._registry)
        self._failures = {verb: failures.labels(model, verb) for verb in ("load", "save", "restore")}
        text = "When learned state was last found saved, in seconds since 1970."
        self._saved_at = Gauge("ewsjf_state_saved_timestamp_seconds", text, labels, registry=self._registry)
        self._saved_at = self._saved_at.labels(model)

    def __repr__(self) -> str:
        return f"<StateKeeper {self._store.path}{' unreachable' if self._is_unreachable else ''}>"

    @property
    def is_unreachable(self) -> bool:
        """Whether the last call to the store failed."""
        return self._is_unreachable

    async def load(self) -> Document | None:
        """The last saved state; None when there is none, it cannot be used, or the store is unreachable."""
        try:
            return await self._call(self._store.load, LOAD_TIMEOUT_S)
        except StateError as exc:
            self._failed("load", exc)
            return None

    def start(self) -> None:
        """Save periodically until `close`; a second call has no effect."""
        if self._task is not None:
            return
        # In an empty context: Serve cancels a task that was started in the context of a request with it.
        self._task = self._loop.create_task(self._run(), context=contextvars.Context())

    async def save(self, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Save the present state."""
        try:
            document = self._take()
            if document is None:
                return
            await self._call(lambda: self._store.save(document), timeout_s)
        except StateError as exc:
            self._failed("save", exc)
        else:
            self._saved_at.set_to_current_time()

    async def close(self) -> None:
        """Save a last time, if the store answers soon."""
        if self._task is not None:
            self._task.cancel()
        await self.save(_LAST_SAVE_TIMEOUT_S)

    def refused(self, reason: str) -> None:
        """Set aside a loaded state that cannot be used, without waiting for it."""
        self._failures["restore"].inc()
        self._calls.begin(lambda: self._store.refuse(reason))

    def exposition(self) -> str:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self._registry).decode()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.save()

    def _failed(self, operation: str, error: StateError) -> None:
        self._failures[operation].inc()
        if not self._is_unreachable:
            logger.warning(
                "event=state_unreachable operation=%s path=%s reason=%r", operation, self._store.path, error
            )
        self._is_unreachable = True

    async def _call(self, work: Callable[[], Answer], timeout_s: float) -> Answer:
        """The store's answer, once earlier calls have returned.

        Raises:
            StateError: there is no answer in time.
        """
        answer = await self._calls.answer(work, timeout_s)
        if self._is_unreachable:
            logger.info("event=state_reachable path=%s", self._store.path)
        self._is_unreachable = False
        return answer
