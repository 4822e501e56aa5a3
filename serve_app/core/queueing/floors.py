"""Floors: the service per second that a tenant or a class gets while it has queued requests.

Shares divide whatever there is; a floor is an amount. While the requests of a tenant wait and it has received
less than its floor, they precede those of all others, whatever their class. It lends what it does not need:
without queued requests it is owed nothing, and others use the capacity. It gets its floor again as soon as
capacity becomes free, at the latest when the requests in flight end.

A floor counts service as `fairness` does, in prefill and weighted decode tokens. It has a *mark*, the time up
to which it is delivered:

- Each dispatch moves the mark forward by its service, divided by the floor. A tenant is *behind* unless its
  mark is in the future. The one that is behind most is served first.
- The mark is at most one request in the future: service beyond the floor, which the tenant got by its share,
  is not deducted later.
- A tenant that returns from idle starts at the present: idle time earns nothing.

So over any time in which its requests wait, a tenant receives its floor, less one request of its own and the
service of those that precede it: the one in service when it falls behind, and one in the usual order.

If the fleet cannot serve all floors, all tenants with a floor fall behind. The one that is behind most is
served first, so each receives the same part of its floor. The clock of the marks stops while the least of
them is `_MOST_BEHIND_S` behind, because nothing is saved up for later. A single tenant whose requests fit
nowhere does not stop it.

While requests without a floor wait, `_USUAL_SHARE` of the service goes in the usual order. So floors that are
too high cannot stop all others.

Source: virtual clocks (Zhang, "VirtualClock: a new traffic control algorithm", 1990), with marks that do not
run ahead, as in self-clocked fair queueing (Golestani, INFOCOM 1994).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from serve_app.core.routing.prefill_cost import DecayingRate
from serve_app.core.settings_base import settings
from serve_app.request import MAX_FLOOR, MIN_FLOOR, PriorityClass, Request

# What floors are owed at most: they would block others for as long once the fleet can deliver them. Twice the
# wait after which autoscaling adds a replica.
_MOST_BEHIND_S = 10.0
# A tenant that is behind by more than this does not wait for capacity alone.
_STUCK_S = 30.0
# Well above rounding errors of a clock, so that a wake-up for a floor finds it due.
_ROUNDING_S = 1e-6
# Share of the service in the usual order.
_USUAL_SHARE = 0.1
# Time over which the attained rates are measured.
_WINDOW_S = 30.0
# Floors of keys that are remembered while they are idle and owe nothing.
_MAX_IDLE = 4_096


@settings(block="floors")
class FloorSettings:
    """Tokens per second that a tenant or class gets before others while it has queued requests."""

    # Floors of tenants: computed prompt tokens and twice the output tokens per second, as fair shares count
    # them. A key can have a floor for its tenant, which replaces this one. All floors together should be at
    # most nine tenths of what the fleet serves. What a tenant does not need, others use.
    tenants: Mapping[str, float] = field(default_factory=dict)
    # Floors of priority classes, each for all requests of the class together: for example, the rate at which
    # batch work progresses.
    classes: Mapping[PriorityClass, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, floors in (("tenants", self.tenants), ("classes", self.classes)):
            for name, rate in floors.items():
                if not MIN_FLOOR <= rate <= MAX_FLOOR:
                    raise ValueError(
                        f"floors.{kind} of {name} must be from {MIN_FLOOR:g} to {MAX_FLOOR:,.0f} tokens per "
                        f"second, got {rate:g}"
                    )


@dataclass(slots=True, eq=False)
class Floor:
    """The floor of a tenant or a class.

    Attributes:
        tenant: None for that of a class.
        priority: None for that of a tenant.
        per_s: service per second.
        mark: time up to which it is delivered, on the clock of the marks.
        waiting: whether its tenant or class has queued requests.
        received: service of the last half minute.
    """

    tenant: str | None
    priority: PriorityClass | None
    per_s: float
    mark: float
    received: DecayingRate
    waiting: bool = False

    @property
    def subject(self) -> str:
        """The tenant or class, in words."""
        return f"tenant {self.tenant}" if self.priority is None else f"class {self.priority}"


_BY_MARK = attrgetter("mark")


class Floors:
    """The floors of all tenants and classes of one model.

    Args:
        counts_tokens: whether service is counted in tokens; if not, there are no floors.

    Attributes:
        are_used: whether there is any floor. Without one, nothing below needs to be called.
        served: service of all requests in the last half minute.
    """

    def __init__(self, settings: FloorSettings, *, counts_tokens: bool = True) -> None:
        self._counts_tokens = counts_tokens
        self._configured = settings.tenants
        self._clock = self._at = 0.0
        # Service that is due in the usual order.
        self._owed_usual = 0.0
        self._of_tenants = {name: self._floor(name, None, rate) for name, rate in settings.tenants.items()}
        self._of_classes = {each: self._floor(None, each, rate) for each, rate in settings.classes.items()}
        self._waiting: dict[Floor, None] = {}
        self.are_used = bool(self._of_tenants or self._of_classes)
        self.served = DecayingRate(_WINDOW_S, 0.0)

    def __iter__(self) -> Iterator[Floor]:
        yield from self._of_tenants.values()
        yield from self._of_classes.values()

    def __repr__(self) -> str:
        return f"<Floors {len(self._waiting)} of {len(list(self))} with queued requests>"

    def of_tenant(self, tenant: str) -> Floor | None:
        """Return the floor of a tenant, or None."""
        return self._of_tenants.get(tenant)

    def has_class(self, priority: PriorityClass) -> bool:
        """Return whether a class has a floor."""
        return priority in self._of_classes

    def observe(self, tenant: str, per_s: float | None, now: float) -> None:
        """Learn the floor of a tenant from the key of a request; None leaves the configured one, if any."""
        if not self._counts_tokens:
            return
        floor, per_s = self._of_tenants.get(tenant), per_s or self._configured.get(tenant)
        if per_s is None:
            if floor is not None:
                del self._of_tenants[tenant]
                self._waiting.pop(floor, None)
            return
        if floor is None:
            self._advance(now)
            self._forget_idle()
            floor = self._of_tenants[tenant] = self._floor(tenant, None, per_s)
            self.are_used = True
        floor.per_s = per_s

    def on_backlog(self, request: Request, now: float) -> None:
        """Note that a request is queued."""
        for floor in self._of(request):
            if not floor.waiting:
                self._advance(now)
                floor.waiting, floor.mark = True, max(floor.mark, self._clock)
                self._waiting[floor] = None

    def on_idle(self, request: Request, *, tenant: bool, priority: bool) -> None:
        """Note that no request of the same tenant is queued any more, or none of the same class."""
        for floor in self._of(request):
            if floor.waiting and (tenant if floor.priority is None else priority):
                floor.waiting = False
                del self._waiting[floor]

    def charge(
        self, request: Request, service: float, now: float, *, by_floor: bool, others_wait: bool
    ) -> None:
        """Count the service of a request at its dispatch, by a floor or in the usual order.

        Args:
            others_wait: whether requests without a floor are queued.
        """
        self._advance(now)
        self.served.add(service, now)
        if by_floor and others_wait:
            self._owed_usual += service * _USUAL_SHARE / (1.0 - _USUAL_SHARE)
        elif not by_floor:
            self._owed_usual = max(self._owed_usual, 0.0) - service
        for floor in self._of(request):
            start = min(floor.mark, self._clock) if floor.waiting else self._clock
            floor.mark = start + service / floor.per_s
            floor.received.add(service, now)

    def correct(self, request: Request, difference: float, now: float) -> None:
        """Count the actual minus the charged service of a request that a floor has dispatched."""
        self.served.add(difference, now)
        for floor in self._of(request):
            floor.mark += difference / floor.per_s
            floor.received.add(difference, now)

    def due(self, now: float, *, others_wait: bool) -> list[Floor]:
        """Return the floors that are behind, the one behind most first.

        Args:
            others_wait: whether requests without a floor are queued.
        """
        if not self._waiting or (others_wait and self._owed_usual > 0.0):
            return []
        self._advance(now)
        return sorted((floor for floor in self._waiting if self._is_due(floor)), key=_BY_MARK)

    def next_due_at(self, now: float) -> float | None:
        """Return when the next floor that is not behind will be, or None."""
        self._advance(now)
        marks = [floor.mark for floor in self._waiting if not self._is_due(floor)]
        return now + min(marks) - self._clock if marks else None

    def seconds_to(self, tenant: str, service: float) -> float:
        """Return the seconds in which the floor of a tenant delivers so much more service."""
        floor = self._of_tenants[tenant]
        return max(0.0, floor.mark - self._clock) + service / floor.per_s

    def behind_s(self, floor: Floor, now: float) -> float:
        """Return by how many seconds of its floor a tenant or class is behind, 0 without queued requests."""
        return max(0.0, self._clock_at(now) - floor.mark) if floor.waiting else 0.0

    def longest_behind_s(self, request: Request, now: float) -> float:
        """Return the larger of this time for the tenant and the class of a request, 0 without floors."""
        return max((self.behind_s(floor, now) for floor in self._of(request)), default=0.0)

    def _of(self, request: Request) -> list[Floor]:
        found = self._of_tenants.get(request.tenant), self._of_classes.get(request.priority)
        return [floor for floor in found if floor is not None]

    def _floor(self, tenant: str | None, priority: PriorityClass | None, per_s: float) -> Floor:
        return Floor(tenant, priority, per_s, self._clock, DecayingRate(_WINDOW_S, self._at))

    def _is_due(self, floor: Floor) -> bool:
        return floor.mark <= self._clock + _ROUNDING_S

    def _advance(self, now: float) -> None:
        self._clock, self._at = self._clock_at(now), now
        for floor in self._waiting:
            floor.mark = max(floor.mark, self._clock - _STUCK_S)

    def _clock_at(self, now: float) -> float:
        """Return the clock of the marks, which advances no further than the fleet can deliver."""
        clock = self._clock + now - self._at
        if self._waiting:
            clock = min(clock, max(floor.mark for floor in self._waiting) + _MOST_BEHIND_S)
        return max(self._clock, clock)

    def _forget_idle(self) -> None:
        """Remove the floors of keys whose tenants are idle and have no mark, if there are too many."""
        if len(self._of_tenants) >= _MAX_IDLE:
            self._of_tenants = {
                name: floor
                for name, floor in self._of_tenants.items()
                if floor.waiting or floor.mark > self._clock or name in self._configured
            }
