"""What was admitted in the last minute, so that a limit per minute holds for every minute there is.

A token bucket of the same limit would let nearly twice as much pass in the minute after an idle one. Here the
burst is stated: after an idle minute the whole limit may be used at once, and then nothing until the minute
has passed. Amounts are kept by the second in which they came, so the window is 60 to 61 s long, and a limit
is never exceeded in any 60 s. There are at most 62 seconds to keep, whatever the rate.
"""

import bisect
import math

from serve_app.rate_limits import LimitStatus

# The second in which something came counts until all of it is a minute old.
_KEPT_S = 61


class MinuteWindow:
    """The amounts of the last minute. All times are seconds on one clock; `now` never goes back."""

    __slots__ = ("_amounts", "_seconds", "used")

    def __init__(self) -> None:
        self._seconds: list[int] = []
        self._amounts: list[int] = []
        self.used = 0

    def __repr__(self) -> str:
        return f"<MinuteWindow used={self.used} seconds={len(self._seconds)}>"

    def expire(self, now: float) -> None:
        """Forget what is older than a minute."""
        passed = bisect.bisect_right(self._seconds, now - _KEPT_S)
        if passed:
            self.used -= sum(self._amounts[:passed])
            del self._seconds[:passed], self._amounts[:passed]

    def add(self, at: float, amount: int, now: float) -> None:
        """Count an amount that came at `at`, which may be before `now`."""
        second = math.floor(at)
        if not amount or second + _KEPT_S <= now:
            return
        index = self._index(second)
        if index < len(self._seconds) and self._seconds[index] == second:
            self._amounts[index] += amount
        else:
            self._seconds.insert(index, second)
            self._amounts.insert(index, amount)
        self.used += amount

    def take_back(self, at: float, amount: int) -> None:
        """Undo a part of what was added at `at`, unless it has expired."""
        second = math.floor(at)
        index = self._index(second)
        if index < len(self._seconds) and self._seconds[index] == second:
            self._amounts[index] -= amount
            self.used -= amount

    def admits_in_s(self, amount: int, limit: int, now: float) -> float:
        """Seconds until an amount keeps the limit: 0 when it does now, infinite when it never will."""
        self.expire(now)
        excess = self.used + amount - limit
        if excess <= 0:
            return 0.0
        for second, freed in zip(self._seconds, self._amounts, strict=True):
            excess -= freed
            if excess <= 0:
                return second + _KEPT_S - now
        return math.inf

    def status(self, limit: int, now: float) -> LimitStatus:
        """How a limit stands."""
        self.expire(now)
        reset_s = self._seconds[-1] + _KEPT_S - now if self.used else 0.0
        return LimitStatus(limit, max(0, limit - self.used), reset_s)

    def _index(self, second: int) -> int:
        return bisect.bisect_left(self._seconds, second)
