"""Arrival processes of a given mean rate and burstiness."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Arrivals(Protocol):
    """Draws arrival times in seconds, ascending, after a start at 0."""

    def sample(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw `count` arrival times."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaArrivals:
    """Independent gaps of a gamma distribution.

    A coefficient of variation (`cv`) of 1 is Poisson, more is bursty. Production traffic to large models has
    3.5 to 12 (ServeGen, Alibaba), one service as a whole about 1.1.
    """

    rate_per_s: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(rate_per_s=self.rate_per_s, cv=self.cv)

    def sample(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Arrival times: sums of gaps of shape `1 / cv^2` and mean `1 / rate`."""
        variance_ratio = self.cv**2
        gaps = rng.gamma(1 / variance_ratio, variance_ratio / self.rate_per_s, count)
        return np.asarray(np.cumsum(gaps), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOffArrivals:
    """Poisson arrivals in on-periods, none in off-periods; both last exponentially long.

    Attributes:
        rate_per_s: mean over on- and off-periods together.
        on_s: mean length of an on-period.
        off_s: mean length of an off-period.
    """

    rate_per_s: float
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        _check_positive(rate_per_s=self.rate_per_s, on_s=self.on_s, off_s=self.off_s)

    def sample(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw arrivals on a clock that runs in on-periods only, then insert the off-periods."""
        on_rate_per_s = self.rate_per_s * (self.on_s + self.off_s) / self.on_s
        on_clock = np.cumsum(rng.exponential(1 / on_rate_per_s, count))
        period_ends: list[float] = []
        ends_at = rng.exponential(self.on_s)
        while count and ends_at <= on_clock[-1]:
            period_ends.append(ends_at)
            ends_at += rng.exponential(self.on_s)
        off_s = np.concatenate(([0.0], np.cumsum(rng.exponential(self.off_s, len(period_ends)))))
        off_periods_before = np.searchsorted(np.asarray(period_ends), on_clock, side="right")
        return np.asarray(on_clock + off_s[off_periods_before], dtype=np.float64)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive, got {value}")
