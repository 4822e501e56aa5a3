"""Heads in groups: whether any of many heads may fit a replica is known without a look at each of them.

Where a head fits depends on its class, its pools, its prefill class and its tokens. So the heads of all
sub-queues that share the first three form a group, and a group knows the fewest tokens of any of its heads.
When not even so many fit, none of its heads does. It also knows which of its heads arrived first.

Both are heaps with lazy deletion: an entry counts while its request is the head of its sub-queue.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import Protocol

from serve_app.request import ANYWHERE, PriorityClass
from serve_app.routing.replica_state import PrefillClass
from serve_app.scheduling.request import ScheduledRequest

# Entries of a heap for each sub-queue, beyond which those that no longer count are dropped.
_KEPT, _LEAST_KEPT = 4, 64


class HasHead(Protocol):
    """A sub-queue, as far as a group knows it."""

    @property
    def first(self) -> ScheduledRequest | None:
        """Its head; None when it is empty."""


_Entry = tuple[tuple[float, int], int, ScheduledRequest, HasHead]


class _HeadHeap:
    """Heads by some key."""

    __slots__ = ("_heap", "_pushed")

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._pushed = 0

    def push(self, key: tuple[float, int], head: ScheduledRequest, sub_queue: HasHead, heads: int) -> None:
        """Add a head; there are so many in all."""
        self._pushed += 1
        heapq.heappush(self._heap, (key, self._pushed, head, sub_queue))
        if len(self._heap) > max(_LEAST_KEPT, _KEPT * heads):
            self._heap = [entry for entry in self._heap if entry[3].first is entry[2]]
            heapq.heapify(self._heap)

    def first(self) -> ScheduledRequest | None:
        """The head with the lowest key; None when there is none."""
        heap = self._heap
        while heap:
            _, _, head, sub_queue = heap[0]
            if sub_queue.first is head:
                return head
            heapq.heappop(heap)
        return None


class HeadGroup:
    """The heads of one class, set of pools and prefill class.

    Attributes:
        tenants: the sub-queues that each tenant has in it.
        choosy: requests in it that exclude single replicas, for a reason of their own.
        cached: requests in it of which a replica has a part cached, so that they may pass as shorter ones.
    """

    __slots__ = (
        "_by_arrival",
        "_by_tokens",
        "_heads",
        "cached",
        "choosy",
        "pools",
        "prefill_class",
        "priority",
        "tenants",
    )

    def __init__(self, priority: PriorityClass, pools: tuple[str, ...], prefill_class: PrefillClass) -> None:
        self.priority = priority
        self.pools = pools
        self.prefill_class = prefill_class
        self.tenants: dict[str, list[HasHead]] = {}
        self.choosy = 0
        self.cached = 0
        self._heads = 0
        self._by_tokens = _HeadHeap()
        self._by_arrival = _HeadHeap()

    def open(self, tenant: str, sub_queue: HasHead) -> None:
        """A tenant has one more sub-queue in it."""
        self.tenants.setdefault(tenant, []).append(sub_queue)
        self._heads += 1

    def close(self, tenant: str, sub_queue: HasHead) -> None:
        """A sub-queue of a tenant is empty, and gone."""
        self._heads -= 1
        of_tenant = self.tenants[tenant]
        of_tenant.remove(sub_queue)
        if not of_tenant:
            del self.tenants[tenant]

    def heads_of(self, tenant: str) -> list[ScheduledRequest]:
        """The heads of one tenant in it, in no order."""
        sub_queues = self.tenants.get(tenant, ())
        return [head for sub_queue in sub_queues if (head := sub_queue.first) is not None]

    def count(self, scheduled: ScheduledRequest, by: int) -> None:
        """A request has joined one of its sub-queues (1), or has left it (-1)."""
        if scheduled.put_backs or scheduled.request.destination is not ANYWHERE:
            self.choosy += by
        if scheduled.cached_tokens:
            self.cached += by

    def on_head(self, head: ScheduledRequest, sub_queue: HasHead) -> None:
        """A sub-queue has another head."""
        tokens = (head.estimate.expected_tokens, head.sequence)
        self._by_tokens.push(tokens, head, sub_queue, self._heads)
        self._by_arrival.push((head.request.arrived_at, head.sequence), head, sub_queue, self._heads)

    def smallest(self) -> ScheduledRequest | None:
        """The head with the fewest expected tokens; None when the group is empty."""
        return self._by_tokens.first()

    def earliest(self) -> ScheduledRequest | None:
        """The head that arrived first; None when the group is empty."""
        return self._by_arrival.first()

    def __len__(self) -> int:
        return self._heads

    def __repr__(self) -> str:
        where = "/".join(self.pools)
        return f"<HeadGroup {self.priority} {where} {self.prefill_class.name} {self._heads} heads>"


class HeadGroups:
    """All groups of a queue, and which of them may go to a pool."""

    def __init__(self) -> None:
        self._groups: dict[tuple[PriorityClass, tuple[str, ...], PrefillClass], HeadGroup] = {}
        self._at: dict[tuple[str, int], list[HeadGroup]] = {}

    def of(self, priority: PriorityClass, pools: tuple[str, ...], prefill_class: PrefillClass) -> HeadGroup:
        """One group; an empty one is made where there is none."""
        key = (priority, pools, prefill_class)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = HeadGroup(priority, pools, prefill_class)
            for rank, pool in enumerate(pools):
                self._at.setdefault((pool, rank), []).append(group)
        return group

    def at(self, pool: str, rank: int) -> Sequence[HeadGroup]:
        """The groups with `pool` at this place among their pools, empty ones with them."""
        return self._at.get((pool, rank), ())

    def clear(self) -> None:
        """Forget all groups."""
        self._groups.clear()
        self._at.clear()

    def __iter__(self) -> Iterator[HeadGroup]:
        return iter(self._groups.values())

    def __repr__(self) -> str:
        return f"<HeadGroups {[group for group in self if group]}>"
