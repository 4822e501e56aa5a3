"""The queue of a model: sub-queues in the policy's order, and their heads in groups.

- `RequestQueue`: queued requests by priority class, tenant and sub-queue.
- `SubQueue`: requests that the same replicas can serve, in the policy's order.
- `HeadGroups`: decide whether any of many heads may fit a replica, without examining each.

`RequestQueue`. There is a sub-queue for each length queue, pool preference, prefill class and destination,
because requests of one length queue may be restricted to different replicas. The head of a sub-queue
therefore represents all requests behind it, and the candidates for a pool are found without scanning the
queue. A pool preference is the home pool, then the other pools that can hold the request, in order; few of
them occur.

`SubQueue`. It is a heap with lazy deletion. A request that leaves from the middle (cancelled, expired) leaves
a stale entry, which is removed when it reaches the top. The heap is rebuilt when most entries are stale. The
sub-queue always knows its head, and registers each new one with its group.

`HeadGroups`. Whether a head fits depends on its class, pool preference, prefill class and tokens. The heads
of all sub-queues with the same class, pool preference and prefill class form a group, which knows the fewest
tokens of its heads. If these do not fit, none of its heads does. A group also knows the head that exceeds its
starvation bound first.

Both are heaps with lazy deletion: an entry is valid while its request is the head of its sub-queue.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from serve_app.core.accounting.waits import WaitAccounts
from serve_app.core.policies.protocol import OrderingPolicy
from serve_app.core.queueing.delay_bound import DelayBound, DelayBoundSettings
from serve_app.core.queueing.expiry import ExpiryHeap
from serve_app.core.queueing.fairness import (
    FairnessMode,
    FairnessSettings,
    FairShares,
    FairWork,
    TenantWeights,
)
from serve_app.core.queueing.floors import Floor, Floors, FloorSettings
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.routing.replica_state import PrefillClass, Running
from serve_app.request import ANYWHERE, Destination, PriorityClass, Request, Usage

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
        if scheduled.attempts.put_backs or scheduled.destination is not ANYWHERE:
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

    __slots__ = ("_heap", "_live", "first", "group", "key", "pools")

    def __init__(self, key: SubQueueKey, group: HeadGroup) -> None:
        self.key = key
        self.group = group
        self.pools = key[1]
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


# With at most this many candidate tenants, only they are sorted. With more, iterating over all tenants in the
# order of their shares finds a match sooner. A tenant counts once for each group.
_FEW_TENANTS = 32


@dataclass(slots=True)
class WaitingWork:
    """The work of some queued requests.

    Attributes:
        tokens: expected tokens of prompts and outputs.
        least_output_tokens: lower estimate of the output, see `TokenEstimate`.
    """

    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    least_output_tokens: int = 0

    def add(self, estimate: TokenEstimate, by: int = 1) -> None:
        """Add the work of one request, or subtract it (`by` of -1)."""
        self.requests += by
        self.tokens += by * estimate.expected_tokens
        self.prompt_tokens += by * estimate.expected_prompt_tokens
        self.least_output_tokens += by * estimate.least_output_tokens

    def merge(self, other: "WaitingWork") -> None:
        """Add the work in `other`."""
        self.requests += other.requests
        self.tokens += other.tokens
        self.prompt_tokens += other.prompt_tokens
        self.least_output_tokens += other.least_output_tokens


def _backoff_until(scheduled: ScheduledRequest) -> float:
    return scheduled.attempts.backoff_until


@dataclass(slots=True)
class HeadQuery:
    """A query for heads.

    Attributes:
        groups: the groups of `priority` whose heads are requested.
        all_groups: all groups of the same class and position, `groups` included; heads of the others may be
            added.
    """

    priority: PriorityClass
    groups: Sequence[HeadGroup]
    all_groups: Sequence[HeadGroup] = ()


class RequestQueue:
    """All queued requests of a model.

    Attributes:
        is_fair: whether shares take precedence over scores.
        shares: the tenants' shares by class; counted even if fairness is off.
        floors: service that precedes the shares.
        waiting: number of queued requests; faster to read than `len`.
        waiting_tokens: expected tokens of all queued requests.
        non_batch_work: work of queued requests above the batch class, by home pool.
        waiting_by_key: queued requests by the id of their API key.
        work: queued work by pool preference.
        restricted: queued requests that only some replicas of their pools can serve.
        backoff: requests in backoff, by id. They are in no sub-queue.
        parked: requests that wait for room for their context, by id. They are in no sub-queue.
        with_targets: number of queued requests with a latency target.
    """

    def __init__(
        self,
        policy: OrderingPolicy,
        fairness: FairnessSettings,
        delay_bound: DelayBoundSettings | None = None,
        floors: FloorSettings | None = None,
    ) -> None:
        self.policy = policy
        self._bound = delay_bound or DelayBoundSettings()
        # By class and home pool, because one pool's backlog is unrelated to turns in another pool.
        self._delays: defaultdict[tuple[PriorityClass, str], DelayBound] = defaultdict(
            lambda: DelayBound(self._bound)
        )
        self.fairness = fairness
        self._tenants: dict[PriorityClass, dict[str, TenantQueues]] = {
            priority: {} for priority in PriorityClass
        }
        self._sub_queue_of: dict[str, SubQueue] = {}
        self._waiting_by_queue: dict[str, int] = {}
        self._put_backs: dict[str, ScheduledRequest] = {}
        self._insertions = 0
        self._now = 0.0
        self.backoff: dict[str, ScheduledRequest] = {}
        self._backoff_ends = ExpiryHeap(_backoff_until)
        self.parked: dict[str, ScheduledRequest] = {}
        self.groups = HeadGroups()
        self.waits = WaitAccounts()
        self.is_fair = fairness.mode is not FairnessMode.OFF
        self.weights = TenantWeights(fairness)
        self._fair_work = {
            priority: FairWork(tenants, self.weights) for priority, tenants in self._tenants.items()
        }
        self.shares = {priority: FairShares(fairness, self.weights) for priority in PriorityClass}
        self.floors = Floors(floors or FloorSettings(), counts_tokens=fairness.mode is FairnessMode.TOKENS)
        self.waiting = 0
        self.waiting_tokens = 0
        self.restricted = 0
        self.with_targets = 0
        self.non_batch_work: defaultdict[str, WaitingWork] = defaultdict(WaitingWork)
        self.waiting_by_key: Counter[str] = Counter()
        self.work: defaultdict[tuple[str, ...], WaitingWork] = defaultdict(WaitingWork)

    def set_time(self, now: float) -> None:
        """Set the current time, in seconds on the scheduler's clock."""
        self._now = now

    def add(self, scheduled: ScheduledRequest) -> None:
        """Queue a request: first in its sub-queue if it returned, in none while in backoff or parked."""
        scheduled.length_queue = self.policy.queue_of(scheduled)
        request = scheduled.request
        self._observe_key(request)
        tenants = self._tenants[request.priority]
        tenant = tenants.get(request.tenant)
        if tenant is None:
            tenant = tenants[request.tenant] = TenantQueues()
            self.shares[request.priority].on_backlog(request.tenant)
        if self.floors.are_used:
            self.floors.on_backlog(request, self._now)
        self._delay_bound(scheduled).join(scheduled)
        scheduled.queued = True
        self._insert_or_hold(scheduled, tenant)
        self._count(scheduled, tenant, 1)
        self.waits.add(scheduled)

    def account_immediate(self, scheduled: ScheduledRequest) -> None:
        """Apply the effects of `add` and `remove` for a request dispatched on arrival while nothing waits."""
        scheduled.length_queue = self.policy.queue_of(scheduled)
        self.shares[scheduled.request.priority].on_immediate_dispatch(scheduled.request.tenant)
        if scheduled.prefill_class is not PrefillClass.SHORT:
            bound = self._delay_bound(scheduled)
            bound.join(scheduled)
            bound.leave(scheduled, self._now)

    def remove(self, scheduled: ScheduledRequest) -> None:
        """Remove a request, wherever it is."""
        request = scheduled.request
        tenants = self._tenants[request.priority]
        tenant = tenants[request.tenant]
        self._detach(scheduled, tenant)
        self._delay_bound(scheduled).leave(scheduled, self._now)
        self.waits.remove(scheduled, self._now)
        scheduled.queued = False
        self._count(scheduled, tenant, -1)
        if not tenant.waiting:
            del tenants[request.tenant]
            self.shares[request.priority].on_idle(request.tenant)
            if self.floors.are_used:
                is_idle = all(request.tenant not in others for others in self._tenants.values())
                self.floors.on_idle(request, tenant=is_idle, priority=not tenants)

    def next_backoff_end(self) -> float | None:
        """Return the next end of a backoff, or None."""
        return self._backoff_ends.next_at()

    def end_backoffs(self, now: float) -> None:
        """Move the requests whose backoff has ended to their sub-queues."""
        for scheduled in self._backoff_ends.pop_expired(now):
            if self.backoff.pop(scheduled.request.request_id, None) is None:
                continue
            scheduled.attempts = replace(scheduled.attempts, backoff_until=0.0)
            tenant = self._tenants[scheduled.request.priority][scheduled.request.tenant]
            self._insert_or_hold(scheduled, tenant)
            self.waits.remove(scheduled, now)
            self.waits.add(scheduled)

    def turns(self, query: HeadQuery, now: float) -> Iterator[list[ScheduledRequest]]:
        """Yield the heads of each turn in the order of scores. Turns follow the tenants' shares."""
        priority, tenants = query.priority, self._tenants[query.priority]
        if not query.groups:
            return
        if not self.is_fair or len(tenants) == 1:
            yield self._ranked(tenants, query, now)
            return
        for equals in self.shares[priority].order(_few_tenants(query.groups)):
            yield self._ranked(equals, query, now)

    def due_floors(self, now: float) -> list[Floor]:
        """Return the floors of tenants and classes that are behind, the one behind most first."""
        return self.floors.due(now, others_wait=self._others_wait()) if self.floors.are_used else []

    def heads_of_floor(
        self, floor: Floor, pool: str, position: int, now: float
    ) -> Iterator[ScheduledRequest]:
        """Yield the heads of a tenant or class that may go to `pool`, the highest class first."""
        groups = self.groups.at(pool, position)
        for priority in self.waiting_classes() if floor.priority is None else (floor.priority,):
            query = HeadQuery(priority, [group for group in groups if group.priority is priority])
            if floor.tenant is None:
                for turn in self.turns(query, now):
                    yield from turn
            elif floor.tenant in self._tenants[priority]:
                yield from self._ranked((floor.tenant,), query, now)

    def _others_wait(self) -> bool:
        """Return whether requests without a floor are queued."""
        floors = self.floors
        return any(
            len(tenants) > sum(floor.tenant in tenants for floor in floors)
            for priority, tenants in self._tenants.items()
            if not floors.has_class(priority)
        )

    @property
    def has_put_backs(self) -> bool:
        """True if a put-back is queued that precedes all other requests."""
        return bool(self._put_backs)

    def put_back_heads(self, pool: str, *, position: int) -> list[ScheduledRequest]:
        """Return such put-backs that may go to `pool`, the highest class first, then the earliest."""
        heads = self._heads_among(self._put_backs.values(), pool, position)
        heads.sort(key=lambda head: (head.request.priority.rank, head.request.arrived_at, head.sequence))
        return heads

    def starved_classes(self, now: float) -> set[PriorityClass]:
        """Return the classes with a request that has waited longer than its starvation bound."""
        if not self.waiting:
            return set()
        return {group.priority for group in self.groups if group.first_starved(now) is not None}

    def tenant_queues(self, request: Request) -> TenantQueues | None:
        """Return the queues of a request's tenant in its class, or None if none of its requests wait."""
        return self._tenants[request.priority].get(request.tenant)

    def deficits(self, priority: PriorityClass, tenants: Container[str]) -> dict[str, float]:
        """Return how many average requests some tenants of a class are owed, see `FairShares`."""
        owed = self.shares[priority].owed_requests() if self.is_fair else {}
        return {name: deficit for name, deficit in owed.items() if name in tenants}

    def deficit_requests(self, request: Request) -> float:
        """Return how many average requests the tenant is owed; always 0 without fairness."""
        if not self.is_fair:
            return 0.0
        return self.shares[request.priority].owed_requests().get(request.tenant, 0.0)

    def waiting_by_home(self) -> Counter[str]:
        """Return the number of queued requests by home pool."""
        waiting = Counter[str]()
        for pools, work in self.work.items():
            waiting[pools[0]] += work.requests
        return waiting

    def work_ahead(self, request: Request) -> int:
        """Return the expected tokens that are served before a request that arrives now.

        Includes all work of higher classes and all queued work of its tenant. For each other tenant of its
        class, includes the work that tenant receives under fair shares until this request is served; without
        fairness, all of its work.
        """
        ahead = 0
        for priority, work in self._fair_work.items():
            if priority is request.priority:
                return ahead + (work.ahead(request.tenant) if self.is_fair else work.tokens)
            ahead += work.tokens
        return ahead

    def service_of(self, tenant: str) -> float:
        """Return the expected service of all queued requests of a tenant."""
        return sum(shares.queued(tenant) for shares in self.shares.values())

    def spill_pools(self, pools: Sequence[str]) -> list[list[str]]:
        """Return the pools that are second in some queued request's preference, those that are third, etc."""
        found: list[set[str]] = []
        for preference, waiting in self.work.items():
            if waiting.requests:
                while len(found) < len(preference) - 1:
                    found.append(set())
                for further, pool in zip(found, preference[1:], strict=False):
                    further.add(pool)
        return [[pool for pool in pools if pool in further] for further in found]

    def waiting_classes(self) -> list[PriorityClass]:
        """Return the classes with queued requests, the highest first."""
        return [priority for priority, tenants in self._tenants.items() if tenants]

    def waiting_of(self, priority: PriorityClass, tenant: str) -> int:
        """Return the number of queued requests of one tenant in one class."""
        tenants = self._tenants[priority]
        return tenants[tenant].waiting if tenant in tenants else 0

    def reroute(self, scheduled: ScheduledRequest, pools: tuple[str, ...]) -> None:
        """Change the pools of a queued request."""
        tenant = self._tenants[scheduled.request.priority][scheduled.request.tenant]
        self._detach(scheduled, tenant)
        self._count_work(scheduled, -1)
        self._delay_bound(scheduled).leave(scheduled, self._now)
        self.waits.remove(scheduled, self._now)
        self.waits.add(scheduled)
        scheduled.pools = pools
        self._delay_bound(scheduled).join(scheduled)
        self._count_work(scheduled, 1)
        self._insert_or_hold(scheduled, tenant)

    def bind(self, scheduled: ScheduledRequest, replica_id: str | None) -> None:
        """Bind a queued turn of a program to a replica, or to none; it is no longer parked."""
        assert scheduled.turn is not None, "only turns are bound"
        tenant = self._tenants[scheduled.request.priority][scheduled.request.tenant]
        self._detach(scheduled, tenant)
        self.waits.remove(scheduled, self._now)
        scheduled.turn.resident_on, scheduled.turn.parked = replica_id, False
        self.waits.add(scheduled)
        self._insert_or_hold(scheduled, tenant)

    def lose_precedence(self, scheduled: ScheduledRequest) -> None:
        """Queue a request whose latest dispatch has passed like one without a latency target."""
        assert scheduled.target is not None, "it has a target"
        tenant = self._tenants[scheduled.request.priority][scheduled.request.tenant]
        self._detach(scheduled, tenant)
        scheduled.target.is_late = True
        self._insert_or_hold(scheduled, tenant)

    def charge(self, scheduled: ScheduledRequest) -> None:
        """Charge the tenant the expected service of a request at its dispatch."""
        request = scheduled.request
        self._observe_key(request)
        scheduled.charged = self.fairness.expected_service(scheduled.estimate, scheduled.cached_tokens)
        self._shares_of(scheduled).charge(request.tenant, scheduled.charged)
        if self.floors.are_used:
            self.floors.charge(
                request,
                scheduled.charged,
                self._now,
                by_floor=_is_by_floor(scheduled.running),
                others_wait=self._others_wait(),
            )

    def settle(self, scheduled: ScheduledRequest, usage: Usage) -> None:
        """Correct the charge by the engine's token counts."""
        self._correct(scheduled, self.fairness.actual_service(usage), scheduled.running)

    def refund(self, scheduled: ScheduledRequest, running: Running) -> None:
        """Refund the charge of a request that was put back unserved."""
        self._correct(scheduled, 0.0, running)

    def reassign_length_queues(self) -> None:
        """Reassign every request to a length queue of the policy. Order of arrival is preserved."""
        requests = sorted(self, key=lambda scheduled: scheduled.sequence)
        # Tenants remain backlogged: the counter of one that leaves and returns would be raised.
        for tenants in self._tenants.values():
            for tenant in tenants.values():
                tenant.sub_queues.clear()
        self.groups.clear()
        self._waiting_by_queue.clear()
        for scheduled in requests:
            name = scheduled.length_queue = self.policy.queue_of(scheduled)
            self._waiting_by_queue[name] = self._waiting_by_queue.get(name, 0) + 1
            if scheduled.request.request_id in self.backoff or scheduled.parked:
                continue
            self._insert(scheduled, self._tenants[scheduled.request.priority][scheduled.request.tenant])

    def queue_names(self) -> set[str]:
        """Return the names of the non-empty length queues."""
        return set(self._waiting_by_queue)

    def sub_queue_heads(self) -> Iterator[tuple[ScheduledRequest, int]]:
        """Yield the head of every sub-queue and its number of requests."""
        for sub_queue in self.sub_queues():
            if sub_queue.first is not None:
                yield sub_queue.first, len(sub_queue)

    def _correct(self, scheduled: ScheduledRequest, cost: float, running: Running | None) -> None:
        difference = cost - scheduled.charged
        self._shares_of(scheduled).correct(scheduled.request.tenant, difference)
        if _is_by_floor(running):
            self.floors.correct(scheduled.request, difference, self._now)
        scheduled.charged = cost

    def _shares_of(self, scheduled: ScheduledRequest) -> FairShares:
        return self.shares[scheduled.request.priority]

    def retune(self, settings: DelayBoundSettings) -> None:
        """Apply another bound on delay."""
        self._bound = settings
        for delay in self._delays.values():
            delay.settings = settings

    def _delay_bound(self, scheduled: ScheduledRequest) -> DelayBound:
        return self._delays[scheduled.request.priority, scheduled.pools[0]]

    def _insert_or_hold(self, scheduled: ScheduledRequest, tenant: TenantQueues) -> None:
        if scheduled.attempts.backoff_until:
            self.backoff[scheduled.request.request_id] = scheduled
            self._backoff_ends.add(scheduled)
        elif scheduled.parked:
            self.parked[scheduled.request.request_id] = scheduled
        else:
            self._insert(scheduled, tenant)

    def _insert(self, scheduled: ScheduledRequest, tenant: TenantQueues) -> None:
        request, pools, prefill_class = scheduled.request, scheduled.pools, scheduled.prefill_class
        target = scheduled.target
        if target is not None and not target.is_ordered:
            target = None
        key = (scheduled.length_queue, pools, prefill_class, scheduled.destination, target is not None)
        sub_queue = tenant.sub_queues.get(key)
        if sub_queue is None:
            group = self.groups.of(request.priority, pools, prefill_class)
            sub_queue = tenant.sub_queues[key] = SubQueue(key, group)
            group.add_sub_queue(request.tenant, sub_queue)
        self._insertions += 1
        # A request that claimed its reservation arrived before the others.
        precedence = 0 if scheduled.attempts.returned else 1 if scheduled.claimed else 2
        place = self.policy.key(scheduled) if target is None else target.latest_at
        order = (precedence, place, scheduled.sequence, self._insertions)
        sub_queue.add(order, scheduled)
        self._sub_queue_of[request.request_id] = sub_queue

    def _detach(self, scheduled: ScheduledRequest, tenant: TenantQueues) -> None:
        request_id = scheduled.request.request_id
        if self.backoff.pop(request_id, None) or self.parked.pop(request_id, None):
            return
        sub_queue = self._sub_queue_of.pop(request_id)
        sub_queue.remove(scheduled)
        if not sub_queue:
            del tenant.sub_queues[sub_queue.key]
            sub_queue.group.remove_sub_queue(scheduled.request.tenant, sub_queue)

    def _ranked(self, tenants: Iterable[str], query: HeadQuery, now: float) -> list[ScheduledRequest]:
        """Return the heads that `query` selects of some tenants, in the order of scores."""
        heads: list[ScheduledRequest] = []
        for group in query.groups:
            of_tenants = group.tenants
            for tenant in tenants:
                if tenant in of_tenants:
                    heads += group.heads_of(tenant)
        if not heads:
            return heads
        heads += self._related_heads(tenants, query, now)
        if len(heads) > 1:
            self.policy.rank(heads, now)
            if self.policy.bounds_delay:
                heads = self._within_bounds(heads, now)
            if self.with_targets:
                heads = _urgent_first(heads, now)
        return heads

    def _related_heads(self, tenants: Iterable[str], query: HeadQuery, now: float) -> list[ScheduledRequest]:
        """Return heads of other groups if the order of the selected heads depends on them."""
        policy = self.policy
        if not (policy.omits_heads or policy.bounds_delay):
            return []
        others = [group for group in query.all_groups if group not in query.groups]
        rest = [head for group in others for tenant in tenants for head in group.heads_of(tenant)]
        if policy.omits_heads or any(self._delay_bound(head).is_overdue(head, now) for head in rest):
            return rest
        return []

    def _within_bounds(self, heads: list[ScheduledRequest], now: float) -> list[ScheduledRequest]:
        """Reorder the heads of each home pool by its delay bound. Each position retains its home pool."""
        home = heads[0].pools[0]
        if all(head.pools[0] == home for head in heads):
            return self._delay_bound(heads[0]).arrange(heads, now)
        of_home: defaultdict[str, list[ScheduledRequest]] = defaultdict(list)
        for head in heads:
            of_home[head.pools[0]].append(head)
        arranged = {
            name: iter(self._delay_bound(members[0]).arrange(members, now))
            for name, members in of_home.items()
        }
        return [next(arranged[head.pools[0]]) for head in heads]

    def _heads_among(
        self, requests: Iterable[ScheduledRequest], pool: str, position: int
    ) -> list[ScheduledRequest]:
        """Return those of some queued requests that are heads of their sub-queues and may go to `pool`."""
        return [
            each
            for each in requests
            if each.pools[position : position + 1] == (pool,)
            and (sub_queue := self._sub_queue_of.get(each.request.request_id)) is not None
            and sub_queue.first is each
        ]

    def sub_queues(self) -> Iterator[SubQueue]:
        """Yield all sub-queues, unordered."""
        for tenants in self._tenants.values():
            for tenant in tenants.values():
                yield from tenant.sub_queues.values()

    def _observe_key(self, request: Request) -> None:
        """Learn the weight and floor sent with a request. A weight affects all queued work of its tenant."""
        key = request.submission.key
        per_s = None if key is None else key.floor_tokens_per_s
        if per_s is not None or self.floors.are_used:
            self.floors.observe(request.tenant, per_s, self._now)
        if self.weights.observe(request):
            self.weights.forget_idle(self._tenants.values())
            for work in self._fair_work.values():
                work.update(request.tenant, 0)
            for shares in self.shares.values():
                shares.on_weight()

    def _count_work(self, scheduled: ScheduledRequest, by: int) -> None:
        self.work[scheduled.pools].add(scheduled.estimate, by)
        if scheduled.request.priority is not PriorityClass.BATCH:
            self.non_batch_work[scheduled.pools[0]].add(scheduled.estimate, by)

    def _count(self, scheduled: ScheduledRequest, tenant: TenantQueues, by: int) -> None:
        self._count_work(scheduled, by)
        tokens = by * scheduled.estimate.expected_tokens
        self.waiting += by
        tenant.waiting += by
        tenant.tokens += tokens
        service = by * self.fairness.expected_service(scheduled.estimate)
        self._shares_of(scheduled).on_queued(scheduled.request.tenant, service)
        self.waiting_tokens += tokens
        self.restricted += by * (scheduled.request.destination is not ANYWHERE)
        self.with_targets += by * (scheduled.target is not None)
        self._fair_work[scheduled.request.priority].update(scheduled.request.tenant, tokens)
        if scheduled.attempts.returned:
            _update_index(self._put_backs, scheduled, by)
        if (key := scheduled.request.submission.key) is not None:
            self.waiting_by_key[key.key_id] += by
            if not self.waiting_by_key[key.key_id]:
                del self.waiting_by_key[key.key_id]
        name = scheduled.length_queue
        self._waiting_by_queue[name] = self._waiting_by_queue.get(name, 0) + by
        if not self._waiting_by_queue[name]:
            del self._waiting_by_queue[name]

    def __iter__(self) -> Iterator[ScheduledRequest]:
        for sub_queue in self.sub_queues():
            yield from sub_queue
        yield from self.backoff.values()
        yield from self.parked.values()

    def __len__(self) -> int:
        return self.waiting

    def __repr__(self) -> str:
        tenants = len({name for tenants in self._tenants.values() for name in tenants})
        return f"<RequestQueue {len(self)} of {tenants} tenants, {self.waiting_tokens} tokens>"


def _is_by_floor(running: Running | None) -> bool:
    return running is not None and running.by_floor


def _few_tenants(groups: Sequence[HeadGroup]) -> set[str] | None:
    """Return the tenants with heads in some groups, or None if there are many."""
    if sum(len(group.tenants) for group in groups) > _FEW_TENANTS:
        return None
    return set().union(*(group.tenants for group in groups))


def _urgent_first(heads: list[ScheduledRequest], now: float) -> list[ScheduledRequest]:
    """Return the heads, first those that would otherwise miss their latency target."""
    urgent = [
        (head.target.latest_at, head.sequence, head)
        for head in heads
        if head.target is not None and head.target.urgent_at <= now and head.target.is_ordered
    ]
    if not urgent:
        return heads
    first = [head for _, _, head in sorted(urgent)]
    return first + [head for head in heads if head not in first]


def _update_index(requests: dict[str, ScheduledRequest], scheduled: ScheduledRequest, by: int) -> None:
    """Add (1) or remove (-1) a request."""
    if by > 0:
        requests[scheduled.request.request_id] = scheduled
    else:
        del requests[scheduled.request.request_id]
