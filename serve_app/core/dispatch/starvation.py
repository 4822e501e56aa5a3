"""Rules against starvation: promotion after a long wait, capacity reservations, and class floors.

A request is promoted after `max_wait_s`. Under lasting overload every request has waited too long, and
promoting them all would turn any policy into FCFS. So at most `promoted_share` of all dispatches are
promotions. The resulting bound: a request is dispatched at most `max_wait_s` after its arrival, plus the time
of `(requests promoted before it + 1) / promoted_share` dispatches.

Source: ours; the proof of EWSJF that no request starves (Theorem A.1) gives no usable bound.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.core.settings_base import POSITIVE, POSITIVE_SHARE, between, settings
from serve_app.request import PriorityClass

# Promotions that may be saved up while no request needs one.
_SAVED = 4.0
# A request that claimed a retry reservation was promised service in time. It is promoted after this share of
# its queue timeout, whatever its score. The rest of the timeout is for its wait among promoted requests.
_CLAIMED_SHARE = 0.5


@settings(block="promotion")
class PromotionSettings:
    """Seconds after which a request of each class is promoted, and the share of promotions."""

    # Longer than any length queue waits below saturation, shorter than the patience of people and programs.
    interactive_s: Annotated[float, POSITIVE] = 15.0
    # Programs wait longer than people.
    default_s: Annotated[float, POSITIVE] = 60.0
    # Half an hour: batch work may wait for idle capacity, but not for ever.
    batch_s: Annotated[float, POSITIVE] = 1_800.0
    # A fifth of the dispatches at most: short requests keep the rest in overload.
    promoted_share: Annotated[float, POSITIVE_SHARE] = 0.2

    def max_wait_s(self, priority: PriorityClass) -> float:
        """Seconds after which a request of this class is promoted."""
        seconds: float = getattr(self, f"{priority.value}_s")
        return seconds


class Promotion:
    """Chooses the request to promote, as often as is allowed."""

    def __init__(self, settings: PromotionSettings) -> None:
        self._settings = settings
        self._max_wait_s = {priority: settings.max_wait_s(priority) for priority in PriorityClass}
        self._allowed = 1.0

    @property
    def is_due(self) -> bool:
        """Whether a request may be promoted now."""
        return self._allowed >= 1.0

    def first(self, heads: Iterable[ScheduledRequest], now: float) -> ScheduledRequest | None:
        """The overdue head that arrived first; None when none is overdue."""
        overdue = [head for head in heads if self.is_overdue(head, now)]
        return min(overdue, key=lambda head: (head.request.arrived_at, head.sequence), default=None)

    def on_dispatch(
        self, scheduled: ScheduledRequest, now: float, *, capacity_was_reserved: bool = False
    ) -> None:
        """Count a dispatch.

        Args:
            capacity_was_reserved: others were held back for it, and are dispatched before the next promotion.
        """
        if capacity_was_reserved:
            self._allowed = 0.0
        elif self._allowed >= 1.0 and self.is_overdue(scheduled, now):
            self._allowed -= 1.0
        self._allowed = min(_SAVED, self._allowed + self._settings.promoted_share)

    def overdue_at(self, scheduled: ScheduledRequest) -> float:
        """When the request will have waited as long as its class, or its claimed reservation, allows."""
        request = scheduled.request
        wait_s = self._max_wait_s[request.priority]
        if scheduled.claimed:
            wait_s = min(wait_s, _CLAIMED_SHARE * (request.expires_at - request.arrived_at))
        return request.arrived_at + wait_s

    def is_overdue(self, scheduled: ScheduledRequest, now: float) -> bool:
        """Whether the request has waited longer than allowed."""
        return now > self.overdue_at(scheduled)


# Capacity reservations: KV cache kept free for a request that is owed service, and fits no replica.
#
# Without one, smaller requests take each bit of capacity as it becomes free, and a request that needs most of
# a KV cache never fits. So a promoted request, or the next of a tenant that is behind its share
# (`fairness`), gets a reservation if it fits nowhere in its pool. It is on the replica that lacks least for
# it, which takes no other request that would need the reserved tokens until this one fits. Each pool has at
# most one reservation, which lasts as long as its request waits.
#
# The cost is capacity that stays idle meanwhile. It is bounded by the rate of promotions, of which none are
# saved up while a reservation stands, and by what fair shares owe a tenant.
#
# Source: ours, after reservations under backfilling (Lifka, "The ANL/IBM SP scheduling system", 1995).


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


# Class floors: the least share of dispatches that a lower priority class gets while it waits.
#
# Interactive is dispatched before default, and default before batch. But of every hundred dispatches made
# while a lower class waits, that class gets its floor share. Credit for them is saved up to a small bound.


# Dispatches that a class may save up; more would be a burst ahead of the higher classes.
_SAVED_DISPATCHES = 2.0


@settings(block="class_floors")
class ClassFloorSettings:
    """Least shares of the dispatches while the class waits."""

    # A tenth is enough that no program times out behind a flood of interactive requests.
    default_share: Annotated[float, between(0, 0.5)] = 0.1
    # Batch work has to progress, not to finish soon.
    batch_share: Annotated[float, between(0, 0.5)] = 0.02

    def share(self, priority: PriorityClass) -> float:
        """Floor share of one class; that of the highest is 0, since no class is dispatched before it."""
        shares = {PriorityClass.DEFAULT: self.default_share, PriorityClass.BATCH: self.batch_share}
        return shares.get(priority, 0.0)


class ClassFloors:
    """Counts the dispatches of each class, and names the classes that are owed one."""

    def __init__(self, settings: ClassFloorSettings) -> None:
        self._settings = settings
        self._credit = dict.fromkeys(PriorityClass, 0.0)

    def owed(self) -> list[PriorityClass]:
        """Classes that have earned a dispatch before the others, the highest first."""
        return [priority for priority, credit in self._credit.items() if credit >= 1.0]

    def on_dispatch(self, priority: PriorityClass, waiting: Iterable[PriorityClass]) -> None:
        """A request of a class was dispatched while the `waiting` classes waited."""
        if self._credit[priority] >= 1.0:
            self._credit[priority] -= 1.0
        for other in waiting:
            if other is not priority:
                credit = self._credit[other] + self._settings.share(other)
                self._credit[other] = min(_SAVED_DISPATCHES, credit)
