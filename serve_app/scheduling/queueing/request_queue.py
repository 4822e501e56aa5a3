"""Where requests wait: by priority class and tenant, and there in sub_queues, each in its policy's order.

A sub_queue is a length queue, but for one set of pools and one prefill_class of prefill. Why sub_queues by set of pools: two
requests of one queue may differ in where they can go. With a sub_queue for each
combination, the head of a sub-queue speaks for all behind it, and asking "who may go to this pool?" never
scans the queue. There are at most four combinations (short, long, either with spill).

A sub_queue is a heap with lazy deletion: a request that leaves from the middle (cancelled, expired) is marked and
dropped when it comes to the top, and the heap is rebuilt when most of it is marked.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from serve_app.request import PriorityClass, Request, Usage
from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.queueing.fairness import FairnessMode, FairnessSettings, FairShares
from serve_app.scheduling.request import ScheduledRequest

# Came back from a replica, when it was told to, or neither; the policy's key, order of arrival, and a number
# that no other stay in a sub-queue has.
_Key = tuple[int, float, int, int]
_SubQueueKey = tuple[str, tuple[str, ...], int]


class _SubQueue:
    """Requests that share a length queue and the pools they may go to."""

    __slots__ = ("_heap", "_live", "name", "pools", "queue")

    def __init__(self, name: _SubQueueKey) -> None:
        self.name = name
        self.queue, self.pools, _ = name
        self._heap: list[tuple[_Key, ScheduledRequest]] = []
        self._live: dict[str, _Key] = {}

    def add(self, key: _Key, scheduled: ScheduledRequest) -> None:
        self._live[scheduled.request.request_id] = key
        heapq.heappush(self._heap, (key, scheduled))

    def remove(self, scheduled: ScheduledRequest) -> None:
        del self._live[scheduled.request.request_id]
        if len(self._heap) > 32 and len(self._heap) > 2 * len(self._live):
            self._heap = [item for item in self._heap if self._is_live(item)]
            heapq.heapify(self._heap)

    def head(self) -> ScheduledRequest | None:
        while self._heap:
            if self._is_live(self._heap[0]):
                return self._heap[0][1]
            heapq.heappop(self._heap)
        return None

    def _is_live(self, item: tuple[_Key, ScheduledRequest]) -> bool:
        # By key, not by request: one that left and came back stands in the heap twice.
        return self._live.get(item[1].request.request_id) == item[0]

    def __len__(self) -> int:
        return len(self._live)


class _TenantQueues:
    """What one tenant has waiting in one class."""

    __slots__ = ("sub_queues", "tokens", "waiting")

    def __init__(self) -> None:
        self.sub_queues: dict[_SubQueueKey, _SubQueue] = {}
        self.waiting = 0
        self.tokens = 0

    def sub_queue(self, name: _SubQueueKey) -> _SubQueue:
        sub_queue = self.sub_queues.get(name)
        if sub_queue is None:
            sub_queue = self.sub_queues[name] = _SubQueue(name)
        return sub_queue


class RequestQueue:
    """All waiting requests of a model.

    Attributes:
        shares: the books of each class's tenants, kept also where they decide nothing.
        waiting_tokens: expected tokens of all who wait.
        waiting_at: requests above the batch class that wait, by home pool.
    """

    def __init__(self, policy: OrderingPolicy, fairness: FairnessSettings) -> None:
        self._policy = policy
        self._fairness = fairness
        self._tenants: dict[PriorityClass, dict[str, _TenantQueues]] = {
            priority: {} for priority in PriorityClass
        }
        self._sub_queue_of: dict[str, _SubQueue] = {}
        self._queues: dict[str, int] = {}
        self._returned = 0
        self._stays = 0
        self._is_fair = fairness.mode is not FairnessMode.OFF
        self.shares = {priority: FairShares(fairness) for priority in PriorityClass}
        self.waiting_tokens = 0
        self.waiting_at: Counter[str] = Counter()

    def add(self, scheduled: ScheduledRequest) -> None:
        """Queue a request; one that came back from a replica goes to the front."""
        scheduled.length_queue = self._policy.queue_of(scheduled)
        request = scheduled.request
        tenants = self._tenants[request.priority]
        tenant = tenants.get(request.tenant)
        if tenant is None:
            tenant = tenants[request.tenant] = _TenantQueues()
            self.shares[request.priority].on_arrival(request.tenant)
        self._file(scheduled, tenant)
        scheduled.queued = True
        self._count(scheduled, tenant, 1)

    def remove(self, scheduled: ScheduledRequest) -> None:
        """Take a request out, wherever it stands."""
        request = scheduled.request
        sub_queue = self._sub_queue_of.pop(request.request_id)
        sub_queue.remove(scheduled)
        tenants = self._tenants[request.priority]
        tenant = tenants[request.tenant]
        if not sub_queue:
            del tenant.sub_queues[sub_queue.name]
        scheduled.queued = False
        self._count(scheduled, tenant, -1)
        if not tenant.waiting:
            del tenants[request.tenant]
            self.shares[request.priority].went(request.tenant)

    @property
    def promotes_claimed(self) -> bool:
        """Whether whoever comes back when it was told to goes before others.

        In the order of arrival it need not: nobody who comes later passes it.
        """
        return self._policy.promotes

    def heads(
        self, priority: PriorityClass, pool: str, now: float, *, at_home: bool
    ) -> Iterator[ScheduledRequest]:
        """Heads of the sub_queues of one class that may go to `pool`, in the order of tenants' turns and scores.

        Args:
            at_home: those whose home is `pool`; otherwise those that would spill into it.
        """
        tenants = self._tenants[priority]
        if not self._is_fair or len(tenants) == 1:
            yield from self._ranked(tenants.values(), pool, now, at_home=at_home)
            return
        for equals in list(self.shares[priority].turns()):
            yield from self._ranked([tenants[name] for name in equals], pool, now, at_home=at_home)

    def returned_heads(self, pool: str, *, at_home: bool) -> list[ScheduledRequest]:
        """Those who came back from a replica, most urgent class first, then the earliest."""
        if not self._returned:
            return []
        heads = [head for head in self._all_heads(pool, at_home=at_home) if head.returned]
        heads.sort(key=lambda head: (head.request.priority.rank, head.request.arrived_at, head.sequence))
        return heads

    def all_heads(self, pool: str, *, at_home: bool) -> list[ScheduledRequest]:
        """Heads of every sub-queue that may go to `pool`, in no order."""
        return list(self._all_heads(pool, at_home=at_home))

    def behind_requests(self, request: Request) -> float:
        """How far the request's tenant is behind its share, in average requests; 0 without fairness."""
        if not self._is_fair:
            return 0.0
        return self.shares[request.priority].behind_requests(request.tenant)

    def work_ahead(self, request: Request) -> int:
        """Expected tokens that will be served before a request that comes now.

        All of the classes above, all that its tenant has waiting already, and from every other tenant of its
        class as much as that tenant gets beside it; without fairness all of its class.
        """
        above = sum(
            tenant.tokens
            for priority, tenants in self._tenants.items()
            if priority.rank < request.priority.rank
            for tenant in tenants.values()
        )
        tenants = self._tenants[request.priority]
        if not self._is_fair:
            return above + sum(tenant.tokens for tenant in tenants.values())
        own = tenants[request.tenant].tokens if request.tenant in tenants else 0
        weight = self._fairness.weight(request.tenant)
        others = sum(
            min(tenant.tokens, own * self._fairness.weight(name) / weight + tenant.tokens / tenant.waiting)
            for name, tenant in tenants.items()
            if name != request.tenant
        )
        return above + own + round(others)

    def waiting_classes(self) -> list[PriorityClass]:
        """The classes in which anybody waits, the highest first."""
        return [priority for priority, tenants in self._tenants.items() if tenants]

    def waiting_of(self, priority: PriorityClass, tenant: str | None = None) -> int:
        """Requests that wait of a class, or of one of its tenants."""
        tenants = self._tenants[priority]
        if tenant is None:
            return sum(tenant.waiting for tenant in tenants.values())
        return tenants[tenant].waiting if tenant in tenants else 0

    def reroute(self, scheduled: ScheduledRequest, pools: tuple[str, ...]) -> None:
        """Let a waiting request go to other pools."""
        sub_queue = self._sub_queue_of[scheduled.request.request_id]
        sub_queue.remove(scheduled)
        tenant = self._tenants[scheduled.request.priority][scheduled.request.tenant]
        if not sub_queue:
            del tenant.sub_queues[sub_queue.name]
        self._count_at_home(scheduled, -1)
        scheduled.pools = pools
        self._count_at_home(scheduled, 1)
        self._file(scheduled, tenant)

    def charge(self, scheduled: ScheduledRequest) -> None:
        """Its tenant is being served: charge what the request is expected to cost."""
        scheduled.charged = self._fairness.expected_cost(scheduled.estimate, scheduled.cached_tokens)
        self._shares_of(scheduled).charge(scheduled.request.tenant, scheduled.charged)

    def settle(self, scheduled: ScheduledRequest, usage: Usage) -> None:
        """The engine has told what it really was."""
        self._correct(scheduled, self._fairness.real_cost(usage))

    def refund(self, scheduled: ScheduledRequest) -> None:
        """It came back unserved."""
        self._correct(scheduled, 0.0)

    def queue_anew(self) -> None:
        """Ask the policy again for everybody's queue; arrival and place among equals are kept."""
        requests = sorted(self, key=lambda scheduled: scheduled.sequence)
        # Tenants stay where they are all the while: who leaves and comes back is lifted.
        for tenants in self._tenants.values():
            for tenant in tenants.values():
                tenant.sub_queues.clear()
        self._queues.clear()
        for scheduled in requests:
            scheduled.length_queue = self._policy.queue_of(scheduled)
            self._queues[scheduled.length_queue] = self._queues.get(scheduled.length_queue, 0) + 1
            self._file(scheduled, self._tenants[scheduled.request.priority][scheduled.request.tenant])

    def queue_names(self) -> set[str]:
        """The length queues in which anybody waits."""
        return set(self._queues)

    def counts(self) -> dict[tuple[str, str], int]:
        """Number waiting by (home pool, length queue)."""
        counts: dict[tuple[str, str], int] = {}
        for sub_queue in self._lanes():
            name = (sub_queue.pools[0], sub_queue.queue)
            counts[name] = counts.get(name, 0) + len(sub_queue)
        return counts

    def sub_queues(self) -> Iterator[tuple[ScheduledRequest, int]]:
        """Every sub_queue's head, and how many wait in the sub_queue."""
        for sub_queue in self._lanes():
            head = sub_queue.head()
            if head is not None:
                yield head, len(sub_queue)

    def _correct(self, scheduled: ScheduledRequest, cost: float) -> None:
        self._shares_of(scheduled).correct(scheduled.request.tenant, cost - scheduled.charged)
        scheduled.charged = cost

    def _shares_of(self, scheduled: ScheduledRequest) -> FairShares:
        return self.shares[scheduled.request.priority]

    def _file(self, scheduled: ScheduledRequest, tenant: _TenantQueues) -> None:
        sub_queue = tenant.sub_queue((scheduled.length_queue, scheduled.pools, scheduled.prefill_class))
        self._stays += 1
        # Whoever was refused before and came back when it was told to came first.
        place = 0 if scheduled.returned else 1 if scheduled.claimed else 2
        sub_queue.add((place, self._policy.key(scheduled), scheduled.sequence, self._stays), scheduled)
        self._sub_queue_of[scheduled.request.request_id] = sub_queue

    def _ranked(
        self, tenants: Iterable[_TenantQueues], pool: str, now: float, *, at_home: bool
    ) -> list[ScheduledRequest]:
        heads = [
            head
            for tenant in tenants
            for sub_queue in tenant.sub_queues.values()
            if pool in sub_queue.pools
            and (sub_queue.pools[0] == pool) is at_home
            and (head := sub_queue.head()) is not None
        ]
        if len(heads) > 1:
            self._policy.rank(heads, now)
        return heads

    def _all_heads(self, pool: str, *, at_home: bool) -> Iterator[ScheduledRequest]:
        for sub_queue in self._lanes():
            if pool in sub_queue.pools and (sub_queue.pools[0] == pool) is at_home:
                head = sub_queue.head()
                if head is not None:
                    yield head

    def _lanes(self) -> Iterator[_SubQueue]:
        for tenants in self._tenants.values():
            for tenant in tenants.values():
                yield from tenant.sub_queues.values()

    def _count_at_home(self, scheduled: ScheduledRequest, by: int) -> None:
        if scheduled.request.priority is not PriorityClass.BATCH:
            self.waiting_at[scheduled.pools[0]] += by

    def _count(self, scheduled: ScheduledRequest, tenant: _TenantQueues, by: int) -> None:
        self._count_at_home(scheduled, by)
        tokens = by * scheduled.estimate.expected_tokens
        tenant.waiting += by
        tenant.tokens += tokens
        self.waiting_tokens += tokens
        self._returned += by * scheduled.returned
        count = self._queues.get(scheduled.length_queue, 0) + by
        if count:
            self._queues[scheduled.length_queue] = count
        else:
            del self._queues[scheduled.length_queue]

    def __iter__(self) -> Iterator[ScheduledRequest]:
        for sub_queue in self._lanes():
            for item in sub_queue._heap:  # noqa: SLF001 - a sub_queue is this file's own
                if sub_queue._is_live(item):  # noqa: SLF001
                    yield item[1]

    def __len__(self) -> int:
        return len(self._sub_queue_of)

    def __repr__(self) -> str:
        tenants = len({name for tenants in self._tenants.values() for name in tenants})
        return f"<RequestQueue {len(self)} of {tenants} tenants, {self.waiting_tokens} tokens>"
