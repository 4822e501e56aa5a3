"""Openings: which heads may fit a pool at all, so that the others need not be looked at.

Of each group of heads (`queueing.head_groups`) the least demanding is tried: the fewest tokens of any head,
under the limits of the tenant that may go beyond them. When no replica takes that, it takes no head of the
group. So a search among heads that all have to wait costs the same for one tenant and for ten thousand.

It may name a group of which no head fits after all, and never leaves one out that has such a head, or one
for which capacity would be reserved.
"""

from serve_app.request import PriorityClass
from serve_app.routing.ledger import ReplicaLedger
from serve_app.routing.open_replicas import CapacityQuery
from serve_app.routing.replica_state import PrefillClass
from serve_app.scheduling.dispatch.class_floors import ClassFloors
from serve_app.scheduling.isolation.prefill_isolation import PrefillIsolation
from serve_app.scheduling.queueing.head_groups import HeadGroup
from serve_app.scheduling.queueing.request_queue import RequestQueue

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
