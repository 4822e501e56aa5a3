"""Builders for outlook tests."""

from collections.abc import Sequence

from serve_app.core import Scheduler
from serve_app.core.outlook.watched import Outlook, WatchedRequests, expected_order
from serve_app.core.request import ScheduledRequest


def ordered(scheduler: Scheduler, now: float, home: str = "only") -> list[str]:
    """Return the IDs of requests queued at home in a pool, in expected order."""
    return [scheduled.request.request_id for scheduled in ordered_requests(scheduler, now, home)]


def ordered_requests(scheduler: Scheduler, now: float, home: str = "only") -> Sequence[ScheduledRequest]:
    """Return the requests queued at home in a pool, in expected order."""
    parts = expected_order(scheduler.queue, scheduler.settings.class_floors, now)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            found: Sequence[ScheduledRequest] = end.value.get(home, ())
            return found


def updates(watched: WatchedRequests, now: float) -> dict[str, Outlook]:
    """Return the updates of one call, by request."""
    return {outlook.request_id: outlook for part in watched.updates(now) for outlook in part}
