"""The dispatcher: chooses the next request in the order of service, and the replica for it.

1. A request that came back from a replica: it had been dispatched in time.
2. A request that has waited past its class's bound, or holds a retry reservation, at a bounded rate
   (`starvation`). If it fits nowhere, capacity is kept for it.
3. A lower class that is owed its floor share (`starvation`).
4. The classes in their order; inside a class the tenants in the order of their shares (`fairness`); among
   tenants with equal shares, and inside each of them, the heads of the sub-queues by the policy's score,
   within the bound on delay (`delay_bound`). Capacity is kept for a tenant that is clearly behind, too.

The first in this order that fits a replica of the pool is dispatched. Batch work fits only where the engine's
own queue is empty, unless it is owed its floor share.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from serve_app.core.dispatch.starvation import CapacityReservations, ClassFloors, Promotion
from serve_app.core.isolation import PrefillIsolation
from serve_app.core.policies.protocol import OrderingPolicy
from serve_app.core.queueing.expiry import ExpiryHeap
from serve_app.core.queueing.request_queue import HeadGroup, HeadQuery, RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import CapacityQuery, ReplicaLedger
from serve_app.core.routing.prefix import PrefixAffinity, PrefixQuery
from serve_app.core.routing.replica_state import Hold, PrefillClass, ReplicaState
from serve_app.core.settings import SchedulerSettings
from serve_app.request import ANYWHERE, PriorityClass


class Placement:
    """Chooses the replica for a request that is about to be dispatched."""

    def __init__(self, ledger: ReplicaLedger, isolation: PrefillIsolation, affinity: PrefixAffinity) -> None:
        self._ledger = ledger
        self.isolation = isolation
        self._affinity = affinity

    def choose(
        self, head: ScheduledRequest, by_load: ReplicaState | None, query: CapacityQuery, now: float
    ) -> tuple[ReplicaState, Hold] | None:
        """The replica and what to hold of it; None when no replica may take the request.

        Args:
            by_load: the best for its whole prefill; None when isolation or load excludes all.
            query: what it needs with its whole prefill.
        """
        if by_load is None and not (head.prefill_class is not PrefillClass.SHORT and head.cached_tokens):
            return None
        estimate = head.estimate
        if by_load is not None and not head.request.submission.prefix:
            # Nothing of it can be cached anywhere.
            prompt_tokens = estimate.expected_prompt_tokens
            return by_load, Hold(query.tokens, head.prefill_class, prompt_tokens, query.quarantined)

        def admissible(replica_id: str, prefill_tokens: int) -> ReplicaState | None:
            limits = self.isolation.limits(self._prefill_class(head, prefill_tokens), now)
            replica = self._ledger.get(replica_id)
            fits = replica is not None and self._ledger.open.fits(
                replica, replace(query, long_limits=limits), now
            )
            return replica if fits else None

        prompt = PrefixQuery(head.request, estimate.expected_prompt_tokens, estimate.expected_output_tokens)
        found = self._affinity.choose(by_load, prompt, admissible)
        if found is None:
            return None
        prefill_class = self._prefill_class(head, found.prefill_tokens)
        return found.replica, Hold(query.tokens, prefill_class, found.prefill_tokens, query.quarantined)

    def _prefill_class(self, head: ScheduledRequest, prefill_tokens: int) -> PrefillClass:
        if prefill_tokens >= head.estimate.expected_prompt_tokens:
            return head.prefill_class
        # Boundaries may have changed since its admission, but a cached prefix only shortens it.
        return min(head.prefill_class, self.isolation.prefill_class(prefill_tokens))


# Openings: which heads may fit a pool at all, so that the others need not be looked at.
#
# Of each group of heads (`queueing.head_groups`) the least demanding is tried: the fewest tokens of any head,
# under the limits of the tenant that may go beyond them. When no replica takes that, it takes no head of the
# group. So a search among heads that all have to wait costs the same for one tenant and for ten thousand.
#
# It may name a group of which no head fits after all, and never leaves one out that has such a head, or one
# for which capacity would be reserved.


# A tenant that is behind all others by so many average requests has capacity kept for its next one. Where
# tenants are alike, one is seldom that far behind.
OWED_REQUESTS = 0.5
# To look at so few costs no more than to try the groups.
_FEW_HEADS = 3


class Openings:
    """Tries the least demanding head of each group."""

    def __init__(
        self, queue: RequestQueue, ledger: ReplicaLedger, isolation: PrefillIsolation, floors: ClassFloors
    ) -> None:
        self._queue = queue
        self._ledger = ledger
        self._isolation = isolation
        self._floors = floors

    def groups(self, pool: str, now: float, *, rank: int, reserves: bool) -> list[HeadGroup]:
        """The groups that may have a head that fits a replica of `pool`.

        Args:
            rank: the place of `pool` among the pools of a request: 0 is its home.
            reserves: capacity is reserved for a tenant that is owed it, if its head lacks that.
        """
        limit = self._ledger.context_limit(pool)
        groups = [group for group in self._queue.groups.at(pool, rank) if group]
        if limit is None:
            return []
        if sum(map(len, groups)) <= _FEW_HEADS:
            return groups
        # Whose turn has come before that of the higher classes, need not find an empty queue.
        batch_is_first = self._queue.has_returned or PriorityClass.BATCH in self._floors.owed()
        return [
            group
            for group in groups
            if self._may_fit(group, pool, limit, now, needs_empty=not batch_is_first)
            or (reserves and self._is_owed(group, pool, limit, now))
        ]

    def _may_fit(self, group: HeadGroup, pool: str, limit: int, now: float, *, needs_empty: bool) -> bool:
        if group.choosy:
            # Which replicas they want is looked up without the heaps.
            return True
        smallest = group.smallest()
        if smallest is None:
            return False
        limits: tuple[int, ...] = ()
        if group.prefill_class is not PrefillClass.SHORT and not group.cached:
            _, behind = self._queue.most_behind(group.priority)
            limits = self._isolation.limits(group.prefill_class, now, behind)
        needs_empty = needs_empty and group.priority is PriorityClass.BATCH
        query = CapacityQuery(pool, min(smallest.estimate.expected_tokens, limit), limits, needs_empty)
        return self._ledger.open.best(query, now) is not None

    def _is_owed(self, group: HeadGroup, pool: str, limit: int, now: float) -> bool:
        """Whether a head in it belongs to a tenant that is owed service, and lacks capacity."""
        tenant, behind = self._queue.most_behind(group.priority)
        if behind < OWED_REQUESTS:
            return False
        tokens = max((head.estimate.expected_tokens for head in group.heads_of(tenant)), default=0)
        return tokens > 0 and self._ledger.open.best(CapacityQuery(pool, min(tokens, limit)), now) is None

    def __repr__(self) -> str:
        return f"<Openings {self._queue.groups}>"


# Not frozen, as `CapacityQuery`.
@dataclass(slots=True)
class Choice:
    """A request that goes now, the replica that it goes to, and what to hold there."""

    scheduled: ScheduledRequest
    replica: ReplicaState
    hold: Hold


class Dispatcher:
    """Chooses until nothing fits any more.

    Args:
        queue, ledger, placement, policy: those of the scheduler, which owns them.

    Attributes:
        reservations: capacity that is kept for requests that have waited too long.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        queue: RequestQueue,
        ledger: ReplicaLedger,
        placement: Placement,
        policy: OrderingPolicy,
    ) -> None:
        self._pools = settings.routing.pools
        self._queue = queue
        self._ledger = ledger
        self._placement = placement
        self._isolation = placement.isolation
        self._policy = policy
        self._promotion = Promotion(settings.promotion) if policy.promotes else None
        self._overdue = ExpiryHeap(self._overdue_at)
        self._floors = ClassFloors(settings.class_floors)
        self.reservations = CapacityReservations(ledger)
        self._openings = Openings(queue, ledger, self._isolation, self._floors)

    def on_enqueue(self, scheduled: ScheduledRequest) -> None:
        """A request has come into the queue."""
        if self._promotion is not None:
            self._overdue.add(scheduled)

    def choices(self, now: float) -> Iterable[Choice]:
        """What goes now, one choice after another, until nothing fits any more.

        The caller takes each out of the queue and holds its place in the ledger before it asks for the next,
        which is chosen in sight of that. Pools first take those at home in them, then those that spill: into
        the pool next in their preference before any further one.
        """
        self.reservations.prune(now)
        return self._round(now) if self._queue.waiting else ()

    def _round(self, now: float) -> Iterator[Choice]:
        self._policy.on_round_start()
        # Most events of a saturated fleet open no replica.
        spilled = any(self._ledger.open.has_any(pool, now) for pool in self._pools)
        spills = self._queue.spills(self._pools) if spilled else []
        while spilled:
            spilled = False
            yield from self._fill(self._pools, now, rank=0)
            for rank, pools in enumerate(spills, start=1):
                for choice in self._fill(pools, now, rank=rank):
                    spilled = True
                    yield choice
                if spilled:
                    # Each spill brings a new head to the top of its sub-queue, and that one may fit at home.
                    break
        self._policy.on_round_end(self._queue.queue_names())
        self._overdue.prune(len(self._queue))

    def lone_choice(self, scheduled: ScheduledRequest, now: float) -> Choice | None:
        """What `choices` would choose for a request that has just arrived, if nothing else waits.

        It needs no queue, since there is nobody to be compared with. None where it fits nowhere now, and for
        batch work, to which more rules apply: they join the queue, and are looked at there.
        """
        self.reservations.prune(now)
        if scheduled.request.priority is PriorityClass.BATCH:
            return None
        limits = self._limits(scheduled, now)
        for pool in scheduled.pools:
            limit = self._ledger.context_limit(pool)
            if limit is None:
                continue
            tokens = min(scheduled.estimate.expected_tokens, limit)
            query = self._query(scheduled, CapacityQuery(pool, tokens, limits))
            replica = self._ledger.open.best(query, now)
            placed = self._placement.choose(scheduled, replica, query, now)
            if placed is not None:
                self._queue.pass_lone(scheduled)
                return Choice(scheduled, *placed)
        return None

    def on_lone_dispatch(self, scheduled: ScheduledRequest, now: float) -> None:
        """A `lone_choice` has been sent: it was a round of its own."""
        self._policy.on_round_start()
        self._on_dispatch(scheduled, now)
        self._policy.on_round_end(self._queue.queue_names())

    def fits(self, scheduled: ScheduledRequest, now: float) -> bool:
        """Whether some replica has capacity for a request that has just arrived, whatever is ahead of it."""
        needs_empty_engine_queue = scheduled.request.priority is PriorityClass.BATCH
        limits = self._limits(scheduled, now)
        for pool in scheduled.pools:
            limit = self._ledger.context_limit(pool)
            if limit is None:
                continue
            tokens = min(scheduled.estimate.expected_tokens, limit)
            query = CapacityQuery(pool, tokens, limits, needs_empty_engine_queue)
            if self._ledger.open.best(_bound(scheduled, query), now) is not None:
                return True
        return False

    def why_waiting(self, head: ScheduledRequest, now: float) -> str:
        """Why the head of a sub_queue is not being dispatched right now, in a few words for a person."""
        reasons = {pool: self._obstacle(head, pool, now) for pool in head.pools}
        return "; ".join(f"{pool}: {reason}" for pool, reason in reasons.items())

    def _fill(self, pools: Iterable[str], now: float, *, rank: int) -> Iterator[Choice]:
        for pool in pools:
            while self._queue.waiting and (choice := self._choose(pool, now, rank=rank)) is not None:
                yield choice
                self._on_dispatch(choice.scheduled, now)

    def _on_dispatch(self, scheduled: ScheduledRequest, now: float) -> None:
        capacity_was_reserved = self.reservations.on_dispatch(scheduled, now)
        self._policy.on_dispatch(scheduled)
        if self._promotion is not None:
            self._promotion.on_dispatch(scheduled, now, capacity_was_reserved=capacity_was_reserved)
        self._floors.on_dispatch(scheduled.request.priority, self._queue.waiting_classes())

    def _choose(self, pool: str, now: float, *, rank: int) -> Choice | None:
        """The first head in the order of service that fits a replica of `pool`, with what to hold of it."""
        limit = self._ledger.context_limit(pool)
        if limit is None or not any(self._queue.groups.at(pool, rank)):
            return None
        if not self._ledger.open.has_any(pool, now):
            return None
        # Most heads that do not fit are like one that did not fit before: at least as many tokens, as
        # limited.
        misfits: dict[tuple[tuple[int, ...], bool], int] = {}
        first = None if rank else self.reservations.lift(pool, now)
        first = first or self._promoted(pool, now, rank=rank)
        reserves = not rank and self._policy.promotes and self.reservations.of(pool) is None
        openings = self._openings.groups(pool, now, rank=rank, reserves=reserves)
        for head, needs_empty_engine_queue in self._order(pool, now, first, openings, rank=rank):
            tokens = min(head.estimate.expected_tokens, limit)
            limits = self._limits(head, now)
            query = self._query(head, CapacityQuery(pool, tokens, limits, needs_empty_engine_queue))
            replica = None
            if query.is_choosy:
                replica = self._ledger.open.best(query, now)
            elif tokens < misfits.get((limits, needs_empty_engine_queue), limit + 1):
                replica = self._ledger.open.best(query, now)
                if replica is None:
                    misfits[limits, needs_empty_engine_queue] = tokens
            placed = self._placement.choose(head, replica, query, now)
            if placed is not None:
                return Choice(head, *placed)
            if not rank and (head is first or self._is_owed(head, pool)):
                self._reserve_capacity(head, pool, tokens, now)
        return None

    def _query(self, head: ScheduledRequest, query: CapacityQuery) -> CapacityQuery:
        """What a request needs, if it is bound to a replica, or has failed before: see `put_backs`."""
        query = _bound(head, query)
        if not head.put_backs:
            return query
        wanted = query.destination
        elsewhere = wanted.replica_id is None and any(
            state.is_usable
            and state.spec.replica_id not in head.avoided
            and wanted.admits(state.spec.replica_id, state.spec.adapters)
            for pool in head.pools
            for state in self._ledger.of_pool(pool)
        )
        avoided = head.avoided if elsewhere else frozenset()
        return replace(query, avoided=avoided, quarantined=head.losses > 0)

    def _is_owed(self, head: ScheduledRequest, pool: str) -> bool:
        """Whether its tenant is behind, and would stay so while others take each bit of capacity first."""
        if not self._policy.promotes or self.reservations.of(pool) is not None:
            return False
        return self._queue.behind_requests(head.request) >= OWED_REQUESTS

    def _reserve_capacity(self, head: ScheduledRequest, pool: str, tokens: int, now: float) -> None:
        reservation = self.reservations.of(pool)
        # A request that has a reservation, and waits for something else such as isolation, keeps it.
        keeps = reservation is not None and reservation.scheduled is head
        if keeps or self._ledger.open.best(_bound(head, CapacityQuery(pool, tokens)), now) is None:
            self.reservations.reserve(head, pool, tokens, now)

    def _limits(self, scheduled: ScheduledRequest, now: float) -> tuple[int, ...]:
        """How many long prefills may be in flight on a replica that gets this one."""
        if scheduled.prefill_class is PrefillClass.SHORT:
            return ()
        behind = self._queue.behind_requests(scheduled.request)
        return self._isolation.limits(scheduled.prefill_class, now, behind)

    def _order(
        self,
        pool: str,
        now: float,
        first: ScheduledRequest | None,
        openings: Sequence[HeadGroup],
        *,
        rank: int,
    ) -> Iterator[tuple[ScheduledRequest, bool]]:
        """Heads in the order of service, each with whether it must find a needs_empty_engine_queue engine.

        Args:
            first: who has waited too long.
            openings: the groups whose heads may fit; heads of others may be left out.
        """
        queue = self._queue
        if queue.has_returned:
            for head in queue.returned_heads(pool, rank=rank):
                yield head, False
        if first is not None:
            yield first, False
        if not openings:
            return
        wanted = {
            priority: HeadQuery(
                priority,
                [group for group in openings if group.priority is priority],
                [group for group in queue.groups.at(pool, rank) if group.priority is priority],
            )
            for priority in queue.waiting_classes()
        }
        for priority in self._floors.owed():
            if priority in wanted:
                for head in queue.heads(wanted[priority], now):
                    yield head, False
        for priority, query in wanted.items():
            needs_empty_engine_queue = priority is PriorityClass.BATCH
            for head in queue.heads(query, now):
                yield head, needs_empty_engine_queue

    def _promoted(self, pool: str, now: float, *, rank: int) -> ScheduledRequest | None:
        promotion, first_at = self._promotion, self._overdue.next_at()
        if promotion is None or not promotion.is_due or first_at is None or now <= first_at:
            return None
        return promotion.first(self._queue.earliest_heads(pool, rank=rank), now)

    def _overdue_at(self, scheduled: ScheduledRequest) -> float:
        assert self._promotion is not None
        return self._promotion.overdue_at(scheduled)

    def _obstacle(self, head: ScheduledRequest, pool: str, now: float) -> str:
        limit = self._ledger.context_limit(pool)
        if limit is None:
            return "no replica is connected"
        if not self._ledger.open.has_any(pool, now):
            return "every replica is saturated, too busy, stale or draining"
        tokens = min(head.estimate.expected_tokens, limit)
        kept = self.reservations.of(pool)
        for_it = "" if kept is None or kept.scheduled is not head else "; room is being kept for it"
        roomy = _bound(head, CapacityQuery(pool, tokens))
        wanted = roomy.destination
        if wanted is not ANYWHERE and self._ledger.open.best(replace(roomy, tokens=0), now) is None:
            if wanted.replica_id is not None:
                return f"it refers to what replica {wanted.replica_id} keeps, and that one takes nothing now"
            return f"no replica that holds the adapter {wanted.adapter} takes anything now"
        elsewhere = self._query(head, roomy)
        isolated = replace(elsewhere, long_limits=self._limits(head, now))
        alone = replace(isolated, needs_empty_engine_queue=head.request.priority is PriorityClass.BATCH)
        for query, reason in (
            (roomy, f"no open replica has {tokens:,} free KV tokens{for_it}"),
            (elsewhere, "it has failed on every open replica, or waits for suspects like itself"),
            (isolated, "long prefills are under way on every open replica"),
            (alone, "batch work waits for an engine with an empty queue"),
        ):
            if self._ledger.open.best(query, now) is None:
                return reason
        return "others go first"

    def __repr__(self) -> str:
        return f"<Dispatcher {self._queue}>"


def _bound(scheduled: ScheduledRequest, query: CapacityQuery) -> CapacityQuery:
    """The query, for the replicas that will do for this request."""
    destination = scheduled.request.destination
    return query if destination is ANYWHERE else replace(query, destination=destination)
