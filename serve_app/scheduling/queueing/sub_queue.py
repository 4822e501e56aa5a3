"""A sub-queue: the waiting requests of one class and tenant that could go to the same places.

They share length queue, pools, prefill class, and destination: which replicas of the pools will do.

It is a heap with lazy deletion. A request that leaves from the middle (cancelled, expired) is only marked,
and is dropped when it reaches the top. The heap is rebuilt when most of it is marked.
"""

import heapq
from collections.abc import Iterator

from serve_app.request import Destination
from serve_app.routing.replica_state import PrefillClass
from serve_app.scheduling.request import ScheduledRequest

SubQueueKey = tuple[str, tuple[str, ...], PrefillClass, Destination]
"""Length queue, pools, prefill class, and which replicas of the pools will do."""

OrderKey = tuple[int, float, int, int]
"""Returned, claimed or neither; the policy's key; order of arrival; a number unique to each insertion."""


class SubQueue:
    """Requests in their policy's order."""

    __slots__ = ("_heap", "_live", "key", "length_queue", "pools")

    def __init__(self, key: SubQueueKey) -> None:
        self.key = key
        self.length_queue, self.pools = key[:2]
        self._heap: list[tuple[OrderKey, ScheduledRequest]] = []
        self._live: dict[str, OrderKey] = {}

    def add(self, order: OrderKey, scheduled: ScheduledRequest) -> None:
        """Insert a request."""
        self._live[scheduled.request.request_id] = order
        heapq.heappush(self._heap, (order, scheduled))

    def remove(self, scheduled: ScheduledRequest) -> None:
        """Remove a request, wherever it is."""
        del self._live[scheduled.request.request_id]
        if len(self._heap) > 32 and len(self._heap) > 2 * len(self._live):
            self._heap = [item for item in self._heap if self._is_live(item)]
            heapq.heapify(self._heap)

    def head(self) -> ScheduledRequest | None:
        """The first request; None when there is none."""
        while self._heap:
            if self._is_live(self._heap[0]):
                return self._heap[0][1]
            heapq.heappop(self._heap)
        return None

    def _is_live(self, item: tuple[OrderKey, ScheduledRequest]) -> bool:
        # By key, not by request: one that left and returned is in the heap twice.
        return self._live.get(item[1].request.request_id) == item[0]

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (item[1] for item in self._heap if self._is_live(item))

    def __len__(self) -> int:
        return len(self._live)


class TenantQueues:
    """The sub-queues of one tenant in one class, with its waiting requests and their tokens."""

    __slots__ = ("sub_queues", "tokens", "waiting")

    def __init__(self) -> None:
        self.sub_queues: dict[SubQueueKey, SubQueue] = {}
        self.waiting = 0
        self.tokens = 0

    def sub_queue(self, key: SubQueueKey) -> SubQueue:
        """The sub-queue of this key, created if there is none."""
        sub_queue = self.sub_queues.get(key)
        if sub_queue is None:
            sub_queue = self.sub_queues[key] = SubQueue(key)
        return sub_queue
