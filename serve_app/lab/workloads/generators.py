"""Components of generated workloads: lengths, arrivals, tenants and priority classes, and random numbers.

A run has one seed and one named stream of random numbers per use, so that drawing more numbers for one use
does not change any other.
"""

import math
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serve_app.lab.workloads.trace import Trace, TraceError
from serve_app.request import PriorityClass


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the numpy generator of one use (`arrivals`, `lengths`...) in the run with this seed."""
    return np.random.default_rng(_entropy(seed, name))


def plain_stream(seed: int, name: str) -> random.Random:
    """Return a stream as `random.Random`, for the pure packages, which do not import numpy."""
    return random.Random(int(stream(seed, name).integers(1 << 62)))  # noqa: S311 - a simulation, not a secret


def _entropy(seed: int, name: str) -> list[int]:
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    return [seed, zlib.crc32(name.encode())]


Tokens = NDArray[np.int64]


class Lengths(Protocol):
    """Distribution of lengths in tokens, each at least 1."""

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

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Draw from the lognormal distribution of this mean and coefficient of variation."""
        variance = math.log(1 + self.cv**2)
        drawn = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        return _whole(np.minimum(drawn, self.max_tokens))


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Uniform lengths from `low` to `high`, both included."""

    low: int
    high: int

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Draw whole numbers."""
        return rng.integers(self.low, self.high, count, dtype=np.int64, endpoint=True)


@dataclass(frozen=True, slots=True)
class MixedLengths:
    """Several kinds of lengths, each with its share of the requests."""

    parts: tuple[tuple[float, Lengths], ...]

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Choose a part for each request, then draw from it."""
        chosen = rng.choice(len(self.parts), count, p=[share for share, _ in self.parts])
        drawn = np.empty(count, dtype=np.int64)
        for index, (_, lengths) in enumerate(self.parts):
            of_part = chosen == index
            drawn[of_part] = lengths.sample(int(of_part.sum()), rng)
        return drawn


def pair_within_totals(totals: Tokens, outputs: Tokens, rng: np.random.Generator) -> Tokens:
    """Give each total a shorter output at random, so that both retain their distributions.

    Drawing the two independently and cutting would distort one of them. Totals are paired in ascending order,
    each with one of the outputs that fit. If none fits, which is rare, the output is 1.
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


class Arrivals(Protocol):
    """Distribution of arrival times in seconds, ascending, after a start at 0."""

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
        """Draw arrival times: sums of gaps of shape `1 / cv^2` and mean `1 / rate`."""
        variance_ratio = self.cv**2
        gaps = rng.gamma(1 / variance_ratio, variance_ratio / self.rate_per_s, count)
        return np.asarray(np.cumsum(gaps), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOffArrivals:
    """Poisson arrivals in on-periods, none in off-periods; both have exponential durations.

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


ZIPF_EXPONENT = 1.0
"""The first of ten tenants then sends 34 % of requests, within the 16 to 52 % of production (ServeGen)."""
_MAX_TENANTS, _MAX_EXPONENT = 100_000, 10


def zipf_shares(count: int, exponent: float = ZIPF_EXPONENT) -> dict[str, float]:
    """Return shares of `tenant-1` to `tenant-n`, proportional to `1 / rank^exponent`; 0 makes them equal."""
    if not 1 <= count <= _MAX_TENANTS or not 0 <= exponent <= _MAX_EXPONENT:
        raise TraceError(
            f"tenants need a count from 1 to {_MAX_TENANTS:,} and an exponent from 0 to {_MAX_EXPONENT}, got "
            f"{count}:{exponent}"
        )
    weights = [1 / rank**exponent for rank in range(1, count + 1)]
    total = sum(weights)
    return {f"tenant-{rank}": weight / total for rank, weight in enumerate(weights, start=1)}


def parse_shares(text: str) -> dict[str, float]:
    """Parse `8` (Zipf), `8:1.2` (with an exponent) or `search=3,chat=1` (named, by weight).

    Raises:
        TraceError: the text is none of these.
    """
    try:
        if "=" not in text:
            count, _, exponent = text.partition(":")
            return zipf_shares(int(count), float(exponent or ZIPF_EXPONENT))
        pairs = [part.partition("=") for part in text.split(",")]
        weights = {name.strip(): float(weight) for name, _, weight in pairs}
    except ValueError as exc:
        raise TraceError(f"cannot parse shares {text!r}: use 8, 8:1.2 or search=3,chat=1") from exc
    if "" in weights or not all(0 < weight < float("inf") for weight in weights.values()):
        raise TraceError(f"shares need a name and a positive weight each, got {text!r}")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def assign_tenants(trace: Trace, shares: Mapping[str, float], rng: np.random.Generator) -> Trace:
    """Assign a tenant to each request, drawn by share."""
    requests = zip(trace.requests, _drawn(trace, shares, rng), strict=True)
    return replace(trace, requests=tuple(replace(request, tenant=name) for request, name in requests))


def assign_priorities(trace: Trace, shares: Mapping[str, float], rng: np.random.Generator) -> Trace:
    """Assign a priority class to each request, drawn by share.

    Raises:
        TraceError: a name is not a priority class.
    """
    unknown = set(shares) - set(PriorityClass)
    if unknown:
        raise TraceError(f"no priority class {', '.join(sorted(unknown))}: use {', '.join(PriorityClass)}")
    requests = zip(trace.requests, _drawn(trace, shares, rng), strict=True)
    return replace(
        trace, requests=tuple(replace(request, priority=PriorityClass(name)) for request, name in requests)
    )


def _drawn(trace: Trace, shares: Mapping[str, float], rng: np.random.Generator) -> list[str]:
    """Return a name for each request, drawn by share."""
    drawn = rng.choice(list(shares), len(trace.requests), p=list(shares.values()))
    return [str(name) for name in drawn]
