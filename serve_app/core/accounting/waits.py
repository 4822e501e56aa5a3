"""Wait accounting: attributes each request's wait to its causes, exactly.

After each event every queued request waits for one of these reasons. The reason is evaluated in the first of
its pools with a replica that is alive and not suspended:

- No pool has such a replica: none is connected, none reports, or all that report drain, hang or are
  suspended.
- No replica of the pool has capacity: the engines are busy. The cause is the *taker*, the request that gets
  the next slot. If the waiting request could not have used that slot, the cause is what it lacks: KV cache,
  permission for another long prefill, capacity for backfill, or its particular replica.
- A replica has capacity, but not for the waiting request: again the cause is what it lacks. A request that
  fits is never left waiting (`leaves_no_capacity_idle`).

Requests with the same key (`key_of`) share an account, which assumes the smallest size among them. Sizes
within an account differ by less than a factor of two; all requests below 4,096 tokens share one size.
Therefore a request that lacks KV cache may be attributed to the slots that others took.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from serve_app.core.accounting.costs import TenantTotals
from serve_app.core.accounting.wait_causes import (
    NO_SLOTS,
    OwnSlots,
    WaitBreakdown,
    WaitCause,
    WaitTally,
    nanoseconds,
)
from serve_app.core.isolation import PrefillIsolation
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import CapacityQuery, ReplicaLedger
from serve_app.core.routing.replica_state import PrefillClass, ReplicaState, Running
from serve_app.request import ANYWHERE, Destination, PriorityClass

# Wait accounts attribute the time of all waiting requests with the same key at the cost of one.
#
# These requests have the same class, pools, prefill class and destination, and similar sizes, so they wait
# for the same thing. An account sums its time by cause. A request records the sums when it starts to wait,
# and the differences at the end are its wait. All sums are whole nanoseconds, so the parts add up exactly.
#
# While engines are busy, the cause is unknown until the next slot is free: the others have waited for the
# request that gets it. Until then that time is *unattributed*. The part before the arrival of a request that
# joins during it (a newcomer) is not part of its wait.


# Indices of the sums in an account. The first are slots that others took: by the rank of their class, and by
# a floor.
_BY_FLOOR = len(PriorityClass)
BUSY = _BY_FLOOR + 1
_STATES = (
    WaitCause.ENGINES_BUSY,
    WaitCause.LONG_PREFILL,
    WaitCause.KV_CACHE,
    WaitCause.ENGINE_QUEUE,
    WaitCause.PARTICULAR_REPLICA,
    WaitCause.RESIDENCY,
    WaitCause.NO_REPLICA,
    WaitCause.STALE_REPORT,
    WaitCause.FAILING_REPLICAS,
)
INDEX_OF = {cause: BUSY + number for number, cause in enumerate(_STATES)}
# After the sums, the numbers of slots that others took, in the same order.
_COUNTS = BUSY + len(_STATES)
_LENGTH = _COUNTS + BUSY
# Requests below 2**12 tokens share an account: they never wait because of the size of a KV cache alone.
_SMALL_TOKENS_BITS = 12

WaitAccountKey = tuple[PriorityClass, tuple[str, ...], PrefillClass, int, Destination, bool]
"""Class, pools, prefill class, number of bits of its tokens, destination, and whether that is the replica
with the context of its program."""


def key_of(scheduled: ScheduledRequest) -> WaitAccountKey:
    """Return the key of a waiting request's account."""
    request = scheduled.request
    bits = max(_SMALL_TOKENS_BITS, scheduled.estimate.expected_tokens.bit_length())
    is_resident = scheduled.resident_on is not None
    return (
        request.priority,
        scheduled.pools,
        scheduled.prefill_class,
        bits,
        scheduled.destination,
        is_resident,
    )


class WaitAccount:
    """The account of the requests with one key.

    Attributes:
        tokens: the fewest tokens that a request with this key needs.
        pool: the pool whose slots its requests wait for now; empty if no pool has a usable replica.
        state: index of the sum for what its requests wait for now.
    """

    def __init__(self, key: WaitAccountKey, now: int) -> None:
        self.key = key
        self.priority, self.pools, self.prefill_class, bits, self.destination, self.is_resident = key
        self.tokens = 1 << (bits - 1) if bits > _SMALL_TOKENS_BITS else 1
        self.pool = ""
        self.state = BUSY
        self.waiting = 0
        self._since = now
        self._sums = [0] * _LENGTH
        # The slots that each tenant with waiting requests took.
        self._taken_by_tenant: dict[str, OwnSlots] = {}
        self._tenants: dict[str, int] = {}
        self._newcomers: dict[ScheduledRequest, int] = {}

    def has_any(self, tenants: Collection[str]) -> bool:
        """Return whether requests of any of these tenants wait."""
        return any(tenant in self._tenants for tenant in tenants)

    @property
    def cause(self) -> WaitCause:
        """The cause for which its requests wait now."""
        return _STATES[self.state - BUSY]

    @property
    def lacks_replica(self) -> WaitCause | None:
        """The cause if its replicas accept nothing while others do; None if any replica can serve it."""
        if self.destination is ANYWHERE:
            return None
        return WaitCause.RESIDENCY if self.is_resident else WaitCause.PARTICULAR_REPLICA

    def join(self, scheduled: ScheduledRequest, tally: WaitTally, now: int) -> None:
        """Start the wait of a request."""
        unattributed_ns = now - self._since
        if unattributed_ns and self.state == BUSY:
            self._newcomers[scheduled] = unattributed_ns
        elif unattributed_ns:
            self._attribute(self.state, now)
        tenant = scheduled.request.tenant
        tally.account = self
        tally.sums = self._sums.copy()
        tally.own = self._taken_by_tenant.get(tenant, NO_SLOTS)
        self.waiting += 1
        self._tenants[tenant] = self._tenants.get(tenant, 0) + 1

    def leave(self, scheduled: ScheduledRequest, tally: WaitTally, now: int) -> None:
        """End the wait of a request and divide it among its causes."""
        self.divide(scheduled, tally, now)
        self._newcomers.pop(scheduled, None)
        tally.account, tally.sums = None, []
        self._leave(scheduled.request.tenant)

    def divide(self, scheduled: ScheduledRequest, tally: WaitTally, now: int) -> None:
        """Add the request's wait since it joined to its tally, without changing the account."""
        tenant, rank = scheduled.request.tenant, self.priority.rank
        before_ns = self._newcomers.get(scheduled, 0)
        gained = [now_ns - then_ns for now_ns, then_ns in zip(self._sums, tally.sums, strict=True)]
        gained[self.state] += now - self._since - (before_ns if self.state == BUSY else 0)
        taken, own = self._taken_by_tenant.get(tenant, NO_SLOTS), [(0, 0)] * BUSY
        for index, now_taken, then_taken in zip((rank, _BY_FLOOR), taken, tally.own, strict=True):
            own[index] = now_taken[0] - then_taken[0], now_taken[1] - then_taken[1]
        for other, (own_ns, own_count) in enumerate(own):
            taken_ns, taken_count = gained[other], gained[_COUNTS + other]
            if taken_ns or taken_count:
                cause = _cause_of_slot(other, rank)
                tally.add(cause, taken_ns - own_ns)
                tally.add_ahead(cause, taken_count - own_count)
                tally.add(WaitCause.OWN_REQUESTS, own_ns)
                tally.add_ahead(WaitCause.OWN_REQUESTS, own_count)
        for number, cause in enumerate(_STATES, start=BUSY):
            if gained[number]:
                tally.add(cause, gained[number])

    def on_slot_taken(self, taker: ScheduledRequest, now: int, *, by_floor: bool) -> int:
        """Attribute the unattributed time to `taker`. Return the delay of other tenants in nanoseconds."""
        rank, tenant = taker.request.priority.rank, taker.request.tenant
        unattributed_ns = now - self._since
        is_own_class = rank == self.priority.rank
        for newcomer, before_ns in self._newcomers.items():
            if is_own_class and newcomer.request.tenant == tenant and (tally := newcomer.waits) is not None:
                tally.own = _with_slots(tally.own, before_ns, 0, by_floor=by_floor)
        imposed = unattributed_ns * (self.waiting - self._tenants.get(tenant, 0)) - sum(
            before_ns for each, before_ns in self._newcomers.items() if each.request.tenant != tenant
        )
        index = _BY_FLOOR if by_floor else rank
        self._attribute(index, now)
        self._sums[_COUNTS + index] += 1
        if is_own_class and tenant in self._tenants:
            taken = self._taken_by_tenant.get(tenant, NO_SLOTS)
            self._taken_by_tenant[tenant] = _with_slots(taken, unattributed_ns, 1, by_floor=by_floor)
        return imposed

    def on_slot_unusable(self, state: int, now: int) -> None:
        """Attribute the unattributed time to `state`: these requests could not have used the taken slot."""
        self._attribute(state, now)

    def change(self, state: int, now: int) -> None:
        """Set what the requests wait for from now on."""
        if state != self.state:
            self._attribute(self.state, now)
            self.state = state

    def _attribute(self, index: int, now: int) -> None:
        """Add the time since the last change to one sum."""
        self._sums[index] += now - self._since
        self._since = now
        if self._newcomers:
            for newcomer, before_ns in self._newcomers.items():
                if newcomer.waits is not None:
                    newcomer.waits.sums[index] += before_ns
            self._newcomers.clear()

    def _leave(self, tenant: str) -> None:
        self.waiting -= 1
        left = self._tenants[tenant] - 1
        if left:
            self._tenants[tenant] = left
        else:
            del self._tenants[tenant]
            # No waiting request needs it any more.
            self._taken_by_tenant.pop(tenant, None)

    def __repr__(self) -> str:
        pools = "/".join(self.pools)
        return f"<WaitAccount {self.priority} {pools} from {self.tokens} tokens: {self.waiting} waiting>"


def _with_slots(slots: OwnSlots, nanoseconds: int, count: int, *, by_floor: bool) -> OwnSlots:
    in_turn, of_floor = slots
    if by_floor:
        return in_turn, (of_floor[0] + nanoseconds, of_floor[1] + count)
    return (in_turn[0] + nanoseconds, in_turn[1] + count), of_floor


def _cause_of_slot(rank: int, own_rank: int) -> WaitCause:
    """Return the cause if a floor, or else a request of class `rank`, took the slot of class `own_rank`."""
    if rank == _BY_FLOOR:
        return WaitCause.OTHERS_FLOOR
    if rank == own_rank:
        return WaitCause.OTHER_TENANTS
    return WaitCause.HIGHER_CLASS if rank < own_rank else WaitCause.LOWER_CLASS


# A request dispatched by the event that queued it did not wait, but a live clock advances during the event.
_NEGLIGIBLE_WAIT_S = 1e-3


class WaitAccounts:
    """The accounts of all queued requests, by key."""

    def __init__(self) -> None:
        self._accounts: dict[WaitAccountKey, WaitAccount] = {}
        self._new: list[ScheduledRequest] = []
        self.created = 0

    def __repr__(self) -> str:
        return f"<WaitAccounts {list(self)}>"

    def __iter__(self) -> Iterator[WaitAccount]:
        return iter(self._accounts.values())

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def is_empty(self) -> bool:
        """True if no request waits and none was added since the last event."""
        return not (self._accounts or self._new)

    def add(self, scheduled: ScheduledRequest) -> None:
        """Add a request that entered the queue. Its wait starts if the event does not dispatch it."""
        self._new.append(scheduled)

    def remove(self, scheduled: ScheduledRequest, now: float) -> None:
        """Remove a request that left the queue or whose key changes."""
        tally = scheduled.waits
        if tally is None:
            return
        at = nanoseconds(now)
        if (account := tally.account) is not None:
            account.leave(scheduled, tally, at)
            if not account.waiting:
                del self._accounts[account.key]
        elif tally.held_since is not None:
            tally.add(tally.held_for, at - tally.held_since)
            tally.held_since = None

    def join(self, now: float) -> None:
        """Start the wait of the requests that an event added and did not dispatch."""
        if not self._new:
            return
        at = nanoseconds(now)
        for scheduled in self._new:
            if not scheduled.queued:
                continue
            tally = _tally(scheduled, now)
            in_backoff = scheduled.attempts.backoff_until > 0
            if in_backoff or scheduled.parked:
                tally.held_since = at
                tally.held_for = WaitCause.BACKOFF if in_backoff else WaitCause.RESIDENCY
            elif tally.account is None:
                key = key_of(scheduled)
                account = self._accounts.get(key)
                if account is None:
                    account = self._accounts[key] = WaitAccount(key, at)
                    self.created += 1
                account.join(scheduled, tally, at)
        self._new.clear()


def current_cause(scheduled: ScheduledRequest) -> WaitCause:
    """Return what a queued request waits for now. Valid between two events."""
    tally = scheduled.waits
    if tally is None:
        return WaitCause.BACKOFF
    if tally.account is None:
        # A queued request without an account is in backoff or parked.
        return tally.held_for
    return tally.account.cause


def record_attempt(scheduled: ScheduledRequest, cause: WaitCause, now: float) -> None:
    """Attribute the time since the dispatch to the end of that attempt."""
    tally = _tally(scheduled, scheduled.dispatched_at)
    tally.add(cause, nanoseconds(now) - nanoseconds(scheduled.dispatched_at))


def wait_breakdown(scheduled: ScheduledRequest, now: float) -> WaitBreakdown | None:
    """Return the causes of the wait of a request that has left the queue, or None if it did not wait."""
    if scheduled.waits is None and now - scheduled.request.arrived_at < _NEGLIGIBLE_WAIT_S:
        return None
    return _tally(scheduled, now).breakdown()


def wait_so_far(scheduled: ScheduledRequest, now: float) -> WaitBreakdown:
    """Return the causes of a queued request's wait until now. Changes no state."""
    if scheduled.waits is None:
        return WaitBreakdown()
    tally, at = scheduled.waits.copy(), nanoseconds(now)
    if tally.account is not None:
        tally.account.divide(scheduled, tally, at)
    elif tally.held_since is not None:
        tally.add(tally.held_for, at - tally.held_since)
    return tally.breakdown()


def _tally(scheduled: ScheduledRequest, until: float) -> WaitTally:
    """Return the request's tally, with unattributed time until `until` counted as before this scheduler."""
    tally = scheduled.waits
    if tally is None:
        tally = scheduled.waits = WaitTally()
    if tally.account is None and tally.held_since is None:
        known = nanoseconds(scheduled.request.arrived_at) + tally.total
        tally.add(WaitCause.BEFORE_SCHEDULER, nanoseconds(until) - known)
    return tally


# State of a pool, never of an account: a replica has capacity, though not for every request.
_HAS_CAPACITY = -1


class WaitUpdater:
    """Updates the wait accounts of a queue after each event.

    Attributes:
        imposed: seconds for which each tenant's requests delayed others, by the pool that served them.
    """

    def __init__(
        self,
        pools: Sequence[str],
        accounts: WaitAccounts,
        ledger: ReplicaLedger,
        isolation: PrefillIsolation,
    ) -> None:
        self._pools = pools
        self._accounts = accounts
        self._ledger = ledger
        self._isolation = isolation
        self.imposed = TenantTotals()
        # States of the pools at the last update, and the number of accounts created by then.
        self._last_update: tuple[dict[str, int], int] = {}, 0

    def __repr__(self) -> str:
        return f"<WaitUpdater {self._accounts}>"

    def on_dispatch(self, taker: ScheduledRequest, running: Running, now: float) -> None:
        """Attribute waits to a request that takes a slot. Its replica must not hold it yet."""
        replica, by_floor = running.replica, running.by_floor
        pool = replica.spec.pool
        for account in self._accounts:
            if account.pool != pool or account.state != BUSY:
                continue
            at = nanoseconds(now)
            lacking = self._lacking(account, replica, now)
            # Batch work leaves capacity to the classes above it: they are the cause.
            if lacking is None or (
                lacking is WaitCause.ENGINE_QUEUE and taker.request.priority is not PriorityClass.BATCH
            ):
                imposed = account.on_slot_taken(taker, at, by_floor=by_floor)
                self.imposed.add(pool, taker.request, imposed / 1e9)
            else:
                account.on_slot_unusable(INDEX_OF[lacking], at)

    def update(self, now: float) -> None:
        """Update what the remaining requests wait for after an event."""
        accounts = self._accounts
        if accounts.is_empty:
            return
        accounts.join(now)
        if not accounts:
            return
        states = {pool: self._pool_state(pool, now) for pool in self._pools}
        if self._last_update == (states, self._accounts.created) and _HAS_CAPACITY not in states.values():
            return
        self._last_update = states, self._accounts.created
        at = nanoseconds(now)
        for account in self._accounts:
            served = (pool for pool in account.pools if states[pool] in (BUSY, _HAS_CAPACITY))
            account.pool = next(served, "")
            account.change(self._state(account, states, now), at)

    def _state(self, account: WaitAccount, states: Mapping[str, int], now: float) -> int:
        """Return the index of what the requests of an account wait for."""
        pool = account.pool
        if not pool:
            return states[account.pools[0]] if account.pools else INDEX_OF[WaitCause.NO_REPLICA]
        if states[pool] == BUSY:
            return BUSY
        lacking = self._lacking_everywhere(account, now)
        return BUSY if lacking is None else INDEX_OF[lacking]

    def _lacking_everywhere(self, account: WaitAccount, now: float) -> WaitCause | None:
        """Return what the requests of an account lack on every replica of their pool that has capacity."""
        if (lacking := account.lacks_replica) is not None:
            return lacking
        best = self._ledger.open.best
        query = CapacityQuery(account.pool, self._tokens(account, account.pool))
        if best(query, now) is None:
            return WaitCause.KV_CACHE
        query.long_limits = self._isolation.limits(account.prefill_class, now)
        if query.long_limits and best(query, now) is None:
            return WaitCause.LONG_PREFILL
        query.is_backfill = account.priority is PriorityClass.BATCH
        if query.is_backfill and best(query, now) is None:
            return WaitCause.ENGINE_QUEUE
        return None

    def _lacking(self, account: WaitAccount, replica: ReplicaState, now: float) -> WaitCause | None:
        """Return what the requests of an account lack for a slot on a replica, or None if they fit."""
        spec = replica.spec
        if not account.destination.admits(spec.replica_id, spec.adapters):
            return account.lacks_replica
        tokens = self._tokens(account, spec.pool)
        if tokens > replica.free_tokens:
            return WaitCause.KV_CACHE
        limits = self._isolation.limits(account.prefill_class, now)
        if limits and not CapacityQuery(spec.pool, tokens, limits).allows(replica.limited_prefills):
            return WaitCause.LONG_PREFILL
        if account.priority is PriorityClass.BATCH and not self._ledger.open.admits_backfill(replica, now):
            return WaitCause.ENGINE_QUEUE
        return None

    def _tokens(self, account: WaitAccount, pool: str) -> int:
        """Return the fewest KV tokens that a request of an account needs; an idle replica always has them."""
        limit = self._ledger.context_limit(pool)
        return account.tokens if limit is None else min(account.tokens, limit)

    def _pool_state(self, pool: str, now: float) -> int:
        """Return `_HAS_CAPACITY` if the pool has capacity, else the index of the reason why not."""
        ledger = self._ledger
        if ledger.context_limit(pool) is None:
            return INDEX_OF[WaitCause.NO_REPLICA]
        if ledger.open.has_any(pool, now):
            return _HAS_CAPACITY
        if not ledger.has_alive(pool):
            return INDEX_OF[WaitCause.STALE_REPORT]
        return BUSY if ledger.has_usable(pool) else INDEX_OF[WaitCause.FAILING_REPLICAS]
