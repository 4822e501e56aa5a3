"""When the next request's time in the queue is over."""

import heapq
import math
from collections.abc import Iterator

from serve_app.scheduling.entry import Entry


class ExpiryHeap:
    """Waiting requests by the end of their time; who has left is dropped when it comes to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry]] = []

    def add(self, entry: Entry) -> None:
        """Watch a waiting request."""
        if entry.expires_at < math.inf:
            heapq.heappush(self._heap, (entry.expires_at, entry.sequence, entry))

    def next_at(self) -> float | None:
        """The earliest end; None when nothing waits with an end."""
        heap = self._heap
        while heap:
            expires_at, _, entry = heap[0]
            if entry.queued and entry.expires_at == expires_at:
                return expires_at
            heapq.heappop(heap)
        return None

    def pop_expired(self, now: float) -> Iterator[Entry]:
        """Requests whose time is over at `now`, the earliest first."""
        while (expires_at := self.next_at()) is not None and expires_at <= now:
            yield heapq.heappop(self._heap)[2]

    def prune(self, live: int) -> None:
        """Drop what has left the queue once it is most of the heap; `live` requests are waiting."""
        if len(self._heap) > 64 and len(self._heap) > 2 * live:
            self._heap = [item for item in self._heap if item[2].queued and item[2].expires_at == item[0]]
            heapq.heapify(self._heap)
