"""The dispatcher: selects the next request in the order of service, and its replica.

1. A request put back for a fault of its replica, such as its loss: it had been dispatched in time.
2. The request for which capacity is reserved (`capacity_reservations`).
3. A lower class that is owed its floor share, which is larger while one of its requests is beyond its
   starvation bound (`class_floors`).
4. The classes in their order. Within a class, tenants in the order of their shares (`fairness`). Tenants with
   equal shares have one turn: first the oldest request of each that is beyond its starvation bound, at a
   bounded rate (`promotion`); then those that would otherwise miss their latency target
   (`latency_targets`); then the heads of the sub-queues by the policy's score, within the bound on delay
   (`delay_bound`). Capacity is reserved for a promoted request, and for one of a tenant that is owed service,
   if it fits nowhere.

The first request in this order that fits a replica of the pool is dispatched. Batch work requires capacity
that others leave (`backfill`), unless it was put back, is promoted or is owed its floor share.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from serve_app.core.dispatch.candidate_groups import OWED_REQUESTS, CandidateGroups
from serve_app.core.dispatch.capacity_reservations import CapacityReservations
from serve_app.core.dispatch.class_floors import ClassFloors
from serve_app.core.dispatch.headroom import TenantHeadroom
from serve_app.core.dispatch.placement import Placement
from serve_app.core.dispatch.promotion import Promotion
from serve_app.core.policies.protocol import OrderingPolicy
from serve_app.core.queueing.head_groups import HeadGroup
from serve_app.core.queueing.request_queue import HeadQuery, RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.open_replicas import CapacityQuery
from serve_app.core.routing.replica_state import Hold, PrefillClass, ReplicaState
from serve_app.core.settings import SchedulerSettings
from serve_app.request import ANYWHERE, PriorityClass


# Not frozen, because creation is faster; as `CapacityQuery`.
@dataclass(slots=True)
class DispatchChoice:
    """A request to dispatch now, its replica, and what to hold there."""

    scheduled: ScheduledRequest
    replica: ReplicaState
    hold: Hold


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

    def choices(self, now: float) -> Iterable[DispatchChoice]:
        """Yield the choices of one round, until nothing fits.

        Before the next choice, the caller must remove the request from the queue and hold its capacity in the
        ledger. Each pool first serves requests whose home it is, then requests that spill, in the
        order of their preference.
        """
        self.reservations.prune()
        return self._round(now) if self._queue.waiting else ()

    def _round(self, now: float) -> Iterator[DispatchChoice]:
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

    def choose_immediate(self, scheduled: ScheduledRequest, now: float) -> DispatchChoice | None:
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
                return DispatchChoice(scheduled, *placed)
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
        reasons = {pool: self._obstacle(head, pool, now) for pool in head.pools}
        return "; ".join(f"{pool}: {reason}" for pool, reason in reasons.items())

    def _fill(self, pools: Iterable[str], now: float, *, position: int) -> Iterator[DispatchChoice]:
        for pool in pools:
            while self._queue.waiting and (choice := self._choose(pool, now, position=position)) is not None:
                yield choice
                self._on_dispatch(choice.scheduled, now)

    def _on_dispatch(self, scheduled: ScheduledRequest, now: float) -> None:
        capacity_was_reserved = self.reservations.on_dispatch(scheduled)
        self._policy.on_dispatch(scheduled)
        if self._promotion is not None:
            self._promotion.on_dispatch(scheduled, now, capacity_was_reserved=capacity_was_reserved)
        starved = self._queue.starved_classes(now)
        self._floors.on_dispatch(scheduled.request.priority, self._queue.waiting_classes(), starved)

    def _choose(self, pool: str, now: float, *, position: int) -> DispatchChoice | None:
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
        candidates = self._candidates.groups(pool, now, position=position, reserves=reserves)
        for head, is_backfill, is_promoted in self._order(pool, now, first, candidates, position=position):
            tokens = min(head.estimate.expected_tokens, limit)
            limits = self._limits(head, now)
            query = self._query(head, CapacityQuery(pool, tokens, limits, is_backfill))
            if not is_promoted and not head.returned:
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
                head.is_guaranteed = not is_backfill
                return DispatchChoice(head, *placed)
            if not position and (is_promoted or self._may_reserve(head, pool)):
                self._reserve_capacity(head, pool, tokens, now)
        return None

    def _query(self, head: ScheduledRequest, query: CapacityQuery) -> CapacityQuery:
        """Add what a put-back or bound request requires: see the put-backs in `in_flight`."""
        query = _bound(head, query)
        # One that was put back has begun to wait already.
        query.at_once = head.request.submission.no_wait and head.dispatch is None
        if not (head.put_backs or head.avoided):
            return query
        destination = query.destination
        elsewhere = destination.replica_id is None and any(
            state.is_usable
            and state.spec.replica_id not in head.avoided
            and destination.admits(state.spec.replica_id, state.spec.adapters)
            for pool in head.pools
            for state in self._ledger.of_pool(pool)
        )
        avoided = head.avoided if elsewhere else frozenset()
        return replace(query, avoided=avoided, quarantined=head.losses > 0)

    def _may_reserve(self, head: ScheduledRequest, pool: str) -> bool:
        """Return whether to reserve capacity: the tenant is owed service, the pool has no reservation.

        A tenant that holds more than its share gets none, because light tenants would wait for its requests.
        """
        if not self._policy.promotes or self.reservations.of(pool) is not None:
            return False
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
    ) -> Iterator[tuple[ScheduledRequest, bool, bool]]:
        """Yield heads in the order of service.

        Each is with whether it only gets capacity that others leave, and whether it is promoted.

        Args:
            first: the request for which capacity was reserved; nothing is promoted before it.
            candidates: groups whose heads may fit; heads of other groups may be omitted.
        """
        queue = self._queue
        if queue.has_put_backs:
            for head in queue.put_back_heads(pool, position=position):
                yield head, False, False
        if first is not None:
            yield first, False, True
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
            for turn in queue.turns(queries[priority], now):
                if self._promotion is not None and first is None:
                    for head in self._promotion.among(turn, now):
                        yield head, False, True
                for head in turn:
                    yield head, is_backfill, False

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
        with_headroom = replace(by_tokens, headroom=self._headroom.tokens(head, pool))
        kept = f"the last {with_headroom.headroom:,} KV tokens of each replica are kept for other tenants"
        not_avoided = self._query(head, with_headroom)
        with_isolation = replace(not_avoided, long_limits=self._limits(head, now))
        is_batch = head.request.priority is PriorityClass.BATCH
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
    if state.report is None:
        return "without a report"
    if state.report.draining:
        return "draining"
    for name in ("stale", "suspended", "gated"):
        if getattr(state, name):
            return name
    return "hung" if state.hang_detector.hangs else "at its limit"


def _bound(scheduled: ScheduledRequest, query: CapacityQuery) -> CapacityQuery:
    """Return the query, restricted to the replicas that can serve this request."""
    destination = scheduled.destination
    return query if destination is ANYWHERE else replace(query, destination=destination)
