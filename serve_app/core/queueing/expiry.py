"""A heap of queued requests by a time, such as the end of the queue timeout."""

import heapq
import math
from collections.abc import Callable, Iterator

from serve_app.core.request import ScheduledRequest


def earliest(*times: float | None) -> float | None:
    """Return the earliest of some times, or None if all are None."""
    first = None
    for time in times:
        if time is not None and (first is None or time < first):
            first = time
    return first


def _expires_at(scheduled: ScheduledRequest) -> float:
    return scheduled.expires_at


class ExpiryHeap:
    """Queued requests ordered by a time. Requests that have left are removed when they reach the top.

    Args:
        when: returns the time of a request in seconds, by default the end of its queue timeout. Infinity
            means never.
    """

    def __init__(self, when: Callable[[ScheduledRequest], float] = _expires_at) -> None:
        self._when = when
        self._heap: list[tuple[float, int, ScheduledRequest]] = []

    def add(self, scheduled: ScheduledRequest) -> None:
        """Add a queued request."""
        at = self._when(scheduled)
        if at < math.inf:
            heapq.heappush(self._heap, (at, scheduled.sequence, scheduled))

    def next_at(self) -> float | None:
        """Return the earliest time, or None if no queued request has one."""
        heap = self._heap
        while heap:
            at, _, scheduled = heap[0]
            if scheduled.queued and self._when(scheduled) == at:
                return at
            heapq.heappop(heap)
        return None

    def pop_expired(self, now: float) -> Iterator[ScheduledRequest]:
        """Remove and yield the requests whose time has come at `now`, the earliest first."""
        while (at := self.next_at()) is not None and at <= now:
            yield heapq.heappop(self._heap)[2]

    def __iter__(self) -> Iterator[ScheduledRequest]:
        """Yield the queued requests with a time, unordered."""
        return (each for at, _, each in self._heap if each.queued and self._when(each) == at)

    def prune(self, live: int) -> None:
        """Rebuild the heap if most entries are of requests that have left; `live` requests are queued."""
        if len(self._heap) > 64 and len(self._heap) > 2 * live:
            self._heap = [item for item in self._heap if item[2].queued and self._when(item[2]) == item[0]]
            heapq.heapify(self._heap)
