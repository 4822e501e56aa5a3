"""The load that a pool is sized for: the rate at which work arrives, in engines that it would fill.

The forecast is the mean of the recent past, weighed exponentially. Two others were compared with it in
`experiments/scaling`: a damped trend, and the season of the arrivals where a history shows one.
"""

import math
from typing import Protocol

# Short enough to follow a step within half a minute, long enough for dozens of requests of a small pool.
_TIME_CONSTANT_S = 20.0


class LoadForecast(Protocol):
    """Predicts the arrivals of one pool."""

    def observe(self, engine_s: float, elapsed_s: float, /) -> None:
        """Take in the work that has arrived since the last call, in seconds of an engine."""

    def load(self, horizon_s: float, /) -> float:
        """Engines that the arrivals fill, from now until `horizon_s` later."""


class RecentLoad:
    """The mean of the recent past goes on."""

    def __init__(self, time_constant_s: float = _TIME_CONSTANT_S) -> None:
        self._time_constant_s = time_constant_s
        self._load = 0.0

    def observe(self, engine_s: float, elapsed_s: float) -> None:
        """Take in the work that has arrived since the last call, in seconds of an engine."""
        if elapsed_s > 0:
            share = -math.expm1(-elapsed_s / self._time_constant_s)
            self._load += share * (engine_s / elapsed_s - self._load)

    def load(self, _horizon_s: float) -> float:
        """Engines that the arrivals fill, whatever the horizon."""
        return self._load

    def __repr__(self) -> str:
        return f"<RecentLoad {self._load:.2f}>"
