"""What tests of the outlook share."""

from serve_app.scheduling import Scheduler
from serve_app.scheduling.outlook.order import expected_order
from serve_app.scheduling.outlook.watched import Outlook, WatchedRequests


def ordered(scheduler: Scheduler, now: float, home: str = "only") -> list[str]:
    """The ids of those that wait at home in a pool, in their expected order."""
    parts = expected_order(scheduler.queue, scheduler.settings.class_floors, now)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return [scheduled.request.request_id for scheduled in end.value.get(home, [])]


def told(watched: WatchedRequests, now: float) -> dict[str, Outlook]:
    """What one look tells, by request."""
    return {outlook.request_id: outlook for part in watched.look(now) for outlook in part}
