"""Whom did we tell to come again, when, and with how much work?

A refused request is told when it would be let in, and that work is *reserved* at that time. ReservedWork work counts
as ahead of whoever comes meanwhile, so those refused later are told later times, and newcomers do not take
the room that was promised. In effect clients stand in one line, of which only the front is in the queue.

A request that comes back is known by what it asks (`_key`): its tenant, class, and the shape of its prompt.
It claims its reservation then, so its work does not count twice. Who does not come within a while has lost the
reservation. Clients that never come back would hold up everybody, so reserved work counts by the share of reservations
that were claimed lately.

The line is judged as a fluid: it holds so much, drains at one pace, and what is reserved joins it at its time
(`admissible_in_s`).

Source: ours. Virtual queues as in telephone call-back systems, and the fluid queue of any textbook.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from serve_app.request import PromptShape, Request
from serve_app.scheduling.admission.settings import AdmissionSettings

# RetryReservations of so many seconds are looked at as one.
_SLOT_S = 0.5
# ReservedWork work counts for more than it is, so that reservations alone do not fill the line: estimates waver, and
# what they were short of must be made up. Newcomers get what is left.
_WEIGHT = 1.25
# Weight of one reservation in the share that is claimed: the last thirty or so count.
_CLAIM_WEIGHT = 1 / 32

_Key = tuple[str, int, PromptShape, int | None, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Line:
    """Something to wait in.

    Attributes:
        ahead: what it holds now, in any unit.
        per_s: how much of that leaves per second.
        limit: how much it may hold at most before one more.
    """

    ahead: float
    per_s: float
    limit: float


@dataclass(slots=True, eq=False)
class _RetryReservation:
    """The expected return of one request."""

    key: _Key
    due_at: float
    rank: int
    tenant: str
    tokens: int


@dataclass(slots=True)
class ReservedWork:
    """RetryReservations of one tenant and class that are due at about the same time.

    Attributes:
        due_s: seconds until they are due; 0 when they are overdue.
    """

    rank: int
    tenant: str
    count: int = 0
    tokens: int = 0
    due_s: float = 0.0


_Group = tuple[int, str]


class RetryReservations:
    """All expected returns.

    Attributes:
        claim_rate: share of reservations that were claimed lately.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._by_key: dict[_Key, list[_RetryReservation]] = {}
        self._slots: dict[int, dict[_Group, ReservedWork]] = {}
        self._in_slot: dict[int, list[_RetryReservation]] = {}
        self._count = 0
        self.claim_rate = 1.0

    def __len__(self) -> int:
        return self._count

    def reserve(self, request: Request, tokens: int, due_at: float) -> bool:
        """Expect this request again at `due_at`; False when there are too many reservations already."""
        if self._count >= self._settings.max_reservations:
            return False
        reservation = _RetryReservation(_key(request), due_at, request.priority.rank, request.tenant, tokens)
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
        """Take up the reservation of a request that has come back, if one is due."""
        if not self._count:
            return False
        same = self._by_key.get(_key(request), ())
        due = [
            reservation
            for reservation in same
            if reservation.due_at <= now + self._settings.reservation_early_s
        ]
        if not due:
            return False
        reservation = min(due, key=lambda each: each.due_at)
        self._in_slot[_slot(reservation.due_at)].remove(reservation)
        self._remove(reservation)
        self.claim_rate += _CLAIM_WEIGHT * (1.0 - self.claim_rate)
        return True

    def expire(self, now: float) -> None:
        """Forget those who did not come."""
        last = _slot(now - self._settings.reservation_grace_s) - 1
        for slot in [slot for slot in self._in_slot if slot <= last]:
            for reservation in self._in_slot[slot]:
                self._remove(reservation)
                self.claim_rate -= _CLAIM_WEIGHT * self.claim_rate
            del self._in_slot[slot]

    def admissible_in_s(self, line: Line, amount: Callable[[ReservedWork], float], now: float) -> float:
        """Seconds until one more may join the line without making it too long for those who are reserved.

        Args:
            amount: how much of the line some reserved requests will take, in the line's unit. It is asked in
                the order in which they are due.

        Returns:
            0.0 when it may join now. Infinity when the line does not move and is too long.
        """
        level, at_s = line.ahead, 0.0
        admissible_in_s = _until(level, line)
        for reserved in self._reserved(now):
            level = max(0.0, level - line.per_s * (reserved.due_s - at_s))
            at_s = reserved.due_s
            joins = amount(reserved) * self.claim_rate * _WEIGHT
            level += joins
            if joins > 0 and level > line.limit:
                admissible_in_s = at_s + _until(level, line)
        return admissible_in_s

    def _reserved(self, now: float) -> Iterator[ReservedWork]:
        for slot in sorted(self._slots):
            due_s = max(0.0, slot * _SLOT_S - now)
            for reserved in self._slots[slot].values():
                reserved.due_s = due_s
                yield reserved

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
        return f"<RetryReservations {self._count}, {self.claim_rate:.0%} claimed lately>"


def fair_tokens(request: Request, own_tokens: float) -> Callable[[ReservedWork], float]:
    """What reserved requests put ahead of `request` where tenants of a class are served in turn.

    All of higher classes and of its own tenant, and of each other tenant of its class as much as its own.

    Args:
        own_tokens: what its tenant has waiting, this request included.
    """
    own = own_tokens
    counted: dict[str, float] = {}

    def amount(reserved: ReservedWork) -> float:
        nonlocal own
        if reserved.rank != request.priority.rank:
            return float(reserved.tokens) if reserved.rank < request.priority.rank else 0.0
        if reserved.tenant == request.tenant:
            own += reserved.tokens
            return float(reserved.tokens)
        before = counted.get(reserved.tenant, 0.0)
        counted[reserved.tenant] = max(before, min(before + reserved.tokens, own))
        return counted[reserved.tenant] - before

    return amount


def _until(level: float, line: Line) -> float:
    """Seconds until a level has come down to the limit, if nothing joins."""
    if level <= line.limit:
        return 0.0
    return (level - line.limit) / line.per_s if line.per_s > 0 else math.inf


def _slot(at: float) -> int:
    return math.floor(at / _SLOT_S)


def _key(request: Request) -> _Key:
    """What tells a request that comes back from others; its id is another one then."""
    return (
        request.tenant,
        request.priority.rank,
        request.shape,
        request.max_output_tokens,
        request.choices,
        request.prefix,
    )
