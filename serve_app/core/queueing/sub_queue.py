"""Sub-queues: requests that the same replicas can serve, in the policy's order.

A sub-queue contains requests of one class and tenant with the same length queue, pool preference, prefill
class and destination. It is a heap with lazy deletion. A request that leaves from the middle (cancelled,
expired) leaves a stale entry, which is removed when it reaches the top. The heap is rebuilt when most entries
are stale. The sub-queue always knows its head, and registers each new one with its group.
"""

import heapq
from collections.abc import Iterator

from serve_app.core.queueing.head_groups import HeadGroup
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica_state import PrefillClass
from serve_app.request import Destination

SubQueueKey = tuple[str, tuple[str, ...], PrefillClass, Destination, bool]
"""Length queue, pool preference, prefill class, destination (which replicas of the pools can serve it), and
whether its requests are ordered by their latency targets."""

OrderKey = tuple[int, float, int, int]
"""Precedence (returned, claimed or neither), the policy's key or the latest dispatch, order of arrival, order
of insertion."""


class SubQueue:
    """A queue of requests in the policy's order.

    Attributes:
        first: its head; None if it is empty.
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
        """Insert a request at its place in the order."""
        self._live[scheduled.request.request_id] = order
        heapq.heappush(self._heap, (order, scheduled))
        self.group.count(scheduled, 1)
        if self._heap[0][1] is scheduled:
            self._set_head(scheduled)

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
            self._set_head(self._heap[0][1] if self._heap else None)

    def _set_head(self, head: ScheduledRequest | None) -> None:
        self.first = head
        if head is not None:
            self.group.on_head(head, self)

    def _is_live(self, item: tuple[OrderKey, ScheduledRequest]) -> bool:
        # Compare keys, not requests: a request that left and was queued again is in the heap twice.
        return self._live.get(item[1].request.request_id) == item[0]

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (item[1] for item in sorted(self._heap) if self._is_live(item))

    def __len__(self) -> int:
        return len(self._live)


class TenantQueues:
    """The sub-queues of one tenant in one class, with the number and tokens of its queued requests.

    Attributes:
        promotions: promotions that its dispatches have earned, see `dispatch.promotion`.
    """

    __slots__ = ("promotions", "sub_queues", "tokens", "waiting")

    def __init__(self) -> None:
        self.sub_queues: dict[SubQueueKey, SubQueue] = {}
        self.waiting = 0
        self.tokens = 0
        self.promotions = 1.0
