"""Wait accounts: the time of all waiting requests of one kind by cause, at the cost of one.

Requests of one kind wait for the same: of one class, for the same pools, with prefills of one class, and
about as large. So an account adds up the time since it exists by cause, and a request notes the sums when it
begins to wait. The differences at its end are its own wait. All sums are whole nanoseconds, so what is taken
apart adds up again exactly.

While engines are busy the cause is not known before the next place comes free: whoever gets it is what the
others have waited for. That time is *open* until then. A request that came in the middle of it (a newcomer)
has the part before its arrival taken off once the cause is known.
"""

from serve_app.request import ANYWHERE, Destination, PriorityClass
from serve_app.routing.replica_state import PrefillClass
from serve_app.scheduling.request import ScheduledRequest
from serve_app.scheduling.waits.causes import WaitCause
from serve_app.scheduling.waits.tally import WaitTally

# Places of the sums in an account: first those of places that others took, by the rank of their class.
BUSY = len(PriorityClass)
_STATES = (
    WaitCause.ENGINES_BUSY,
    WaitCause.LONG_PREFILL,
    WaitCause.KV_CACHE,
    WaitCause.ENGINE_QUEUE,
    WaitCause.PARTICULAR_REPLICA,
    WaitCause.NO_REPLICA,
    WaitCause.STALE_REPORT,
    WaitCause.FAILING_REPLICAS,
)
PLACE_OF = {cause: BUSY + number for number, cause in enumerate(_STATES)}
# After the sums come the counts of places that others took, by the rank of their class.
_COUNTS = BUSY + len(_STATES)
_LENGTH = _COUNTS + len(PriorityClass)
# Below so many tokens a request is never kept waiting by the size of a KV cache alone.
_SMALL_TOKENS_BITS = 12

WaitAccountKey = tuple[PriorityClass, tuple[str, ...], PrefillClass, int, Destination]
"""Class, pools, prefill class, number of bits of its tokens, and the destination."""


def key_of(scheduled: ScheduledRequest) -> WaitAccountKey:
    """The kind of a waiting request."""
    request = scheduled.request
    bits = max(_SMALL_TOKENS_BITS, scheduled.estimate.expected_tokens.bit_length())
    return request.priority, scheduled.pools, scheduled.prefill_class, bits, request.destination


class WaitAccount:
    """The account of one kind.

    Attributes:
        key: the kind.
        tokens: the fewest that a request of this kind needs.
        pool: the pool whose places its requests wait for now; empty while none has any.
        state: what they wait for now, as a place among the sums.
        waiting: how many wait.
    """

    __slots__ = (
        "_newcomers",
        "_own",
        "_since",
        "_sums",
        "_tenants",
        "destination",
        "key",
        "pool",
        "pools",
        "prefill_class",
        "priority",
        "state",
        "tokens",
        "waiting",
    )

    def __init__(self, key: WaitAccountKey, now: int) -> None:
        self.key = key
        self.priority, self.pools, self.prefill_class, bits, self.destination = key
        self.tokens = 1 << (bits - 1) if bits > _SMALL_TOKENS_BITS else 1
        self.pool = ""
        self.state = BUSY
        self.waiting = 0
        self._since = now
        self._sums = [0] * _LENGTH
        # Of each tenant, the time and number of the places that it took.
        self._own: dict[str, tuple[int, int]] = {}
        self._tenants: dict[str, int] = {}
        self._newcomers: dict[ScheduledRequest, int] = {}

    @property
    def cause(self) -> WaitCause:
        """What its requests wait for now."""
        return _STATES[self.state - BUSY]

    @property
    def is_particular(self) -> bool:
        """Whether only some replicas will do for its requests."""
        return self.destination is not ANYWHERE

    def join(self, scheduled: ScheduledRequest, tally: WaitTally, now: int) -> None:
        """A request begins to wait."""
        open_ns = now - self._since
        if open_ns and self.state == BUSY:
            self._newcomers[scheduled] = open_ns
        elif open_ns:
            self._close(self.state, now)
        tenant = scheduled.request.tenant
        tally.account = self
        tally.sums = self._sums.copy()
        tally.own = self._own.get(tenant, (0, 0))
        self.waiting += 1
        self._tenants[tenant] = self._tenants.get(tenant, 0) + 1

    def leave(self, scheduled: ScheduledRequest, tally: WaitTally, now: int) -> None:
        """A request waits no more: divide its wait."""
        self.divide(scheduled, tally, now)
        self._newcomers.pop(scheduled, None)
        tally.account, tally.sums = None, []
        self._leave(scheduled.request.tenant)

    def divide(self, scheduled: ScheduledRequest, tally: WaitTally, now: int) -> None:
        """Add to a tally what the request has waited for since it joined; the account stays as it is."""
        tenant, rank = scheduled.request.tenant, self.priority.rank
        before_ns = self._newcomers.get(scheduled, 0)
        gained = [now_ns - then_ns for now_ns, then_ns in zip(self._sums, tally.sums, strict=True)]
        gained[self.state] += now - self._since - (before_ns if self.state == BUSY else 0)
        own_ns, own_count = self._own.get(tenant, (0, 0))
        own_ns, own_count = own_ns - tally.own[0], own_count - tally.own[1]
        for other in range(BUSY):
            cause = _taken_by(other, rank)
            tally.add(cause, gained[other] - (own_ns if other == rank else 0))
            tally.add_ahead(cause, gained[_COUNTS + other] - (own_count if other == rank else 0))
        tally.add(WaitCause.OWN_REQUESTS, own_ns)
        tally.add_ahead(WaitCause.OWN_REQUESTS, own_count)
        for number, cause in enumerate(_STATES, start=BUSY):
            if gained[number]:
                tally.add(cause, gained[number])

    def on_place_taken(self, taker: ScheduledRequest, now: int) -> int:
        """A request of any class took a place that these could have had.

        Returns:
            The delay that it imposed on other tenants' requests of this kind: nanoseconds, over all of them.
        """
        rank, tenant = taker.request.priority.rank, taker.request.tenant
        open_ns = now - self._since
        is_own_class = rank == self.priority.rank
        for newcomer, before_ns in self._newcomers.items():
            if is_own_class and newcomer.request.tenant == tenant and (tally := newcomer.waits) is not None:
                tally.own = tally.own[0] + before_ns, tally.own[1]
        imposed = open_ns * (self.waiting - self._tenants.get(tenant, 0)) - sum(
            before_ns for each, before_ns in self._newcomers.items() if each.request.tenant != tenant
        )
        self._close(rank, now)
        self._sums[_COUNTS + rank] += 1
        if is_own_class and tenant in self._tenants:
            taken_ns, count = self._own.get(tenant, (0, 0))
            self._own[tenant] = taken_ns + open_ns, count + 1
        return imposed

    def on_place_unfit(self, state: int, now: int) -> None:
        """A place was taken that these could not have had, for the reason of that state."""
        self._close(state, now)

    def change(self, state: int, now: int) -> None:
        """They wait for something else from now on."""
        if state != self.state:
            self._close(self.state, now)
            self.state = state

    def _close(self, place: int, now: int) -> None:
        """The time since the last change has this cause."""
        self._sums[place] += now - self._since
        self._since = now
        if self._newcomers:
            for newcomer, before_ns in self._newcomers.items():
                if newcomer.waits is not None:
                    newcomer.waits.sums[place] += before_ns
            self._newcomers.clear()

    def _leave(self, tenant: str) -> None:
        self.waiting -= 1
        left = self._tenants[tenant] - 1
        if left:
            self._tenants[tenant] = left
        else:
            del self._tenants[tenant]
            # Nobody compares with it any more.
            self._own.pop(tenant, None)

    def __repr__(self) -> str:
        pools = "/".join(self.pools)
        return f"<WaitAccount {self.priority} {pools} from {self.tokens} tokens: {self.waiting} waiting>"


def _taken_by(rank: int, own_rank: int) -> WaitCause:
    """The cause where a request of one class took the place of one of another."""
    if rank == own_rank:
        return WaitCause.OTHER_TENANTS
    return WaitCause.HIGHER_CLASS if rank < own_rank else WaitCause.LOWER_CLASS
