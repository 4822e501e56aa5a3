"""Distributions of prompt and answer lengths, in tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


class Lengths(Protocol):
    """Draws lengths in tokens, each at least 1."""

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Draw `count` lengths."""
        ...


@dataclass(frozen=True, slots=True)
class QuantileLengths:
    """Lengths whose distribution is known at a few points, interpolated linearly in between.

    Attributes:
        points: (share of requests at most this long, tokens), both ascending, from share 0 to share 1.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.points]
        tokens = [length for _, length in self.points]
        if len(shares) < 2 or shares[0] != 0 or shares[-1] != 1:
            raise ValueError(f"quantiles must go from share 0 to share 1, got shares {shares}")
        if shares != sorted(shares) or tokens != sorted(tokens) or tokens[0] < 1:
            raise ValueError(f"quantiles must ascend from at least 1 token, got {self.points}")

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Invert the distribution function at uniform shares."""
        shares, tokens = zip(*self.points, strict=True)
        return _whole(np.interp(rng.random(count), shares, tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalLengths:
    """Lengths around `mean`, skewed to the right, cut at `max_tokens`."""

    mean: float
    cv: float
    max_tokens: int

    def __post_init__(self) -> None:
        if not (self.mean >= 1 and self.cv > 0 and self.max_tokens >= self.mean):
            raise ValueError(f"lognormal lengths need 1 <= mean <= max_tokens and cv > 0, got {self}")

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Draw from the lognormal of this mean and coefficient of variation."""
        variance = math.log(1 + self.cv**2)
        drawn = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        return _whole(np.minimum(drawn, self.max_tokens))


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Every length from `low` to `high`, both included, equally often."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"uniform lengths need 1 <= low <= high, got {self.low} and {self.high}")

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Draw whole numbers."""
        return rng.integers(self.low, self.high, count, dtype=np.int64, endpoint=True)


@dataclass(frozen=True, slots=True)
class MixedLengths:
    """Several kinds of lengths, each with its share of the requests."""

    parts: tuple[tuple[float, Lengths], ...]

    def __post_init__(self) -> None:
        total = math.fsum(share for share, _ in self.parts)
        if not math.isclose(total, 1.0):
            raise ValueError(f"shares of a mix must add up to 1, got {total}")

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Choose a part for each request, then draw from it."""
        chosen = rng.choice(len(self.parts), count, p=[share for share, _ in self.parts])
        drawn = np.empty(count, dtype=np.int64)
        for index, (_, lengths) in enumerate(self.parts):
            mine = chosen == index
            drawn[mine] = lengths.sample(int(mine.sum()), rng)
        return drawn


def pair_within_totals(totals: Tokens, outputs: Tokens, rng: np.random.Generator) -> Tokens:
    """Give each total an output shorter than itself, at random, so that both keep their distributions.

    Drawing the two independently and cutting would distort one of them. Totals are paired in ascending order,
    each with one of the outputs that fit. Where none fits, which is rare, the output is 1.
    """
    paired = np.ones_like(totals)
    ascending = np.sort(outputs)
    fitting: list[int] = []
    taken = 0
    for place in np.argsort(totals, kind="stable"):
        while taken < len(ascending) and ascending[taken] < totals[place]:
            fitting.append(int(ascending[taken]))
            taken += 1
        if fitting:
            drawn = int(rng.integers(len(fitting)))
            paired[place], fitting[drawn] = fitting[drawn], fitting[-1]
            fitting.pop()
    return paired


def _whole(lengths: Sequence[float] | NDArray[np.float64]) -> Tokens:
    return np.asarray(np.maximum(1, np.rint(lengths)), dtype=np.int64)
