"""Other limits of requests in flight, to compare with the one that is used.

The rules and constants are those of Netflix's concurrency-limits (`Gradient2Limit`, `VegasLimit`). A latency
is kept for each power of two of tokens, since answers of unlike sizes are not to be compared.
"""

import math


class FixedLimit:
    """A limit that somebody has set."""

    def __init__(self, limit: int) -> None:
        self.limit = float(limit)

    def observe(self, tokens: int, seconds: float, now: float, *, in_flight: int, streamed: bool) -> None:
        """Nothing moves it."""


class Gradient2Limit:
    """The quotient of the long-term mean latency and the last one scales the limit."""

    _TOLERANCE, _QUEUE, _SMOOTHING, _WINDOW, _MOST = 1.5, 4.0, 0.2, 600, 1000.0

    def __init__(self) -> None:
        self.limit = 8.0
        self._long_s: dict[int, float] = {}

    def observe(self, tokens: int, seconds: float, now: float, *, in_flight: int, streamed: bool) -> None:
        """Move towards `limit x gradient + queue`."""
        del now, streamed  # these rules tell neither apart
        size = max(tokens, 1).bit_length()
        long_s = self._long_s.get(size, seconds)
        long_s += (seconds - long_s) * 2.0 / (self._WINDOW + 1)
        # The long-term mean was learned under congestion: forget it faster.
        self._long_s[size] = long_s * 0.95 if long_s > 2.0 * seconds else long_s
        if in_flight < self.limit / 2:
            return
        gradient = min(1.0, max(0.5, self._TOLERANCE * long_s / seconds))
        wanted = self.limit * gradient + self._QUEUE
        moved = (1.0 - self._SMOOTHING) * self.limit + self._SMOOTHING * wanted
        self.limit = min(self._MOST, max(1.0, moved))


class VegasLimit:
    """The share of the latency beyond its minimum, times the limit, is the queue; it is kept short."""

    _PROBE = 30

    def __init__(self) -> None:
        self.limit = 8.0
        self._least_s: dict[int, float] = {}
        self._seen = 0

    def observe(self, tokens: int, seconds: float, now: float, *, in_flight: int, streamed: bool) -> None:
        """Grow below three queued, shrink above six; both grow with the logarithm of the limit."""
        del now, streamed  # these rules tell neither apart
        self._seen += 1
        if self._seen >= self._PROBE * self.limit:
            self._seen = 0
            self._least_s.clear()
        size = max(tokens, 1).bit_length()
        least_s = self._least_s.get(size)
        if least_s is None or seconds < least_s:
            self._least_s[size] = seconds
            return
        if in_flight < self.limit / 2:
            return
        step = max(1.0, math.log10(self.limit))
        queued = math.ceil(self.limit * (1.0 - least_s / seconds))
        if queued <= 3 * step:
            self.limit += step
        elif queued > 6 * step:
            self.limit = max(1.0, self.limit - step)
