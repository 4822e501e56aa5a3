"""Retry reservations: work of rejected requests, reserved for the time at which each client should retry.

A rejected request gets a `Retry-After` after which it could be admitted, and its work is reserved for that
time. Reserved work counts as ahead of newcomers. Requests rejected later therefore get later times, and
newcomers do not use the capacity that was promised. In effect all clients share one queue, of which the
scheduler stores only the front.

A request that retries is recognised by its tenant, its class and the shape of its prompt (`_key`). It claims
its reservation, so its work does not count twice. Reservations that are not claimed in time expire. Because
clients that never retry would delay all others, reserved work is weighted by the recent claim rate.

A queue limit is modelled as a fluid queue: a level, a limit, one drain rate, and inflow at the times of the
reservations (`admissible_in_s`).

Source: ours; virtual queues as in telephone call-back systems, and the textbook fluid queue.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.request import PromptShape, Request

# Resolution of the due times, in seconds.
_SLOT_S = 0.5
# Reserved work counts for more than its estimate, so that reservations alone do not reach the limit. Errors
# of the estimate then delay newcomers instead of clients with a reservation.
_WEIGHT = 1.25
# Minimum share of Retry-After before a claim. Without it, the later requests of a burst of similar ones would
# claim the reservations of the earlier ones.
_MIN_WAIT_SHARE = 0.5
# Weight of one reservation in the claim rate: an average over about the last thirty.
_CLAIM_WEIGHT = 1 / 32

_Key = tuple[str, int, PromptShape, int | None, int, tuple[int, ...]]
_Group = tuple[int, str]
# How early a reservation can be claimed. Clients that round Retry-After to whole seconds retry up to a second
# late, never early.
_EARLY_S = 0.25
# How long an unclaimed reservation is valid after it is due.
_GRACE_S = 3.0
# Bound on memory, about 0.5 KB each; twice the default of `max_waiting`.
_MAX_RESERVATIONS = 4_000


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """A queue modelled as a fluid, and its limit.

    Attributes:
        level: current content, in any unit.
        drain_per_s: content that leaves per second.
        limit: maximum content at which one more request may join.
    """

    level: float
    drain_per_s: float
    limit: float


@dataclass(slots=True, eq=False, kw_only=True)
class _RetryReservation:
    """The expected retry of one request."""

    key: _Key
    due_at: float
    claimable_at: float
    rank: int
    tenant: str
    tokens: int


@dataclass(slots=True)
class ReservedWork:
    """The reservations of one tenant and class that are due in the same time slot."""

    rank: int
    tenant: str
    count: int = 0
    tokens: int = 0


class RetryReservations:
    """The expected retries of rejected requests; `claim_rate` is the share recently claimed."""

    def __init__(self) -> None:
        self._by_key: dict[_Key, list[_RetryReservation]] = {}
        self._slots: dict[int, dict[_Group, ReservedWork]] = {}
        self._in_slot: dict[int, list[_RetryReservation]] = {}
        self._count = 0
        self.claim_rate = 1.0

    def __len__(self) -> int:
        return self._count

    def reserve(self, request: Request, tokens: int, after_s: float, now: float) -> bool:
        """Reserve work for a retry in `after_s` seconds. Return False at the maximum of reservations."""
        if self._count >= _MAX_RESERVATIONS:
            return False
        due_at = now + after_s
        reservation = _RetryReservation(
            key=_key(request),
            due_at=due_at,
            claimable_at=max(due_at - _EARLY_S, now + _MIN_WAIT_SHARE * after_s),
            rank=request.priority.rank,
            tenant=request.tenant,
            tokens=tokens,
        )
        slot = _slot(due_at)
        self._by_key.setdefault(reservation.key, []).append(reservation)
        self._in_slot.setdefault(slot, []).append(reservation)
        groups = self._slots.setdefault(slot, {})
        group = groups.setdefault(
            (reservation.rank, reservation.tenant), ReservedWork(reservation.rank, reservation.tenant)
        )
        group.count += 1
        group.tokens += tokens
        self._count += 1
        return True

    def claim(self, request: Request, now: float) -> bool:
        """Claim a due reservation of a request that retries. Return whether there was one."""
        if not self._count:
            return False
        due = [each for each in self._by_key.get(_key(request), ()) if each.claimable_at <= now]
        if not due:
            return False
        reservation = min(due, key=lambda each: each.due_at)
        self._in_slot[_slot(reservation.due_at)].remove(reservation)
        self._remove(reservation)
        self.claim_rate += _CLAIM_WEIGHT * (1.0 - self.claim_rate)
        return True

    def expire(self, now: float) -> None:
        """Remove the reservations that were not claimed in time."""
        if not self._in_slot:
            return
        last = _slot(now - _GRACE_S) - 1
        for slot in [slot for slot in self._in_slot if slot <= last]:
            for reservation in self._in_slot[slot]:
                self._remove(reservation)
                self.claim_rate -= _CLAIM_WEIGHT * self.claim_rate
            del self._in_slot[slot]

    def admissible_in_s(
        self, queue: QueueLimit, work_of: Callable[[ReservedWork], float], now: float
    ) -> float:
        """Return the seconds until one more request may join without breaking the limit for reserved ones.

        Args:
            work_of: returns how much reserved work adds to the queue, in its unit. It is called in the order
                of due times.

        Returns:
            0.0 if it may join now. Infinity if the queue is above its limit and does not drain.
        """
        level, at_s = queue.level, 0.0
        admissible_in_s, weight = _until_limit_s(level, queue), _WEIGHT
        for slot in sorted(self._slots):
            due_s = max(0.0, slot * _SLOT_S - now)
            level = max(0.0, level - queue.drain_per_s * (due_s - at_s))
            at_s, joins = due_s, False
            # This loop dominates the cost of a rejection if many tenants are rejected.
            for reserved in self._slots[slot].values():
                work = work_of(reserved) * self.claim_rate * weight
                if work > 0:
                    level, joins = level + work, True
            if joins and level > queue.limit:
                admissible_in_s = at_s + _until_limit_s(level, queue)
        return admissible_in_s

    def _remove(self, reservation: _RetryReservation) -> None:
        same = self._by_key[reservation.key]
        same.remove(reservation)
        if not same:
            del self._by_key[reservation.key]
        groups = self._slots[_slot(reservation.due_at)]
        group = groups[reservation.rank, reservation.tenant]
        group.count -= 1
        group.tokens -= reservation.tokens
        if not group.count:
            del groups[reservation.rank, reservation.tenant]
        if not groups:
            del self._slots[_slot(reservation.due_at)]
        self._count -= 1

    def __repr__(self) -> str:
        return f"<RetryReservations {self._count}, claim rate {self.claim_rate:.0%}>"


def fair_tokens(request: Request, own_tokens: float) -> Callable[[ReservedWork], float]:
    """Return a function for the tokens that reserved work puts ahead of `request` under fair shares.

    All work of higher classes and of the same tenant is ahead. Of each other tenant of its class, at most as
    much as its own tenant has is ahead.

    Args:
        own_tokens: tokens that its tenant has queued, this request included.
    """
    own, rank, tenant = own_tokens, request.priority.rank, request.tenant
    counted: dict[str, float] = {}

    def work_of(reserved: ReservedWork) -> float:
        nonlocal own
        tokens = reserved.tokens
        if reserved.rank != rank:
            return float(tokens) if reserved.rank < rank else 0.0
        if reserved.tenant == tenant:
            own += tokens
            return float(tokens)
        before = counted.get(reserved.tenant, 0.0)
        if before >= own:
            # Fair shares serve the other tenant no more than this one, whatever else is reserved.
            return 0.0
        after = counted[reserved.tenant] = min(before + tokens, own)
        return after - before

    return work_of


def _until_limit_s(level: float, queue: QueueLimit) -> float:
    """Return the seconds until a level has drained to the limit if nothing joins."""
    if level <= queue.limit:
        return 0.0
    return (level - queue.limit) / queue.drain_per_s if queue.drain_per_s > 0 else math.inf


def _slot(at: float) -> int:
    return math.floor(at / _SLOT_S)


def _key(request: Request) -> _Key:
    """Return what identifies a request that retries; its request id is new."""
    return (
        request.tenant,
        request.priority.rank,
        request.shape,
        request.spec.max_output_tokens,
        request.spec.choices,
        request.submission.prefix,
    )
