"""The watch over waits: tells the causes apart, as places in engines come free and replicas come and go.

After each event every request that still waits does so for one of these reasons, looked at in the first of
its pools that has a replica which takes requests at all:

- no pool has such a replica: none is connected, none reports, or all that do are suspended;
- none of the pool's replicas takes more now: the engines are busy. Whoever gets the next place is the cause;
  if that place could not have been its own, what it lacks is: KV cache, leave for a long prefill, an engine
  without a queue, or the replica that it wants;
- a replica would take more, and not this request: again what it lacks. No request that fits is kept waiting
  (`leaves_no_room_idle`).

Requests of one kind (`account`) are looked at together, by the smallest that is of the kind. So the cause can
be too mild by less than a factor of two in tokens: a request may lack KV cache while the places that others
take are named.
"""

from collections.abc import Mapping, Sequence

from serve_app.request import PriorityClass
from serve_app.routing.ledger import ReplicaLedger
from serve_app.routing.open_replicas import CapacityQuery
from serve_app.routing.replica_state import ReplicaState
from serve_app.scheduling.costs.tenant_totals import TenantTotals
from serve_app.scheduling.isolation.prefill_isolation import PrefillIsolation
from serve_app.scheduling.request import ScheduledRequest
from serve_app.scheduling.waits.account import BUSY, PLACE_OF, WaitAccount
from serve_app.scheduling.waits.accounts import WaitAccounts
from serve_app.scheduling.waits.causes import WaitCause, nanoseconds

# A state of a pool, never of an account: a replica takes more requests, if they are of the right kind.
_OPEN = -1


class WaitWatch:
    """Keeps the accounts of a queue up to date.

    Args:
        pools: all that there are.

    Attributes:
        imposed: seconds for which each tenant's requests have kept others waiting, by the pool they went to.
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
        # The states of pools when it last looked, and how many accounts there had been by then.
        self._looked_at: tuple[dict[str, int], int] = {}, 0

    def __repr__(self) -> str:
        return f"<WaitWatch {self._accounts}>"

    def on_dispatch(self, taker: ScheduledRequest, replica: ReplicaState, now: float) -> None:
        """A request that has left the queue takes a place on a replica, which does not hold it yet."""
        pool = replica.spec.pool
        for account in self._accounts:
            if account.pool != pool or account.state != BUSY:
                continue
            at = nanoseconds(now)
            lacking = self._lacking(account, replica, now)
            # Batch work waits for the sake of the classes above it; without them it would have gone.
            if lacking is None or (
                lacking is WaitCause.ENGINE_QUEUE and taker.request.priority is not PriorityClass.BATCH
            ):
                imposed = account.on_place_taken(taker, at)
                self.imposed.add(pool, taker.request, imposed / 1e9)
            else:
                account.on_place_unfit(PLACE_OF[lacking], at)

    def settle(self, now: float) -> None:
        """Look what those wait for that still wait after an event."""
        accounts = self._accounts
        if accounts.are_idle:
            return
        accounts.join(now)
        if not accounts:
            return
        states = {pool: self._pool_state(pool, now) for pool in self._pools}
        if self._looked_at == (states, self._accounts.opened) and _OPEN not in states.values():
            return
        self._looked_at = states, self._accounts.opened
        at = nanoseconds(now)
        for account in self._accounts:
            served = (pool for pool in account.pools if states[pool] in (BUSY, _OPEN))
            account.pool = next(served, "")
            account.change(self._state(account, states, now), at)

    def _state(self, account: WaitAccount, states: Mapping[str, int], now: float) -> int:
        """What the requests of a kind wait for."""
        pool = account.pool
        if not pool:
            return states[account.pools[0]] if account.pools else PLACE_OF[WaitCause.NO_REPLICA]
        if states[pool] == BUSY:
            return BUSY
        lacking = self._lacking_everywhere(account, now)
        return BUSY if lacking is None else PLACE_OF[lacking]

    def _lacking_everywhere(self, account: WaitAccount, now: float) -> WaitCause | None:
        """What keeps the requests of a kind from the replicas of their pool that take more."""
        if account.is_particular:
            return WaitCause.PARTICULAR_REPLICA
        best = self._ledger.open.best
        query = CapacityQuery(account.pool, self._tokens(account, account.pool))
        if best(query, now) is None:
            return WaitCause.KV_CACHE
        query.long_limits = self._isolation.limits(account.prefill_class, now)
        if query.long_limits and best(query, now) is None:
            return WaitCause.LONG_PREFILL
        query.needs_empty_engine_queue = account.priority is PriorityClass.BATCH
        if query.needs_empty_engine_queue and best(query, now) is None:
            return WaitCause.ENGINE_QUEUE
        return None

    def _lacking(self, account: WaitAccount, replica: ReplicaState, now: float) -> WaitCause | None:
        """What kept the requests of a kind from a place on a replica; None when they could have had it."""
        spec = replica.spec
        if not account.destination.admits(spec.replica_id, spec.adapters):
            return WaitCause.PARTICULAR_REPLICA
        tokens = self._tokens(account, spec.pool)
        if tokens > replica.free_tokens:
            return WaitCause.KV_CACHE
        limits = self._isolation.limits(account.prefill_class, now)
        if limits and not CapacityQuery(spec.pool, tokens, limits).allows(replica.long_prefills):
            return WaitCause.LONG_PREFILL
        if account.priority is PriorityClass.BATCH and not self._ledger.open.has_empty_queue(replica):
            return WaitCause.ENGINE_QUEUE
        return None

    def _tokens(self, account: WaitAccount, pool: str) -> int:
        """KV tokens that a request of this kind needs at least; an idle replica always has them."""
        limit = self._ledger.context_limit(pool)
        return account.tokens if limit is None else min(account.tokens, limit)

    def _pool_state(self, pool: str, now: float) -> int:
        """Whether a pool takes anything, and if not, why."""
        ledger = self._ledger
        if ledger.context_limit(pool) is None:
            return PLACE_OF[WaitCause.NO_REPLICA]
        if ledger.open.has_any(pool, now):
            return _OPEN
        if not ledger.has_alive(pool):
            return PLACE_OF[WaitCause.STALE_REPORT]
        return BUSY if ledger.has_usable(pool) else PLACE_OF[WaitCause.FAILING_REPLICAS]
