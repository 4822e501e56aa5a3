"""Errors of estimates: the distribution of actual over estimated times, learned online.

Ratios are counted in bins of equal width on a logarithmic scale. The cost of quantiles therefore does not
depend on the number of observations, and neither a stall nor a burst distorts them. Older observations decay.
"""

import math
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

_PER_OCTAVE = 8
_MIN_OCTAVE, _MAX_OCTAVE = -7, 5
_BINS = _PER_OCTAVE * (_MAX_OCTAVE - _MIN_OCTAVE)
# A ratio's weight after n more is `_DECAY ** n`: about the last two hundred count.
_DECAY = 0.995
# Weights are rescaled before they overflow.
_MAX_WEIGHT = 1e9
# Intended share of the times beyond each bound.
_TAIL = 0.1
# Change of a margin by one observation, on the logarithmic scale, and maximum of a margin.
_STEP = 0.05
_MAX_MARGIN = 8.0
# Intervals start wide, because they have not been compared with any outcome.
_INITIAL_MARGIN = 2.0


@dataclass(frozen=True, slots=True)
class Quantiles:
    """An expectation and the bounds of its interval.

    Attributes:
        low: the 10th percentile.
        middle: the median.
        high: the 90th percentile.
    """

    low: float
    middle: float
    high: float


class RatioSpread:
    """The distribution of ratios of actual to estimated times."""

    __slots__ = ("_quantiles", "_total", "_weight", "_weights", "count")

    def __init__(self) -> None:
        self._weights = [0.0] * _BINS
        self._total = 0.0
        self._weight = 1.0
        self._quantiles: Quantiles | None = None
        self.count = 0

    def add(self, ratio: float) -> None:
        """Add one ratio, which must not be negative."""
        self._weights[min(int(_place(ratio)), _BINS - 1)] += self._weight
        self._total += self._weight
        self.count += 1
        self._weight /= _DECAY
        self._quantiles = None
        if self._weight > _MAX_WEIGHT:
            self._weights = [weight / self._weight for weight in self._weights]
            self._total /= self._weight
            self._weight = 1.0

    def quantiles(self) -> Quantiles:
        """Return the 10th percentile, the median and the 90th percentile. Needs at least one ratio."""
        if self._quantiles is None:
            self._quantiles = Quantiles(self.quantile(_TAIL), self.quantile(0.5), self.quantile(1 - _TAIL))
        return self._quantiles

    def above(self, ratio: float) -> float:
        """Return the share of ratios above one. Needs at least one ratio. The last bin has no upper end."""
        place = min(_place(ratio), _BINS - 1.0)
        bins = self._weights[int(place) :]
        return (sum(bins) - place % 1 * bins[0]) / sum(self._weights)

    def quantile(self, share: float) -> float:
        """Return the ratio below which this share of them is. Needs at least one ratio."""
        target, seen = share * self._total, 0.0
        for place, weight in enumerate(self._weights):
            if weight and seen + weight >= target:
                octaves: float = _MIN_OCTAVE + (place + (target - seen) / weight) / _PER_OCTAVE
                return math.exp2(octaves)
            seen += weight
        return math.exp2(_MAX_OCTAVE)

    def __repr__(self) -> str:
        return f"<RatioSpread of {self.count}>"


def _place(ratio: float) -> float:
    octaves = math.log2(ratio) if ratio > 0 else -math.inf
    return min(max(octaves - _MIN_OCTAVE, 0.0), _MAX_OCTAVE - _MIN_OCTAVE) * _PER_OCTAVE


class RatioSpreads:
    """Distributions of ratios by key, of which the first with enough observations applies.

    Args:
        prior: applies before.
        least: observations that are enough.
    """

    def __init__(self, prior: Quantiles, least: int) -> None:
        self._prior, self._least = prior, least
        self._by_key: defaultdict[Hashable, RatioSpread] = defaultdict(RatioSpread)

    def add(self, ratio: float, *keys: Hashable) -> None:
        """Add one ratio, which must not be negative, to the distributions of all these keys."""
        for key in keys:
            self._by_key[key].add(ratio)

    def quantiles(self, *keys: Hashable) -> Quantiles:
        """Return the quantiles of the first key with enough observations, from special to general."""
        known = (self._by_key[key] for key in keys if key in self._by_key)
        return next((each.quantiles() for each in known if each.count >= self._least), self._prior)

    def __repr__(self) -> str:
        return f"<RatioSpreads of {len(self._by_key)} keys>"


class Margin:
    """Factors that widen intervals if the present differs from the past.

    Each bound has a factor. An outcome beyond the bound raises the factor, one within lowers it, by amounts
    that cancel if the bound has its intended coverage. So the coverage is right in the long run, even if
    conditions change. Intervals are never narrower than the spread.

    Source: adaptive conformal inference (Gibbs and Candes, NeurIPS 2021), on a logarithmic scale.

    Attributes:
        low: divisor of the lower bound.
        high: factor of the upper bound.
    """

    __slots__ = ("high", "low")

    def __init__(self) -> None:
        self.low = self.high = _INITIAL_MARGIN

    def learn(self, actual_s: float, interval: Quantiles) -> None:
        """Compare an interval with its outcome."""
        self.low = _moved(self.low, missed=actual_s < interval.low)
        self.high = _moved(self.high, missed=actual_s > interval.high)


def _moved(factor: float, *, missed: bool) -> float:
    moved = factor * math.exp(_STEP * (1 - _TAIL if missed else -_TAIL))
    return min(max(moved, 1.0), _MAX_MARGIN)
