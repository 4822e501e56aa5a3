"""A heap of queued requests by a time, such as the end of the queue timeout.

A request that leaves the queue stays in the heap until its entry is the first, or the heap has grown to twice
its size after the last time that such entries were removed. That takes constant time per added request.
"""

import heapq
import math
from collections.abc import Callable, Iterator

from serve_app.core.request import ScheduledRequest

_MIN_ENTRIES = 64


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
        self._clean_at = _MIN_ENTRIES

    def add(self, scheduled: ScheduledRequest) -> None:
        """Add a queued request."""
        at = self._when(scheduled)
        if at == math.inf:
            return
        if len(self._heap) >= self._clean_at:
            # Before the push, because a request may be added just before it is queued.
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
            self._clean_at = max(_MIN_ENTRIES, 2 * len(self._heap))
        heapq.heappush(self._heap, (at, scheduled.sequence, scheduled))

    def next_at(self) -> float | None:
        """Return the earliest time, or None if no queued request has one."""
        heap = self._heap
        while heap:
            if self._is_live(heap[0]):
                return heap[0][0]
            heapq.heappop(heap)
        return None

    def pop_expired(self, now: float) -> Iterator[ScheduledRequest]:
        """Remove and yield the requests whose time has come at `now`, the earliest first."""
        while (at := self.next_at()) is not None and at <= now:
            yield heapq.heappop(self._heap)[2]

    def __iter__(self) -> Iterator[ScheduledRequest]:
        """Yield the queued requests with a time, unordered."""
        return (entry[2] for entry in self._heap if self._is_live(entry))

    def _is_live(self, entry: tuple[float, int, ScheduledRequest]) -> bool:
        at, _, scheduled = entry
        return scheduled.queued and self._when(scheduled) == at
