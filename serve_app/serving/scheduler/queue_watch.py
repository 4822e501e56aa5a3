"""Queue updates: sends gateways the outlooks of the waiting requests whose clients subscribe.

All of them are estimated together, four times per second, or less often if that would exceed a small share of
the scheduler's time. An update runs in parts, between other events. Without subscribers, there is no timer.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter

from serve_app.core import Scheduler
from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.outlook.watched import CalibrationError, Outlook, WatchedRequests
from serve_app.core.request import ScheduledRequest
from serve_app.serving.channel.scheduler_client import RequestOutlook
from serve_app.serving.scheduler.journal import Entry

logger = logging.getLogger("ray.serve")

_INTERVAL_S = 0.25
# Maximum share of the scheduler's time; with thousands of subscribers, updates become less frequent.
_MAX_SHARE = 0.05


class QueueWatch:
    """Watched requests of one live scheduler; `send` sends outlooks, `count` records their errors."""

    def __init__(
        self,
        core: Scheduler,
        now: Callable[[], float],
        send: Callable[[Iterable[RequestOutlook]], None],
        count: Callable[[Iterable[CalibrationError]], None],
    ) -> None:
        self._now, self._send, self._count = now, send, count
        self._watched = WatchedRequests(core)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._update_is_due_at = 0.0
        self._stopped = False

    def __repr__(self) -> str:
        return f"<QueueWatch {self._watched}>"

    def watch(self, request_id: str) -> None:
        """Send updates of a request while it waits."""
        if not self._stopped and self._watched.watch(request_id, self._now()) and self._timer is None:
            self._timer = self._loop.call_at(self._update_is_due_at, self._update)

    def expected(
        self, scheduled: ScheduledRequest, order: Sequence[ScheduledRequest], now: float
    ) -> Outlook | None:
        """Return the outlook of a waiting request, watched or not; see `WatchedRequests.expected`."""
        return self._watched.expected(scheduled, order, now)

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handlers that learn from requests and record the errors of their estimates."""
        return {Dispatch: self._on_dispatch, Conclude: self._on_conclusion}

    def _on_dispatch(self, entry: Entry, _command: Dispatch, scheduled: ScheduledRequest) -> None:
        if self._watched:
            self._count(self._watched.on_dispatch(scheduled, entry.now))

    def _on_conclusion(self, entry: Entry, command: Conclude, _scheduled: ScheduledRequest) -> None:
        if self._watched:
            outcome = command.conclusion.outcome
            self._count(self._watched.on_conclusion(command.request_id, outcome, entry.now))

    def stop(self) -> None:
        """Send no further updates."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _update(self) -> None:
        self._continue(self._watched.updates(self._now()), 0.0)

    def _continue(self, look: Iterator[list[Outlook]], took_s: float) -> None:
        """Run one part of an update, and schedule the next part or the next update."""
        began = perf_counter()
        try:
            updates = next(look, None)
            if updates:
                self._send(map(_as_message, updates))
        except Exception:
            # Scheduling does not depend on it, so it continues.
            logger.exception("event=queue_outlook_failed")
            updates = None
        took_s += perf_counter() - began
        if self._stopped:
            return
        if updates is not None:
            self._timer = self._loop.call_soon(self._continue, look, took_s)
            return
        self._update_is_due_at = self._loop.time() + max(_INTERVAL_S, took_s / _MAX_SHARE)
        self._timer = self._loop.call_at(self._update_is_due_at, self._update) if self._watched else None


def _as_message(outlook: Outlook) -> RequestOutlook:
    start = outlook.start
    if start is None:
        return RequestOutlook(outlook.request_id, outlook.position, None, None, None)
    times = round(start.middle, 3), round(start.low, 3), round(start.high, 3)
    return RequestOutlook(outlook.request_id, outlook.position, *times)
