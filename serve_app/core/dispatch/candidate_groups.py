"""Candidate groups: the groups of heads that may fit a pool, so that the others need not be examined.

For each group (`queueing.head_groups`) a hypothetical request is tested: the fewest tokens of any head, under
the most permissive limits of any tenant. If no replica accepts it, no head of the group fits. The cost of a
search among heads that all must wait therefore does not grow with the tenants.

A candidate group may have no head that fits. A group with a head that fits, or with one that gets a capacity
reservation, is never omitted.
"""

from serve_app.core.dispatch.class_floors import ClassFloors
from serve_app.core.isolation import PrefillIsolation
from serve_app.core.queueing.head_groups import HeadGroup
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.open_replicas import CapacityQuery
from serve_app.core.routing.replica_state import PrefillClass
from serve_app.request import PriorityClass

# A tenant that is owed this many average requests gets capacity reserved for its next one. Similar
# tenants are seldom that far behind.
OWED_REQUESTS = 0.5
# Examining this many heads costs no more than testing the groups.
_FEW_HEADS = 3


class CandidateGroups:
    """Selects the groups with a head that may fit."""

    def __init__(
        self, queue: RequestQueue, ledger: ReplicaLedger, isolation: PrefillIsolation, floors: ClassFloors
    ) -> None:
        self._queue = queue
        self._ledger = ledger
        self._isolation = isolation
        self._floors = floors

    def groups(self, pool: str, now: float, *, position: int, reserves: bool) -> list[HeadGroup]:
        """Return the groups that may have a head that fits a replica of `pool`.

        Args:
            position: position of `pool` in the preference of requests: 0 is the home pool.
            reserves: whether to include heads of an owed tenant that lack capacity, to reserve it for them.
        """
        limit = self._ledger.context_limit(pool)
        groups = [group for group in self._queue.groups.at(pool, position) if group]
        if limit is None:
            return []
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
