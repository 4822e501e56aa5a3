"""Starvation bounds: promotion after a long wait, capacity reservations, and class floors.

A request is promoted after the `max_wait_s` of its class: it is first in its tenant's turn. It passes no
tenant whose turn is earlier, because the backlog of one tenant would otherwise delay all others. In sustained
overload every request exceeds its bound, and promoting all of them would turn any policy into FCFS. So at
most `promoted_share` of a tenant's dispatches are promotions. The resulting bound: a request is dispatched at
most `max_wait_s` after its arrival, plus the time of `(own requests promoted before it + 1) / promoted_share`
dispatches of its tenant. The time between these dispatches follows from the tenant's share (`fairness`).

Source: ours; the proof of EWSJF that no request starves (Theorem A.1) gives no usable bound.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.core.settings_base import POSITIVE, POSITIVE_SHARE, between, settings
from serve_app.request import PriorityClass

if TYPE_CHECKING:
    from serve_app.core.queueing.request_queue import RequestQueue

# Promotions that accumulate while no request needs one.
_SAVED = 4.0
# Share of the queue timeout after which a request with a claimed retry reservation is promoted, whatever its
# score, because it was promised service in time. The rest is for its wait among promoted requests.
_CLAIMED_SHARE = 0.5


@settings(block="promotion")
class PromotionSettings:
    """Starvation bound of each class, in seconds, and the share of promotions."""

    # Longer than any length queue waits below saturation, shorter than users and programs wait.
    interactive_s: Annotated[float, POSITIVE] = 15.0
    # Programs wait longer than users.
    default_s: Annotated[float, POSITIVE] = 60.0
    # Half an hour: batch work may wait for idle capacity, but not indefinitely.
    batch_s: Annotated[float, POSITIVE] = 1_800.0
    # At most a fifth of a tenant's dispatches: its short requests retain the rest in overload.
    promoted_share: Annotated[float, POSITIVE_SHARE] = 0.2

    def max_wait_s(self, priority: PriorityClass) -> float:
        """Return the seconds after which a request of this class is promoted."""
        seconds: float = getattr(self, f"{priority.value}_s")
        return seconds


class Promotion:
    """Selects the requests to promote, at a bounded rate for each tenant and class."""

    def __init__(self, settings: PromotionSettings, queue: "RequestQueue") -> None:
        self._settings = settings
        self._queue = queue
        self._max_wait_s = {priority: settings.max_wait_s(priority) for priority in PriorityClass}

    def among(self, turn: Iterable[ScheduledRequest], now: float) -> list[ScheduledRequest]:
        """Return the requests to promote: the oldest beyond its bound of each tenant that is due."""
        starved = sorted((head for head in turn if now > head.starved_at), key=_by_arrival)
        oldest: dict[str, ScheduledRequest] = {}
        for head in starved:
            oldest.setdefault(head.request.tenant, head)
        return [head for head in oldest.values() if self._is_due(head)]

    def on_dispatch(
        self, scheduled: ScheduledRequest, now: float, *, capacity_was_reserved: bool = False
    ) -> None:
        """Count a dispatch of a tenant. The count ends with its backlog.

        Args:
            capacity_was_reserved: capacity was withheld from others for it; they precede the next promotion.
        """
        tenant = self._queue.tenant_queues(scheduled.request)
        if tenant is None:
            return
        if capacity_was_reserved:
            tenant.promotions = 0.0
        elif tenant.promotions >= 1.0 and now > scheduled.starved_at:
            tenant.promotions -= 1.0
        tenant.promotions = min(_SAVED, tenant.promotions + self._settings.promoted_share)

    def starved_at(self, scheduled: ScheduledRequest) -> float:
        """Return the time at which the wait reaches the bound of the class or of the claimed reservation."""
        request = scheduled.request
        wait_s = self._max_wait_s[request.priority]
        if scheduled.claimed:
            wait_s = min(wait_s, _CLAIMED_SHARE * (request.expires_at - request.arrived_at))
        return request.arrived_at + wait_s

    def _is_due(self, head: ScheduledRequest) -> bool:
        tenant = self._queue.tenant_queues(head.request)
        return tenant is not None and tenant.promotions >= 1.0


def _by_arrival(head: ScheduledRequest) -> tuple[float, int]:
    return (head.request.arrived_at, head.sequence)


# Capacity reservations: KV tokens reserved for a queued request that is owed service and fits no replica.
#
# Without a reservation, smaller requests use all capacity as it becomes free, and a request that needs most
# of a KV cache never fits. A promoted request, or the next one of a tenant behind its share (`fairness`),
# therefore gets a reservation if it fits nowhere in its pool. The reservation is on the replica where it
# lacks the fewest tokens. That replica accepts no other request that needs the reserved tokens until this one
# fits. Each pool has at most one reservation, which lasts as long as its request waits.
#
# The cost is idle capacity. It is bounded by the rate of promotions, which do not accumulate while a
# reservation exists, and by what fair shares owe a tenant.
#
# Source: ours, after reservations under backfilling (Lifka, "The ANL/IBM SP scheduling system", 1995).


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


# Class floors: the minimum share of dispatches of a lower class while it has queued requests.
#
# Higher classes are dispatched first. But of the dispatches made while a lower class waits, it gets its floor
# share, or the share of promotions while one of its requests is beyond its starvation bound. Credit for them
# accumulates up to a small bound.


# Maximum credit of a class; more would be a burst ahead of the higher classes.
_SAVED_DISPATCHES = 2.0


@settings(block="class_floors")
class ClassFloorSettings:
    """Minimum shares of the dispatches while a class has queued requests."""

    # Share of the default class. A tenth prevents timeouts behind a flood of interactive requests.
    default_share: Annotated[float, between(0, 0.5)] = 0.1
    # Share of the batch class. It ensures progress, not early completion.
    batch_share: Annotated[float, between(0, 0.5)] = 0.02

    def share(self, priority: PriorityClass) -> float:
        """Return the floor share of a class. That of the highest class is 0, as no class precedes it."""
        shares = {PriorityClass.DEFAULT: self.default_share, PriorityClass.BATCH: self.batch_share}
        return shares.get(priority, 0.0)


class ClassFloors:
    """Counts the dispatches of each class, and determines which classes are owed one."""

    def __init__(self, settings: ClassFloorSettings, promoted_share: float = 0.0) -> None:
        self._settings = settings
        self._promoted_share = promoted_share
        self._credit = dict.fromkeys(PriorityClass, 0.0)

    def owed(self) -> list[PriorityClass]:
        """Return the classes that are owed a dispatch before the others, the highest first."""
        return [priority for priority, credit in self._credit.items() if credit >= 1.0]

    def on_dispatch(
        self,
        priority: PriorityClass,
        waiting: Iterable[PriorityClass],
        starved: Collection[PriorityClass] = (),
    ) -> None:
        """Count a dispatch of one class while the `waiting` classes have queued requests.

        Args:
            starved: classes with a request beyond its starvation bound.
        """
        if self._credit[priority] >= 1.0:
            self._credit[priority] -= 1.0
        for other in waiting:
            if other is not priority:
                promoted_share = self._promoted_share if other in starved else 0.0
                credit = self._credit[other] + max(self._settings.share(other), promoted_share)
                self._credit[other] = min(_SAVED_DISPATCHES, credit)
