"""The requests in backoff: they wait and count as waiting, and are in no sub-queue until their time comes."""

from collections.abc import Iterator

from serve_app.scheduling.queueing.expiry import ExpiryHeap
from serve_app.scheduling.request import ScheduledRequest


def _rests_until(scheduled: ScheduledRequest) -> float:
    return scheduled.resting_until


class RestingRequests:
    """Waiting requests by the end of their backoff."""

    def __init__(self) -> None:
        self._resting: dict[str, ScheduledRequest] = {}
        self._ends = ExpiryHeap(_rests_until)

    def add(self, scheduled: ScheduledRequest) -> None:
        """A queued request rests until its `resting_until`."""
        self._resting[scheduled.request.request_id] = scheduled
        self._ends.add(scheduled)

    def remove(self, scheduled: ScheduledRequest) -> bool:
        """Remove a request; whether it was here."""
        return self._resting.pop(scheduled.request.request_id, None) is not None

    def pop_due(self, now: float) -> Iterator[ScheduledRequest]:
        """Those whose time has come."""
        for scheduled in self._ends.pop_expired(now):
            if self.remove(scheduled):
                yield scheduled
        self._ends.prune(len(self._resting))

    def next_at(self) -> float | None:
        """When the next one's time comes."""
        return self._ends.next_at()

    def __contains__(self, scheduled: ScheduledRequest) -> bool:
        return scheduled.request.request_id in self._resting

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(list(self._resting.values()))

    def __len__(self) -> int:
        return len(self._resting)
