"""The schedule of learned state: read at the start, written periodically and at the end.

While a store is unreachable, nothing is persisted; failures are counted, and logged once until the store
answers again.
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

# Serve ends a replica five seconds after it requested a stop.
_LAST_SAVE_TIMEOUT_S = 3.0


class StatePersister:
    """Persistence of one learner's state; must be constructed on a running event loop.

    Args:
        store: reads and writes the state.
        model: label of the metrics.
        snapshot: returns the current state as plain values that no longer change, or None if there is nothing
            to persist; called on the event loop.
        interval_s: time between two writes, in seconds; an unchanged state is not written.
    """

    def __init__(
        self, store: StateStore, model: str, snapshot: Callable[[], Document | None], interval_s: float
    ) -> None:
        self._store, self._snapshot, self._interval_s = store, snapshot, interval_s
        self._loop = asyncio.get_running_loop()
        self._calls = StoreCalls(store)
        self._is_unreachable = False
        self._task: asyncio.Task[None] | None = None
        self._registry = CollectorRegistry()
        labels = ("model",)
        text = "Failed reads and writes of learned state."
        failures = Counter("ewsjf_state_failures", text, (*labels, "operation"), registry=self._registry)
        self._failures = {verb: failures.labels(model, verb) for verb in ("load", "save", "restore")}
        text = "Time of the last save of learned state, initially of the start, in seconds since 1970."
        self._saved_at = Gauge("ewsjf_state_saved_timestamp_seconds", text, labels, registry=self._registry)
        self._saved_at = self._saved_at.labels(model)
        self._saved_at.set_to_current_time()

    def __repr__(self) -> str:
        return f"<StatePersister {self._store.path}{' unreachable' if self._is_unreachable else ''}>"

    @property
    def is_unreachable(self) -> bool:
        """True if the last call to the store failed."""
        return self._is_unreachable

    async def load(self) -> Document | None:
        """Return the last saved state; None if there is none, it is unusable, or the store is unreachable."""
        try:
            return await self._call(self._store.load, LOAD_TIMEOUT_S)
        except StateError as exc:
            self._failed("load", exc)
            return None

    def start(self) -> None:
        """Save periodically until `close`. Idempotent."""
        if self._task is not None:
            return
        # In an empty context, because Serve cancels the tasks of a request's context with the request.
        self._task = self._loop.create_task(self._run(), context=contextvars.Context())

    async def save(self, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Save the current state."""
        try:
            document = self._snapshot()
            if document is None:
                return
            await self._call(lambda: self._store.save(document), timeout_s)
        except StateError as exc:
            self._failed("save", exc)
        else:
            self._saved_at.set_to_current_time()

    async def close(self) -> None:
        """Save a last time, if the store answers quickly."""
        if self._task is not None:
            self._task.cancel()
        await self.save(_LAST_SAVE_TIMEOUT_S)

    def rejected(self, reason: str) -> None:
        """Rename a loaded state that cannot be used, without waiting."""
        self._failures["restore"].inc()
        self._calls.begin(lambda: self._store.reject(reason))

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
        """Run a call once earlier ones have returned, and return its result.

        Raises:
            StateError: it did not return in time, or failed.
        """
        answer = await self._calls.answer(work, timeout_s)
        if self._is_unreachable:
            logger.info("event=state_reachable path=%s", self._store.path)
        self._is_unreachable = False
        return answer
