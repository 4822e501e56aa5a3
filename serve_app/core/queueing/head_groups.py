"""Groups of heads: decide whether any of many heads may fit a replica, without examining each.

Whether a head fits depends on its class, pool preference, prefill class and tokens. The heads of all
sub-queues with the same class, pool preference and prefill class form a group, which knows the fewest
tokens of its heads. If these do not fit, none of its heads does. A group also knows the head that exceeds
its starvation bound first.

Both are heaps with lazy deletion: an entry is valid while its request is the head of its sub-queue.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica_state import PrefillClass
from serve_app.request import ANYWHERE, PriorityClass

if TYPE_CHECKING:
    from serve_app.core.queueing.sub_queue import SubQueue

# Heap entries for each sub-queue above which invalid ones are removed.
_MAX_ENTRIES_PER_HEAD, _MIN_ENTRIES = 4, 64

_Entry = tuple[tuple[float, int], int, ScheduledRequest, "SubQueue"]


class _HeadHeap:
    """A heap of heads by some key."""

    __slots__ = ("_heap", "_pushed")

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._pushed = 0

    def push(self, key: tuple[float, int], head: ScheduledRequest, sub_queue: "SubQueue", heads: int) -> None:
        """Add a head. `heads` is the current number of heads in the group."""
        self._pushed += 1
        heapq.heappush(self._heap, (key, self._pushed, head, sub_queue))
        if len(self._heap) > max(_MIN_ENTRIES, _MAX_ENTRIES_PER_HEAD * heads):
            self._heap = [entry for entry in self._heap if entry[3].first is entry[2]]
            heapq.heapify(self._heap)

    def first(self) -> ScheduledRequest | None:
        """Return the head with the lowest key, or None if there is none."""
        heap = self._heap
        while heap:
            _, _, head, sub_queue = heap[0]
            if sub_queue.first is head:
                return head
            heapq.heappop(heap)
        return None


class HeadGroup:
    """The heads of one class, pool preference and prefill class.

    Attributes:
        tenants: the sub-queues of each tenant in the group.
        restricted: number of requests that cannot use every replica of their pools: put-back or bound to a
            destination.
        cached: number of requests with a part of their prompt cached on a replica, which may count as shorter
            ones there.
    """

    __slots__ = (
        "_by_starvation",
        "_by_tokens",
        "_heads",
        "cached",
        "pools",
        "prefill_class",
        "priority",
        "restricted",
        "tenants",
    )

    def __init__(self, priority: PriorityClass, pools: tuple[str, ...], prefill_class: PrefillClass) -> None:
        self.priority = priority
        self.pools = pools
        self.prefill_class = prefill_class
        self.tenants: dict[str, list[SubQueue]] = {}
        self.restricted = 0
        self.cached = 0
        self._heads = 0
        self._by_tokens = _HeadHeap()
        self._by_starvation = _HeadHeap()

    def add_sub_queue(self, tenant: str, sub_queue: "SubQueue") -> None:
        """Add a sub-queue of a tenant."""
        self.tenants.setdefault(tenant, []).append(sub_queue)
        self._heads += 1

    def remove_sub_queue(self, tenant: str, sub_queue: "SubQueue") -> None:
        """Remove a tenant's sub-queue that has become empty."""
        self._heads -= 1
        of_tenant = self.tenants[tenant]
        of_tenant.remove(sub_queue)
        if not of_tenant:
            del self.tenants[tenant]

    def heads_of(self, tenant: str) -> list[ScheduledRequest]:
        """Return the heads of one tenant in the group, unordered."""
        sub_queues = self.tenants.get(tenant, ())
        return [head for sub_queue in sub_queues if (head := sub_queue.first) is not None]

    def count(self, scheduled: ScheduledRequest, by: int) -> None:
        """Count a request that has joined (1) or left (-1) one of the sub-queues."""
        if scheduled.put_backs or scheduled.destination is not ANYWHERE:
            self.restricted += by
        if scheduled.cached_tokens:
            self.cached += by

    def on_head(self, head: ScheduledRequest, sub_queue: "SubQueue") -> None:
        """Register the new head of a sub-queue."""
        tokens = (head.estimate.expected_tokens, head.sequence)
        self._by_tokens.push(tokens, head, sub_queue, self._heads)
        self._by_starvation.push((head.starved_at, head.sequence), head, sub_queue, self._heads)

    def smallest(self) -> ScheduledRequest | None:
        """Return the head with the fewest expected tokens, or None if the group is empty."""
        return self._by_tokens.first()

    def first_starved(self, now: float) -> ScheduledRequest | None:
        """Return the head that has exceeded its starvation bound first, or None."""
        first = self._by_starvation.first()
        return first if first is not None and now > first.starved_at else None

    def __len__(self) -> int:
        return self._heads

    def __repr__(self) -> str:
        where = "/".join(self.pools)
        return f"<HeadGroup {self.priority} {where} {self.prefill_class.name} {self._heads} heads>"


class HeadGroups:
    """All groups of a queue, indexed by the pools that may serve them."""

    def __init__(self) -> None:
        self._groups: dict[tuple[PriorityClass, tuple[str, ...], PrefillClass], HeadGroup] = {}
        self._at: dict[tuple[str, int], list[HeadGroup]] = {}

    def of(self, priority: PriorityClass, pools: tuple[str, ...], prefill_class: PrefillClass) -> HeadGroup:
        """Return a group, created if it does not exist."""
        key = (priority, pools, prefill_class)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = HeadGroup(priority, pools, prefill_class)
            for position, pool in enumerate(pools):
                self._at.setdefault((pool, position), []).append(group)
        return group

    def at(self, pool: str, position: int) -> Sequence[HeadGroup]:
        """Return the groups with `pool` at this position of their preference, including empty ones."""
        return self._at.get((pool, position), ())

    def clear(self) -> None:
        """Remove all groups."""
        self._groups.clear()
        self._at.clear()

    def __iter__(self) -> Iterator[HeadGroup]:
        return iter(self._groups.values())

    def __repr__(self) -> str:
        return f"<HeadGroups {[group for group in self if group]}>"
