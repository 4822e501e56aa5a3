"""A rate of events per second with exponential decay, updated in O(1)."""

import math


class DecayingRate:
    """Events per second, each weighted by `exp(-age / time_constant_s)`.

    Until the first time constant has passed, the divisor is the time since the start, so that a new rate is
    not underestimated.
    """

    __slots__ = ("_amount", "_at", "_started_at", "_time_constant_s")

    def __init__(self, time_constant_s: float, now: float) -> None:
        self._time_constant_s = time_constant_s
        self._amount = 0.0
        self._at = now
        self._started_at = now

    def add(self, amount: float, now: float) -> None:
        """Add `amount` at `now`."""
        self._decay(now)
        self._amount += amount

    def amount(self, now: float) -> float:
        """Return the sum of what was added, each weighted by its age at `now`."""
        self._decay(now)
        return self._amount

    def per_s(self, now: float) -> float:
        """Return the rate at `now`; 0.0 before the first event."""
        self._decay(now)
        age_s = now - self._started_at
        # The weights of a steady stream add up to time_constant * (1 - exp(-age / time_constant)) seconds.
        window_s = self._time_constant_s * -math.expm1(-age_s / self._time_constant_s)
        return self._amount / max(window_s, _SHORTEST_WINDOW_S)

    def _decay(self, now: float) -> None:
        if now > self._at:
            self._amount *= math.exp((self._at - now) / self._time_constant_s)
            self._at = now

    def __repr__(self) -> str:
        return f"<DecayingRate amount={self._amount:.3f} at={self._at:.3f}>"


# The first event would otherwise be divided by a window close to zero.
_SHORTEST_WINDOW_S = 0.1
