"""Whom did we tell to come again, when, and with how much work?

A refused request is told when it would be let in, and that work is *booked* at that time. Booked work counts
as ahead of whoever comes meanwhile, so those refused later are told later times, and newcomers do not take
the room that was promised. In effect clients stand in one line, of which only the front is in the queue.

A request that comes back is known by what it asks (`_key`): its tenant, class, and the shape of its prompt.
It claims its booking then, so its work does not count twice. Who does not come within a while has lost the
booking. Clients that never come back would hold up everybody, so booked work counts by the share of bookings
that were claimed lately.

The line is judged as a fluid: it holds so much, drains at one pace, and what is booked joins it at its time
(`opening_s`).

Source: ours. Virtual queues as in telephone call-back systems, and the fluid queue of any textbook.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from serve_app.request import PromptShape, Request
from serve_app.scheduling.admission.settings import AdmissionSettings

# Bookings of so many seconds are looked at as one.
_SLOT_S = 0.5
# Booked work counts for more than it is, so that bookings alone do not fill the line: estimates waver, and
# what they were short of must be made up. Newcomers get what is left.
_WEIGHT = 1.25
# Weight of one booking in the share that is claimed: the last thirty or so count.
_SHOWN_WEIGHT = 1 / 32

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
class _Booking:
    """The expected return of one request."""

    key: _Key
    due_at: float
    rank: int
    tenant: str
    tokens: int


@dataclass(slots=True)
class Booked:
    """Bookings of one tenant and class that are due at about the same time.

    Attributes:
        due_s: seconds until they are due; 0 when they are overdue.
    """

    rank: int
    tenant: str
    count: int = 0
    tokens: int = 0
    due_s: float = 0.0


_Group = tuple[int, str]


class Bookings:
    """All expected returns.

    Attributes:
        shown_share: share of bookings that were claimed lately.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._by_key: dict[_Key, list[_Booking]] = {}
        self._slots: dict[int, dict[_Group, Booked]] = {}
        self._in_slot: dict[int, list[_Booking]] = {}
        self._count = 0
        self.shown_share = 1.0

    def __len__(self) -> int:
        return self._count

    def book(self, request: Request, tokens: int, due_at: float) -> bool:
        """Expect this request again at `due_at`; False when there are too many bookings already."""
        if self._count >= self._settings.max_bookings:
            return False
        booking = _Booking(_key(request), due_at, request.priority.rank, request.tenant, tokens)
        slot = _slot(due_at)
        self._by_key.setdefault(booking.key, []).append(booking)
        self._in_slot.setdefault(slot, []).append(booking)
        groups = self._slots.setdefault(slot, {})
        group = groups.setdefault((booking.rank, booking.tenant), Booked(booking.rank, booking.tenant))
        group.count += 1
        group.tokens += tokens
        self._count += 1
        return True

    def claim(self, request: Request, now: float) -> bool:
        """Take up the booking of a request that has come back, if one is due."""
        if not self._count:
            return False
        same = self._by_key.get(_key(request), ())
        due = [booking for booking in same if booking.due_at <= now + self._settings.booking_early_s]
        if not due:
            return False
        booking = min(due, key=lambda each: each.due_at)
        self._in_slot[_slot(booking.due_at)].remove(booking)
        self._remove(booking)
        self.shown_share += _SHOWN_WEIGHT * (1.0 - self.shown_share)
        return True

    def expire(self, now: float) -> None:
        """Forget those who did not come."""
        last = _slot(now - self._settings.booking_grace_s) - 1
        for slot in [slot for slot in self._in_slot if slot <= last]:
            for booking in self._in_slot[slot]:
                self._remove(booking)
                self.shown_share -= _SHOWN_WEIGHT * self.shown_share
            del self._in_slot[slot]

    def opening_s(self, line: Line, amount: Callable[[Booked], float], now: float) -> float:
        """Seconds until one more may join the line without making it too long for those who are booked.

        Args:
            amount: how much of the line some booked requests will take, in the line's unit. It is asked in
                the order in which they are due.

        Returns:
            0.0 when it may join now. Infinity when the line does not move and is too long.
        """
        level, at_s = line.ahead, 0.0
        opening_s = _until(level, line)
        for booked in self._booked(now):
            level = max(0.0, level - line.per_s * (booked.due_s - at_s))
            at_s = booked.due_s
            joins = amount(booked) * self.shown_share * _WEIGHT
            level += joins
            if joins > 0 and level > line.limit:
                opening_s = at_s + _until(level, line)
        return opening_s

    def _booked(self, now: float) -> Iterator[Booked]:
        for slot in sorted(self._slots):
            due_s = max(0.0, slot * _SLOT_S - now)
            for booked in self._slots[slot].values():
                booked.due_s = due_s
                yield booked

    def _remove(self, booking: _Booking) -> None:
        same = self._by_key[booking.key]
        same.remove(booking)
        if not same:
            del self._by_key[booking.key]
        groups = self._slots[_slot(booking.due_at)]
        group = groups[booking.rank, booking.tenant]
        group.count -= 1
        group.tokens -= booking.tokens
        if not group.count:
            del groups[booking.rank, booking.tenant]
        if not groups:
            del self._slots[_slot(booking.due_at)]
        self._count -= 1

    def __repr__(self) -> str:
        return f"<Bookings {self._count}, {self.shown_share:.0%} claimed lately>"


def fair_tokens(request: Request, own_tokens: float) -> Callable[[Booked], float]:
    """What booked requests put ahead of `request` where tenants of a class are served in turn.

    All of higher classes and of its own tenant, and of each other tenant of its class as much as its own.

    Args:
        own_tokens: what its tenant has waiting, this request included.
    """
    own = own_tokens
    counted: dict[str, float] = {}

    def amount(booked: Booked) -> float:
        nonlocal own
        if booked.rank != request.priority.rank:
            return float(booked.tokens) if booked.rank < request.priority.rank else 0.0
        if booked.tenant == request.tenant:
            own += booked.tokens
            return float(booked.tokens)
        before = counted.get(booked.tenant, 0.0)
        counted[booked.tenant] = max(before, min(before + booked.tokens, own))
        return counted[booked.tenant] - before

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
