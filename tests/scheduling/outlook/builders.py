"""What tests of the outlook share."""

from collections.abc import Mapping, Sequence

from serve_app.scheduling import Scheduler
from serve_app.scheduling.outlook.order import expected_order
from serve_app.scheduling.outlook.watched import Outlook, WatchedRequests
from serve_app.scheduling.request import ScheduledRequest


def ordered(scheduler: Scheduler, now: float, home: str = "only") -> list[str]:
    """The ids of those that wait at home in a pool, in their expected order."""
    return [scheduled.request.request_id for scheduled in ordered_requests(scheduler, now, home)]


def ordered_requests(scheduler: Scheduler, now: float, home: str = "only") -> Sequence[ScheduledRequest]:
    """Those that wait at home in a pool, in their expected order."""
    parts = expected_order(scheduler.queue, scheduler.settings.class_floors, now)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            found: Mapping[str, Sequence[ScheduledRequest]] = end.value
            return found.get(home, ())


def told(watched: WatchedRequests, now: float) -> dict[str, Outlook]:
    """What one look tells, by request."""
    return {outlook.request_id: outlook for part in watched.look(now) for outlook in part}
