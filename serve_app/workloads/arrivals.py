"""When do requests come? Arrival processes of a mean rate, each with its own burstiness."""

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
    """Independent gaps of a gamma distribution: a coefficient of variation of 1 is Poisson, more is bursty.

    Production traffic to large models has 3.5 to 12 (ServeGen, Alibaba), one service as a whole about 1.1.
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
    """Poisson arrivals that stop altogether in between; busy and silent spells last exponentially long.

    Attributes:
        rate_per_s: mean over busy and silent spells together.
        on_s: mean length of a busy spell.
        off_s: mean length of a silent one.
    """

    rate_per_s: float
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        _check_positive(rate_per_s=self.rate_per_s, on_s=self.on_s, off_s=self.off_s)

    def sample(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw arrivals on a clock that runs in busy spells only, then put the silences back in."""
        busy_rate_per_s = self.rate_per_s * (self.on_s + self.off_s) / self.on_s
        busy_clock = np.cumsum(rng.exponential(1 / busy_rate_per_s, count))
        spell_ends: list[float] = []
        ends_at = rng.exponential(self.on_s)
        while count and ends_at <= busy_clock[-1]:
            spell_ends.append(ends_at)
            ends_at += rng.exponential(self.on_s)
        silence = np.concatenate(([0.0], np.cumsum(rng.exponential(self.off_s, len(spell_ends)))))
        silences_before = np.searchsorted(np.asarray(spell_ends), busy_clock, side="right")
        return np.asarray(busy_clock + silence[silences_before], dtype=np.float64)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive, got {value}")
