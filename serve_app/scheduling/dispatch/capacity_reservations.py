"""Capacity reservations: KV cache kept free for a request that is owed service, and fits no replica.

Without one, smaller requests take each bit of capacity as it becomes free, and a request that needs most of a
KV cache never fits. So a promoted request (`promotion`), or the next of a tenant that is behind its share
(`fairness`), gets a reservation if it fits nowhere in its pool. It is on the replica that lacks least for it,
which takes no other request that would need the reserved tokens until this one fits. Each pool has at most
one reservation, which lasts as long as its request waits.

The cost is capacity that stays idle meanwhile. It is bounded by the rate of promotions, of which none are
saved up while a reservation stands, and by what fair shares owe a tenant.

Source: ours, after reservations under backfilling (Lifka, "The ANL/IBM SP scheduling system", 1995).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.routing.ledger import ReplicaLedger
from serve_app.routing.replica_state import ReplicaState
from serve_app.scheduling.request import ScheduledRequest


@dataclass(slots=True)
class CapacityReservation:
    """KV tokens that are kept free on one replica."""

    scheduled: ScheduledRequest
    replica: ReplicaState
    tokens: int


class CapacityReservations:
    """The reservations, at most one for each pool."""

    def __init__(self, ledger: ReplicaLedger) -> None:
        self._ledger = ledger
        self._by_pool: dict[str, CapacityReservation] = {}

    def __repr__(self) -> str:
        reserved = {each.scheduled.request.request_id: each.replica.spec.replica_id for each in self}
        return f"<CapacityReservations {reserved}>"

    def __iter__(self) -> Iterator[CapacityReservation]:
        return iter(self._by_pool.values())

    def of(self, pool: str) -> CapacityReservation | None:
        """The reservation of a pool."""
        return self._by_pool.get(pool)

    def prune(self, now: float) -> None:
        """Drop the reservations of requests that no longer wait."""
        if not self._by_pool:
            return
        for pool, reservation in list(self._by_pool.items()):
            if not reservation.scheduled.queued or reservation.scheduled.pools[:1] != (pool,):
                self._drop(pool, now)

    def lift(self, pool: str, now: float) -> ScheduledRequest | None:
        """Count the reserved tokens as free, to see whether their request fits now; returns that request."""
        reservation = self._by_pool.get(pool)
        if reservation is None:
            return None
        self._ledger.reserve(reservation.replica, 0, now)
        return reservation.scheduled

    def reserve(self, scheduled: ScheduledRequest, pool: str, tokens: int, now: float) -> None:
        """Reserve tokens for a request, where it had them before or where least is lacking.

        A reservation that the pool had for another request is dropped.
        """
        reservation = self._by_pool.get(pool)
        if reservation is None or reservation.scheduled is not scheduled or not reservation.replica.is_usable:
            replica = self._ledger.most_free(pool, scheduled.request.destination)
            if reservation is not None:
                self._drop(pool, now)
            if replica is None:
                return
            reservation = self._by_pool[pool] = CapacityReservation(scheduled, replica, tokens)
        reservation.tokens = tokens
        self._ledger.reserve(reservation.replica, tokens, now)

    def on_dispatch(self, scheduled: ScheduledRequest, now: float) -> bool:
        """Drop the reservations of a request that was dispatched; whether it had any."""
        if not self._by_pool:
            return False
        pools = [pool for pool, each in self._by_pool.items() if each.scheduled is scheduled]
        for pool in pools:
            self._drop(pool, now)
        return bool(pools)

    def _drop(self, pool: str, now: float) -> None:
        self._ledger.reserve(self._by_pool.pop(pool).replica, 0, now)
