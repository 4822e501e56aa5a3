"""A sub-queue: the waiting requests of one class and tenant that could go to the same places.

They share length queue, pools, prefill class, and destination: which replicas of the pools will do.

It is a heap with lazy deletion. A request that leaves from the middle (cancelled, expired) is only marked,
and is dropped when it reaches the top. The heap is rebuilt when most of it is marked. Its head is known at
any time, and its group is told of each new one.
"""

import heapq
from collections.abc import Iterator

from serve_app.request import Destination
from serve_app.routing.replica_state import PrefillClass
from serve_app.scheduling.queueing.head_groups import HeadGroup
from serve_app.scheduling.request import ScheduledRequest

SubQueueKey = tuple[str, tuple[str, ...], PrefillClass, Destination]
"""Length queue, pools, prefill class, and which replicas of the pools will do."""

OrderKey = tuple[int, float, int, int]
"""Returned, claimed or neither; the policy's key; order of arrival; a number unique to each insertion."""


class SubQueue:
    """Requests in their policy's order.

    Attributes:
        group: of its head.
        first: its head; None when it is empty.
    """

    __slots__ = ("_heap", "_live", "first", "group", "key", "length_queue", "pools")

    def __init__(self, key: SubQueueKey, group: HeadGroup) -> None:
        self.key = key
        self.group = group
        self.length_queue, self.pools = key[:2]
        self.first: ScheduledRequest | None = None
        self._heap: list[tuple[OrderKey, ScheduledRequest]] = []
        self._live: dict[str, OrderKey] = {}

    def add(self, order: OrderKey, scheduled: ScheduledRequest) -> None:
        """Insert a request."""
        self._live[scheduled.request.request_id] = order
        heapq.heappush(self._heap, (order, scheduled))
        self.group.count(scheduled, 1)
        if self._heap[0][1] is scheduled:
            self._lead(scheduled)

    def remove(self, scheduled: ScheduledRequest) -> None:
        """Remove a request, wherever it is."""
        del self._live[scheduled.request.request_id]
        self.group.count(scheduled, -1)
        if len(self._heap) > 32 and len(self._heap) > 2 * len(self._live):
            self._heap = [item for item in self._heap if self._is_live(item)]
            heapq.heapify(self._heap)
        if scheduled is self.first:
            while self._heap and not self._is_live(self._heap[0]):
                heapq.heappop(self._heap)
            self._lead(self._heap[0][1] if self._heap else None)

    def _lead(self, head: ScheduledRequest | None) -> None:
        self.first = head
        if head is not None:
            self.group.on_head(head, self)

    def _is_live(self, item: tuple[OrderKey, ScheduledRequest]) -> bool:
        # By key, not by request: one that left and returned is in the heap twice.
        return self._live.get(item[1].request.request_id) == item[0]

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (item[1] for item in sorted(self._heap) if self._is_live(item))

    def __len__(self) -> int:
        return len(self._live)


class TenantQueues:
    """The sub-queues of one tenant in one class, with its waiting requests and their tokens."""

    __slots__ = ("sub_queues", "tokens", "waiting")

    def __init__(self) -> None:
        self.sub_queues: dict[SubQueueKey, SubQueue] = {}
        self.waiting = 0
        self.tokens = 0
