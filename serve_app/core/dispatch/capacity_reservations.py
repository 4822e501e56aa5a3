"""Capacity reservations: KV tokens reserved for a queued request that is owed service and fits no replica.

Without a reservation, smaller requests use all capacity as it becomes free, and a request that needs most
of a KV cache never fits. A promoted request, or the next one of a tenant behind its share (`fairness`),
therefore gets a reservation if it fits nowhere in its pool. The reservation is on the replica where it
lacks the fewest tokens. That replica accepts no other request that needs the reserved tokens until this one
fits. Each pool has at most one reservation, which lasts as long as its request waits.

The cost is idle capacity. It is bounded by the rate of promotions, which do not accumulate while a
reservation exists, and by what fair shares owe a tenant.

Source: ours, after reservations under backfilling (Lifka, "The ANL/IBM SP scheduling system", 1995).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.replica_state import ReplicaState


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
