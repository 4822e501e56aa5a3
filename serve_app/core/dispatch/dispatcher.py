"""The dispatcher: selects the next request in the order of service, and its replica.

- `Dispatcher`: the order of service.
- `CandidateGroups`: the groups of heads that may fit a pool, so that the others need not be examined.
- `CapacityReservations`: KV tokens reserved for a queued request that is owed service and fits no replica.
- `Placement`: selects the replica for a request by load, speed, cached prefix and latency targets.
- `PassThrough`: requests that bypass the scheduler, so that a deployment can compare both.

`Dispatcher`. The order of service:

1. A request put back for a fault of its replica, such as its loss, or because it was too long for it: it had
   been dispatched in time.
2. The request for which capacity is reserved (`CapacityReservations`).
3. Requests of a tenant or class that is behind its floor (`queueing.floors`).
4. A lower class that is owed its floor share, which is larger while one of its requests is beyond its
   starvation bound (`promotion`).
5. The classes in their order. Within a class, tenants in the order of their shares (`fairness`). Tenants with
   equal shares have one turn: first the oldest request of each that is beyond its starvation bound, at a
   bounded rate (`promotion`); then those that would otherwise miss their latency target (`latency_targets`);
   then the heads of the sub-queues by the policy's score, within the bound on delay (`delay_bound`). Capacity
   is reserved for a promoted request, for one of a tenant that is owed service, and for one that is due by a
   floor, if it fits nowhere.

The first request in this order that fits a replica of the pool is dispatched. Batch work requires capacity
that others leave (`backfill`), unless it was put back, is promoted, or is owed a floor or its floor share.

`CandidateGroups`. For each group (`queueing.request_queue`) a hypothetical request is tested: the fewest
tokens of any head, under the most permissive limits of any tenant. If no replica accepts it, no head of the
group fits. The cost of a search among heads that all must wait therefore does not grow with the tenants.

A candidate group may have no head that fits. A group with a head that fits, or with one that gets a capacity
reservation, is never omitted.

`CapacityReservations`. Without a reservation, smaller requests use all capacity as it becomes free, and a
request that needs most of a KV cache never fits. A promoted request, or the next one of a tenant behind its
share (`fairness`), therefore gets a reservation if it fits nowhere in its pool. The reservation is on the
replica where it lacks the fewest tokens. That replica accepts no other request that needs the reserved tokens
until this one fits. Each pool has at most one reservation, which lasts as long as its request waits.

The cost is idle capacity. It is bounded by the rate of promotions, which do not accumulate while a
reservation exists, and by what fair shares owe a tenant.

Source: ours, after reservations under backfilling (Lifka, "The ANL/IBM SP scheduling system", 1995).

`PassThrough`. A hash of the request id selects the share of requests that is scheduled. Each other one goes
immediately to the replica with the fewest requests among those that can hold it, regardless of queue and
load. The ledger holds these requests, too, so the scheduler knows the load of its engines.
"""

import enum
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from serve_app.core.dispatch.backfill import TenantHeadroom
from serve_app.core.dispatch.promotion import ClassFloors, Promotion
from serve_app.core.isolation import PrefillIsolation
from serve_app.core.latency_targets import LatencyTargets
from serve_app.core.policies.protocol import OrderingPolicy
from serve_app.core.queueing.request_queue import HeadGroup, HeadQuery, RequestQueue
from serve_app.core.request import NO_ATTEMPTS, ScheduledRequest
from serve_app.core.routing.ledger import CapacityQuery, ReplicaLedger
from serve_app.core.routing.prefix import PrefixAffinity
from serve_app.core.routing.replica_state import PrefillClass, ReplicaState, Running
from serve_app.core.settings import SchedulerSettings
from serve_app.request import ANYWHERE, PriorityClass, Request

# A tenant that is owed this many average requests gets capacity reserved for its next one. Similar
# tenants are seldom that far behind.
OWED_REQUESTS = 0.5
# Examining this many heads costs no more than testing the groups.
_FEW_HEADS = 3


class Rank(enum.Enum):
    """Why a head has its place in the order of service."""

    USUAL = enum.auto()
    PROMOTED = enum.auto()
    """Beyond its starvation bound, or capacity was reserved for it."""
    BY_FLOOR = enum.auto()
    """Its tenant or class is behind its floor."""
    BACKFILL = enum.auto()
    """It only gets capacity that others leave."""


class CandidateGroups:
    """Selects the groups with a head that may fit."""

    def __init__(
        self, queue: RequestQueue, ledger: ReplicaLedger, isolation: PrefillIsolation, floors: ClassFloors
    ) -> None:
        self._queue = queue
        self._ledger = ledger
        self._isolation = isolation
        self._floors = floors

    def groups(self, pool: str, limit: int, now: float, *, position: int, reserves: bool) -> list[HeadGroup]:
        """Return the groups that may have a head that fits a replica of `pool`.

        Args:
            limit: the longest request of the pool in tokens.
            position: position of `pool` in the preference of requests: 0 is the home pool.
            reserves: whether to include heads of an owed tenant that lack capacity, to reserve it for them.
        """
        groups = [group for group in self._queue.groups.at(pool, position) if group]
        if sum(map(len, groups)) <= _FEW_HEADS:
            return groups
        # Batch work that precedes the higher classes is no backfill.
        batch_is_first = PriorityClass.BATCH in self._floors.owed()
        return [
            group
            for group in groups
            if self._may_fit(group, pool, limit, now, is_backfill=not batch_is_first)
            or (reserves and self._needs_reservation(group, pool, limit, now))
        ]

    def _may_fit(self, group: HeadGroup, pool: str, limit: int, now: float, *, is_backfill: bool) -> bool:
        if group.restricted:
            # They need certain replicas, which are looked up without the heaps.
            return True
        smallest = group.smallest()
        if smallest is None:
            return False
        limits: tuple[int, ...] = ()
        if group.prefill_class is not PrefillClass.SHORT and not group.cached:
            most = max(self._queue.deficits(group.priority, group.tenants).values(), default=0.0)
            limits = self._isolation.limits(group.prefill_class, now, most)
        is_backfill = (
            is_backfill and group.priority is PriorityClass.BATCH and group.first_starved(now) is None
        )
        query = CapacityQuery(pool, min(smallest.estimate.expected_tokens, limit), limits, is_backfill)
        return self._ledger.open.best(query, now) is not None

    def _needs_reservation(self, group: HeadGroup, pool: str, limit: int, now: float) -> bool:
        """Return whether to reserve capacity for a head that is owed service and fits nowhere now."""
        starved = group.first_starved(now)
        tokens = 0 if starved is None else starved.estimate.expected_tokens
        for tenant, deficit in self._queue.deficits(group.priority, group.tenants).items():
            if deficit >= OWED_REQUESTS:
                tokens = max(tokens, *(head.estimate.expected_tokens for head in group.heads_of(tenant)))
        return tokens > 0 and self._ledger.open.best(CapacityQuery(pool, min(tokens, limit)), now) is None

    def __repr__(self) -> str:
        return f"<CandidateGroups {self._queue.groups}>"


@dataclass(slots=True)
class CapacityReservation:
    """KV tokens reserved on one replica."""

    scheduled: ScheduledRequest
    replica: ReplicaState
    tokens: int


class CapacityReservations:
    """The reservations of all pools, at most one for each."""

    def __init__(self, ledger: ReplicaLedger) -> None:
        self._ledger = ledger
        self._by_pool: dict[str, CapacityReservation] = {}

    def __repr__(self) -> str:
        reserved = {each.scheduled.request.request_id: each.replica.spec.replica_id for each in self}
        return f"<CapacityReservations {reserved}>"

    def __iter__(self) -> Iterator[CapacityReservation]:
        return iter(self._by_pool.values())

    def of(self, pool: str) -> CapacityReservation | None:
        """Return the reservation of a pool, or None."""
        return self._by_pool.get(pool)

    def prune(self) -> None:
        """Remove the reservations of requests that no longer wait or have another home pool."""
        if not self._by_pool:
            return
        for pool, reservation in list(self._by_pool.items()):
            if not reservation.scheduled.queued or reservation.scheduled.pools[:1] != (pool,):
                self._drop(pool)

    def release_for_trial(self, pool: str) -> ScheduledRequest | None:
        """Release the reserved tokens to test whether their request fits now. Return that request.

        The caller reserves the tokens again if it does not fit.
        """
        reservation = self._by_pool.get(pool)
        if reservation is None:
            return None
        self._ledger.reserve(reservation.replica, 0)
        return reservation.scheduled

    def reserve(self, scheduled: ScheduledRequest, pool: str, tokens: int) -> None:
        """Reserve tokens for a request on the same replica as before, or where it lacks the fewest.

        Replaces a reservation of the pool for another request.
        """
        reservation = self._by_pool.get(pool)
        if reservation is None or reservation.scheduled is not scheduled or not reservation.replica.is_usable:
            replica = self._ledger.most_free(pool, scheduled.destination)
            if reservation is not None:
                self._drop(pool)
            if replica is None:
                return
            reservation = self._by_pool[pool] = CapacityReservation(scheduled, replica, tokens)
        reservation.tokens = tokens
        self._ledger.reserve(reservation.replica, tokens)

    def on_dispatch(self, scheduled: ScheduledRequest) -> bool:
        """Remove the reservations of a dispatched request. Return whether it had any."""
        if not self._by_pool:
            return False
        pools = [pool for pool, each in self._by_pool.items() if each.scheduled is scheduled]
        for pool in pools:
            self._drop(pool)
        return bool(pools)

    def _drop(self, pool: str) -> None:
        self._ledger.reserve(self._by_pool.pop(pool).replica, 0)


class Placement:
    """Selects the replica for the request that is to be dispatched."""

    def __init__(
        self,
        ledger: ReplicaLedger,
        isolation: PrefillIsolation,
        affinity: PrefixAffinity,
        targets: LatencyTargets,
    ) -> None:
        self._ledger = ledger
        self.isolation = isolation
        self._affinity = affinity
        self._targets = targets

    def choose(
        self, head: ScheduledRequest, by_load: ReplicaState | None, query: CapacityQuery, now: float
    ) -> Running | None:
        """Return what to hold for the request on which replica, or None if none may accept it.

        Args:
            by_load: the best of like replicas for the whole prefill; None if isolation or load excludes all.
            query: requirements of the whole prefill.
        """
        if (resident_on := head.resident_on) is not None:
            replica = self._admissible(head, resident_on, head.prefill_tokens, query, now)
            return None if replica is None else self._placed(head, replica, head.prefill_tokens, query)
        usual = self._usual(head, by_load, query, now)
        if usual is None or not self._targets.affects(head):
            return usual
        return self._by_target(head, usual, query, now)

    def _usual(
        self, head: ScheduledRequest, by_load: ReplicaState | None, query: CapacityQuery, now: float
    ) -> Running | None:
        """Return the replica for a request without regard to latency targets, as `choose` does."""
        if by_load is None and not (head.prefill_class is not PrefillClass.SHORT and head.cached_tokens):
            return None
        if self._ledger.speeds.are_unlike(query.pool):
            placed = self._by_speed(head, query, now)
            if placed is not None:
                return placed
        estimate = head.estimate
        if by_load is not None and not head.request.submission.prefix:
            # No replica can have a part of the prompt cached.
            prompt_tokens = estimate.expected_prompt_tokens
            return Running(by_load, query.tokens, head.prefill_class, prompt_tokens, query.quarantined)

        if by_load is not None and not query.headroom and not query.is_backfill:
            # A full KV cache is no reason to compute and store the cached part again on another replica.
            query = replace(query, may_wait=True)

        def admissible(replica_id: str, prefill_tokens: int) -> ReplicaState | None:
            return self._admissible(head, replica_id, prefill_tokens, query, now)

        found = self._affinity.choose(by_load, head.request, estimate.expected_prompt_tokens, admissible)
        return None if found is None else self._placed(head, *found, query)

    def _by_target(self, head: ScheduledRequest, usual: Running, query: CapacityQuery, now: float) -> Running:
        """Return the usual replica, or the best of those on which all latency targets are met."""
        targets = self._targets
        if targets.are_met(head, usual.replica, usual.prefill_tokens, now):
            return usual
        prompt_tokens = head.estimate.expected_prompt_tokens
        best, least_s = usual, math.inf
        for replica in self._ledger.of_pool(query.pool):
            cached = self._affinity.cached_on(replica.spec.replica_id, head.request, prompt_tokens)
            left = prompt_tokens - cached
            if self._admissible(head, replica.spec.replica_id, left, query, now) is None:
                continue
            first_s = targets.first_token_s(replica, left)
            if first_s < least_s and targets.are_met(head, replica, left, now):
                best, least_s = self._placed(head, replica, left, query), first_s
        return best

    def _by_speed(self, head: ScheduledRequest, query: CapacityQuery, now: float) -> Running | None:
        """Return the best of unlike replicas that may accept the request; see `routing.prefill_cost`."""
        speeds, estimate, fits = self._ledger.speeds, head.estimate, self._ledger.open.fits
        left: dict[ReplicaState, int] = {}
        for replica in self._ledger.of_pool(query.pool):
            replica_id, tokens = replica.spec.replica_id, estimate.expected_prompt_tokens
            if head.cached_tokens:
                tokens -= self._affinity.cached_on(replica_id, head.request, tokens)
            if fits(replica, query, now) or self._admissible(head, replica_id, tokens, query, now):
                left[replica] = tokens

        def completion(at: ReplicaState) -> tuple[float, int]:
            return speeds.completion(at, left[at], estimate.expected_output_tokens, now), at.order

        best = min(left, key=completion, default=None)
        if best is None:
            return None
        if head.cached_tokens and best.in_flight:
            best = min(left, key=lambda at: (speeds.cost(at, left[at], now), at.order))
        return self._placed(head, best, left[best], query)

    def _placed(
        self, head: ScheduledRequest, replica: ReplicaState, prefill_tokens: int, query: CapacityQuery
    ) -> Running:
        prefill_class = self._prefill_class(head, prefill_tokens)
        return Running(replica, query.tokens, prefill_class, prefill_tokens, query.quarantined)

    def _admissible(
        self, head: ScheduledRequest, replica_id: str, prefill_tokens: int, query: CapacityQuery, now: float
    ) -> ReplicaState | None:
        """Return a replica if it may accept the request with so many tokens to compute, else None."""
        limits = self.isolation.limits(self._prefill_class(head, prefill_tokens), now)
        replica = self._ledger.get(replica_id)
        fits = replica is not None and self._ledger.open.fits(
            replica, replace(query, long_limits=limits), now
        )
        return replica if fits else None

    def _prefill_class(self, head: ScheduledRequest, prefill_tokens: int) -> PrefillClass:
        if prefill_tokens >= head.estimate.expected_prompt_tokens:
            return head.prefill_class
        # Boundaries may have changed since admission, but a cached prefix never raises the class.
        return min(head.prefill_class, self.isolation.prefill_class(prefill_tokens))


class Dispatcher:
    """Selects requests until none fits.

    Args:
        queue, ledger, placement, policy: shared with the scheduler, which owns them.

    Attributes:
        reservations: capacity reserved for requests that are owed service.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        queue: RequestQueue,
        ledger: ReplicaLedger,
        placement: Placement,
        policy: OrderingPolicy,
        headroom: TenantHeadroom,
    ) -> None:
        self._pools = settings.routing.pools
        self._queue = queue
        self._ledger = ledger
        self._placement = placement
        self._isolation = placement.isolation
        self._policy = policy
        self._headroom = headroom
        self._promotion = Promotion(settings.promotion, queue) if policy.promotes else None
        self._floors = ClassFloors(settings.class_floors, settings.promotion.promoted_share)
        self.reservations = CapacityReservations(ledger)
        self._closed: dict[str, tuple[float, str]] = {}
        self._candidates = CandidateGroups(queue, ledger, self._isolation, self._floors)

    def before_enqueue(self, scheduled: ScheduledRequest) -> None:
        """Set the starvation bound of a request that is about to be added to the queue."""
        if self._promotion is not None:
            scheduled.starved_at = self._promotion.starved_at(scheduled)

    def choices(self, now: float) -> Iterable[tuple[ScheduledRequest, Running]]:
        """Yield the requests of one round with what to hold for each, until nothing fits.

        Before the next choice, the caller must remove the request from the queue and hold its capacity in the
        ledger. Each pool first serves requests whose home it is, then requests that spill, in the
        order of their preference.
        """
        self.reservations.prune()
        return self._round(now) if self._queue.waiting else ()

    def _round(self, now: float) -> Iterator[tuple[ScheduledRequest, Running]]:
        self._policy.on_round_start()
        # Optimisation: most events of a saturated fleet free no replica.
        spilled = any(self._ledger.open.has_any(pool, now) for pool in self._pools)
        spill_pools = self._queue.spill_pools(self._pools) if spilled else []
        while spilled:
            spilled = False
            yield from self._fill(self._pools, now, position=0)
            for position, pools in enumerate(spill_pools, start=1):
                for choice in self._fill(pools, now, position=position):
                    spilled = True
                    yield choice
                if spilled:
                    # Each spill exposes the next head of its sub-queue, which may fit at home.
                    break
        self._policy.on_round_end(self._queue.queue_names())

    def choose_immediate(self, scheduled: ScheduledRequest, now: float) -> Running | None:
        """Return what `choices` would select for a request that has just arrived while nothing else waits.

        It bypasses the queue, because there is nothing to compare with. Returns None if the request fits
        nowhere now, and for batch work, which has more rules: these requests join the queue.
        """
        self.reservations.prune()
        if scheduled.request.priority is PriorityClass.BATCH:
            return None
        limits = self._limits(scheduled, now)
        for pool in scheduled.pools:
            limit = self._ledger.context_limit(pool)
            if limit is None:
                continue
            tokens = min(scheduled.estimate.expected_tokens, limit)
            query = self._query(scheduled, CapacityQuery(pool, tokens, limits))
            query.headroom = self._headroom.tokens(scheduled, pool)
            replica = self._ledger.open.best(query, now)
            placed = self._placement.choose(scheduled, replica, query, now)
            if placed is not None:
                self._queue.account_immediate(scheduled)
                return placed
        return None

    def on_immediate_dispatch(self, scheduled: ScheduledRequest, now: float) -> None:
        """Account for a dispatched immediate choice as one round."""
        self._policy.on_round_start()
        self._on_dispatch(scheduled, now)
        self._policy.on_round_end(self._queue.queue_names())

    def fits(self, scheduled: ScheduledRequest, now: float) -> bool:
        """Return whether some replica has capacity for a new request, ignoring the requests ahead of it."""
        is_backfill = scheduled.request.priority is PriorityClass.BATCH
        limits = self._limits(scheduled, now)
        for pool in scheduled.pools:
            limit = self._ledger.context_limit(pool)
            if limit is None:
                continue
            tokens = min(scheduled.estimate.expected_tokens, limit)
            no_wait = scheduled.request.submission.no_wait
            query = CapacityQuery(pool, tokens, limits, is_backfill, at_once=no_wait)
            if self._ledger.open.best(_bound(scheduled, query), now) is not None:
                return True
        return False

    def wait_reasons(self, head: ScheduledRequest, now: float) -> str:
        """Return the reasons, by pool, why the head of a sub-queue is not dispatched now, for operators."""
        if head.parked:
            return "no replica has room for the context of its program, which would evict others in use"
        if (backoff_s := head.attempts.backoff_until - now) > 0:
            return f"it was put back, and its backoff ends in {backoff_s:.1f} s"
        reasons = {pool: self._obstacle(head, pool, now) for pool in head.pools}
        return "; ".join(f"{pool}: {reason}" for pool, reason in reasons.items())

    def _fill(
        self, pools: Iterable[str], now: float, *, position: int
    ) -> Iterator[tuple[ScheduledRequest, Running]]:
        for pool in pools:
            while self._queue.waiting and (choice := self._choose(pool, now, position=position)) is not None:
                yield choice
                self._on_dispatch(choice[0], now)

    def _on_dispatch(self, scheduled: ScheduledRequest, now: float) -> None:
        capacity_was_reserved = self.reservations.on_dispatch(scheduled)
        self._policy.on_dispatch(scheduled)
        if self._promotion is not None:
            self._promotion.on_dispatch(scheduled, now, capacity_was_reserved=capacity_was_reserved)
        starved = self._queue.starved_classes(now)
        self._floors.on_dispatch(scheduled.request.priority, self._queue.waiting_classes(), starved)

    def _choose(self, pool: str, now: float, *, position: int) -> tuple[ScheduledRequest, Running] | None:
        """Return the first head in the order of service that fits a replica of `pool`, or None."""
        limit = self._ledger.context_limit(pool)
        if limit is None or not any(self._queue.groups.at(pool, position)):
            return None
        if not self._ledger.open.has_any(pool, now):
            return None
        # Optimisation: a head with the same limits and at least as many tokens as one that did not fit does
        # not fit either.
        misfits: dict[tuple[tuple[int, ...], bool], float] = {}
        first = None if position else self.reservations.release_for_trial(pool)
        reserves = not position and self._policy.promotes and self.reservations.of(pool) is None
        candidates = self._candidates.groups(pool, limit, now, position=position, reserves=reserves)
        for head, rank in self._order(pool, now, first, candidates, position=position):
            tokens = min(head.estimate.expected_tokens, limit)
            limits = self._limits(head, now)
            is_backfill = rank is Rank.BACKFILL
            query = self._query(head, CapacityQuery(pool, tokens, limits, is_backfill))
            if rank not in (Rank.PROMOTED, Rank.BY_FLOOR) and not head.attempts.returned:
                query.headroom = self._headroom.tokens(head, pool)
            needed, replica = tokens + query.headroom, None
            if query.is_restricted:
                replica = self._ledger.open.best(query, now)
            elif needed < misfits.get((limits, is_backfill), math.inf):
                replica = self._ledger.open.best(query, now)
                if replica is None:
                    misfits[limits, is_backfill] = needed
            placed = self._placement.choose(head, replica, query, now)
            if placed is not None:
                placed.is_guaranteed, placed.by_floor = not is_backfill, rank is Rank.BY_FLOOR
                return head, placed
            if not position and (rank is Rank.PROMOTED or self._may_reserve(head, pool, rank)):
                self._reserve_capacity(head, pool, tokens, now)
        return None

    def _query(self, head: ScheduledRequest, query: CapacityQuery) -> CapacityQuery:
        """Add what a put-back or bound request requires: see the put-backs in `in_flight`."""
        query = _bound(head, query)
        # One that was put back has begun to wait already.
        query.at_once = head.request.submission.no_wait and head.dispatch is None
        attempts = head.attempts
        if attempts is NO_ATTEMPTS:
            return query
        destination = query.destination
        elsewhere = destination.replica_id is None and any(
            state.is_usable
            and state.spec.replica_id not in attempts.avoided
            and destination.admits(state.spec.replica_id, state.spec.adapters)
            for pool in head.pools
            for state in self._ledger.of_pool(pool)
        )
        avoided = attempts.avoided if elsewhere else frozenset()
        return replace(query, avoided=avoided, quarantined=attempts.losses > 0)

    def _may_reserve(self, head: ScheduledRequest, pool: str, rank: Rank) -> bool:
        """Return whether to reserve capacity: the tenant is owed service, the pool has no reservation.

        A tenant that holds more than its share gets none, because light tenants would wait for its requests,
        unless it is behind its floor.
        """
        if not self._policy.promotes or self.reservations.of(pool) is not None:
            return False
        if rank is Rank.BY_FLOOR:
            return True
        is_owed = self._queue.deficit_requests(head.request) >= OWED_REQUESTS
        return is_owed and not self._headroom.tokens(head, pool)

    def _reserve_capacity(self, head: ScheduledRequest, pool: str, tokens: int, now: float) -> None:
        reservation = self.reservations.of(pool)
        # A request that waits for something else, such as isolation, retains its reservation.
        has_reservation = reservation is not None and reservation.scheduled is head
        if has_reservation or self._ledger.open.best(_bound(head, CapacityQuery(pool, tokens)), now) is None:
            self.reservations.reserve(head, pool, tokens)

    def _limits(self, scheduled: ScheduledRequest, now: float) -> tuple[int, ...]:
        """Return the limits on long prefills in flight for a replica of this request."""
        if scheduled.prefill_class is PrefillClass.SHORT:
            return ()
        behind = self._queue.deficit_requests(scheduled.request)
        return self._isolation.limits(scheduled.prefill_class, now, behind)

    def _order(
        self,
        pool: str,
        now: float,
        first: ScheduledRequest | None,
        candidates: Sequence[HeadGroup],
        *,
        position: int,
    ) -> Iterator[tuple[ScheduledRequest, Rank]]:
        """Yield heads in the order of service.

        Args:
            first: the request for which capacity was reserved; nothing is promoted before it.
            candidates: groups whose heads may fit; heads of other groups may be omitted.
        """
        queue = self._queue
        if queue.has_put_backs:
            for head in queue.put_back_heads(pool, position=position):
                yield head, Rank.USUAL
        if first is not None:
            yield first, Rank.PROMOTED
        for floor in queue.due_floors(now):
            for head in queue.heads_of_floor(floor, pool, position, now):
                yield head, Rank.BY_FLOOR
        if not candidates:
            return
        queries = {
            priority: HeadQuery(
                priority,
                [group for group in candidates if group.priority is priority],
                [group for group in queue.groups.at(pool, position) if group.priority is priority],
            )
            for priority in queue.waiting_classes()
        }
        owed = [priority for priority in self._floors.owed() if priority in queries]
        for priority in chain(owed, queries):
            is_backfill = priority is PriorityClass.BATCH and priority not in owed
            rank = Rank.BACKFILL if is_backfill else Rank.USUAL
            for turn in queue.turns(queries[priority], now):
                if self._promotion is not None and first is None:
                    for head in self._promotion.among(turn, now):
                        yield head, Rank.PROMOTED
                for head in turn:
                    yield head, rank

    def _obstacle(self, head: ScheduledRequest, pool: str, now: float) -> str:
        limit = self._ledger.context_limit(pool)
        if limit is None:
            return "no replica is connected"
        if not self._ledger.open.has_any(pool, now):
            return self._closed_reason(pool, now)
        tokens = min(head.estimate.expected_tokens, limit)
        reservation = self.reservations.of(pool)
        is_reserved = reservation is not None and reservation.scheduled is head
        reserved = "; capacity is reserved for it" if is_reserved else ""
        by_tokens = _bound(head, CapacityQuery(pool, tokens))
        destination = by_tokens.destination
        if destination is not ANYWHERE and self._ledger.open.best(replace(by_tokens, tokens=0), now) is None:
            if destination.replica_id is not None:
                return f"it is bound to replica {destination.replica_id}, which accepts no requests now"
            return f"no replica with the adapter {destination.adapter} accepts requests now"
        is_returned = head.attempts.returned
        with_headroom = replace(by_tokens, headroom=0 if is_returned else self._headroom.tokens(head, pool))
        kept = f"the last {with_headroom.headroom:,} KV tokens of each replica are kept for other tenants"
        not_avoided = self._query(head, with_headroom)
        with_isolation = replace(not_avoided, long_limits=self._limits(head, now))
        is_batch = head.request.priority is PriorityClass.BATCH and not is_returned
        as_backfill = replace(with_isolation, is_backfill=is_batch)
        for query, reason in (
            (by_tokens, f"no open replica has {tokens:,} free KV tokens{reserved}"),
            (with_headroom, f"its tenant holds more than its share, and {kept}"),
            (not_avoided, "it has failed on every open replica, or each has another request in quarantine"),
            (with_isolation, "every open replica has the maximum number of long prefills in flight"),
            (as_backfill, "batch work waits for capacity that other requests leave"),
        ):
            if self._ledger.open.best(query, now) is None:
                return reason
        return "other requests have precedence"

    def _closed_reason(self, pool: str, now: float) -> str:
        """Return why no replica of a pool accepts requests. It is computed once for all heads of a moment."""
        if self._closed.get(pool, (None, ""))[0] != now:
            counts = Counter(_closed_state(each) for each in self._ledger.of_pool(pool) if each.joined)
            reason = "no replica is open: " + ", ".join(f"{n} {state}" for state, n in counts.items())
            if len(counts) == 1:
                (state,) = counts
                reason = f"every replica is {state}"
            self._closed[pool] = now, reason
        return self._closed[pool][1]

    def __repr__(self) -> str:
        return f"<Dispatcher {self._queue}>"


def _closed_state(state: ReplicaState) -> str:
    """Return the state of a replica that accepts no requests."""
    reasons = {
        "without a report": state.report is None,
        "draining": state.report is not None and state.report.draining,
        "stale": state.reports.stale,
        "suspended": state.suspension.active,
        "gated": state.gated,
        "hung": state.hang_detector.hangs,
    }
    return next((name for name, holds in reasons.items() if holds), "at its limit")


def _bound(scheduled: ScheduledRequest, query: CapacityQuery) -> CapacityQuery:
    """Return the query, restricted to the replicas that can serve this request."""
    destination = scheduled.destination
    return query if destination is ANYWHERE else replace(query, destination=destination)


_HASHES = 2**32


class PassThrough:
    """Selects the requests that bypass the scheduler, and their replicas."""

    def __init__(self, active_share: float, ledger: ReplicaLedger) -> None:
        self.active_share = active_share
        self._ledger = ledger

    def __repr__(self) -> str:
        return f"<PassThrough active_share={self.active_share:g}>"

    def change(self, active_share: float) -> None:
        """Schedule another share from now on. Queued requests are not affected."""
        self.active_share = active_share

    def selects(self, request: Request) -> bool:
        """Return whether a request bypasses the scheduler. All of its attempts get the same answer."""
        share = self.active_share
        return share < 1 and zlib.crc32(request.request_id.encode()) >= share * _HASHES

    def choice(self, scheduled: ScheduledRequest) -> Running | None:
        """Return what to hold for a bypassing request; None for others, and while no replica can hold it."""
        if not self.selects(scheduled.request):
            return None
        destination = scheduled.request.destination
        replica = min(
            (
                each
                for each in self._ledger
                if each.is_usable
                and each.spec.pool in scheduled.pools
                and destination.admits(each.spec.replica_id, each.spec.adapters)
            ),
            key=lambda each: (each.in_flight, each.order),
            default=None,
        )
        if replica is None:
            return None
        estimate = scheduled.estimate
        tokens = min(estimate.expected_tokens, replica.spec.max_model_len)
        prompt_tokens = estimate.expected_prompt_tokens
        return Running(replica, tokens, scheduled.prefill_class, prompt_tokens, bypassed=True)
