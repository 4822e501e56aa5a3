"""The demand by request length: mean use of KV tokens and batch slots, and the error of that mean.

A resource (KV tokens, or slots of the batch) is averaged with an exponential window of `memory_s`. A request
that uses `w` of it for a time `r` adds `w (1 - exp(-r / memory_s))` to the mean of its length, which decays
after its end. When requests arrive independently, the variance of such a sum is the sum of the squares of
what each adds (Campbell's theorem for a Poisson stream). So the squares are summed too. Long requests count
twice in them: they use more, and they stay longer.

With `u = exp(-age / memory_s)` the square of what a request adds is `w² (1 - 2u + u²)` while it is present.
After its end it is `w² (1 - u)²` with the `u` at its end, which decays with the square of the window. So
three sums per length suffice, whatever the number of requests.

Lengths are in buckets, eight to the octave.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

PER_OCTAVE = 8
_OCTAVES = 21  # up to two million tokens
EDGES = [round(2 ** (bucket / PER_OCTAVE)) for bucket in range(_OCTAVES * PER_OCTAVE + 1)]


def bucket_of(budget_tokens: int) -> int:
    """The first bucket whose upper edge is at least this budget."""
    return min(bisect_left(EDGES, budget_tokens), len(EDGES) - 1)


def last_bucket_within(tokens: int) -> int:
    """The last bucket whose upper edge is at most `tokens`."""
    return max(bisect_right(EDGES, tokens) - 1, 0)


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """The capacity of all replicas of a pool together.

    Attributes:
        context_tokens: the context limit of its smallest replica.
        tpot_s: recent mean time per output token; None when none was reported.
    """

    kv_tokens: int
    sequences: int
    context_tokens: int
    tpot_s: float | None = None


class Demand:
    """The requests that wait or run, by length, and their mean use of resources.

    Args:
        memory_s: time constant of the means, in seconds.

    Attributes:
        sampled_at: when the last sample was taken; None before the first.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._tokens, self._count = _Resource(), _Resource()
        # Seconds from the first sample to the last; a request counts from the sample before its arrival.
        self._clock_s = 0.0
        self.sampled_at: float | None = None

    def __len__(self) -> int:
        """Requests that wait or run."""
        return sum(self._count.present)

    def on_arrival(self, budget_tokens: int, kv_tokens: int) -> float:
        """A request waits or runs from now on; returns a mark to give to `on_departure`.

        Args:
            budget_tokens: its token budget, which decides where it is at home.
            kv_tokens: KV tokens that it is expected to hold.
        """
        bucket = bucket_of(budget_tokens)
        self._tokens.on_arrival(bucket, kv_tokens)
        self._count.on_arrival(bucket, 1)
        return self._clock_s

    def on_departure(self, budget_tokens: int, kv_tokens: int, arrival_mark: float) -> None:
        """A request has ended; takes what it was given at the arrival, and what `on_arrival` returned."""
        bucket = bucket_of(budget_tokens)
        decayed = math.exp((arrival_mark - self._clock_s) / self._memory_s)
        self._tokens.on_departure(bucket, kv_tokens, decayed)
        self._count.on_departure(bucket, 1, decayed)

    def sample(self, now: float) -> None:
        """Average what was used since the last sample."""
        elapsed_s = 0.0 if self.sampled_at is None else now - self.sampled_at
        self.sampled_at = now
        self._clock_s += elapsed_s
        factor = math.exp(-elapsed_s / self._memory_s)
        self._tokens.decay(factor)
        self._count.decay(factor)

    def loads(self, short: PoolCapacity, long: PoolCapacity, speed_ratio: float) -> "Loads":
        """The loads of two pools that share these requests, for every boundary.

        Args:
            speed_ratio: speed of the short pool at the same utilisation, as a multiple of the long pool's.
        """
        return Loads(
            _ResourceLoads(self._tokens, short.kv_tokens * speed_ratio, long.kv_tokens),
            _ResourceLoads(self._count, short.sequences * speed_ratio, long.sequences),
        )


class _Resource:
    """The use of one resource, by bucket.

    Attributes:
        present: use by the requests that are present now.
        means: mean use.
    """

    def __init__(self) -> None:
        self.present = [0] * len(EDGES)
        self.means = [0.0] * len(EDGES)
        # Over the requests that are present: the sum of w²; of w² u; and of w² u², which also has the
        # w² (1 - u)² of those that have ended, as both decay alike.
        self._squares = [0] * len(EDGES)
        self._squares_u = [0.0] * len(EDGES)
        self._squares_u2 = [0.0] * len(EDGES)

    def on_arrival(self, bucket: int, amount: int) -> None:
        self.present[bucket] += amount
        square = amount * amount
        self._squares[bucket] += square
        self._squares_u[bucket] += square
        self._squares_u2[bucket] += square

    def on_departure(self, bucket: int, amount: int, decayed: float) -> None:
        self.present[bucket] -= amount
        square = amount * amount
        self._squares[bucket] -= square
        self._squares_u[bucket] -= square * decayed
        self._squares_u2[bucket] += square * (1 - 2 * decayed)

    def decay(self, factor: float) -> None:
        for bucket, value in enumerate(self.present):
            mean = self.means[bucket]
            if mean or value:
                self.means[bucket] = value + factor * (mean - value)
                self._squares_u[bucket] *= factor
                self._squares_u2[bucket] *= factor * factor

    def variances(self) -> list[float]:
        """Variances of the means, by bucket, from random arrivals alone."""
        sums = zip(self._squares, self._squares_u, self._squares_u2, strict=True)
        return [max(0.0, squares - 2 * u + u2) for squares, u, u2 in sums]


class _ResourceLoads:
    """The loads of two pools in one resource, and their variances, for every boundary."""

    def __init__(self, of: _Resource, short_capacity: float, long_capacity: float) -> None:
        self._means, self._variances = list(accumulate(of.means)), list(accumulate(of.variances()))
        self._short_capacity, self._long_capacity = short_capacity, long_capacity

    def short(self, bucket: int) -> tuple[float, float]:
        return (
            self._means[bucket] / self._short_capacity,
            self._variances[bucket] / self._short_capacity**2,
        )

    def long(self, bucket: int) -> tuple[float, float]:
        # Rounding may leave a difference just below zero.
        mean = max(self._means[-1] - self._means[bucket], 0.0)
        variance = max(self._variances[-1] - self._variances[bucket], 0.0)
        return mean / self._long_capacity, variance / self._long_capacity**2


class Loads:
    """The loads of both pools for every boundary, which is the last bucket of the short pool."""

    def __init__(self, tokens: _ResourceLoads, count: _ResourceLoads) -> None:
        self._tokens, self._count = tokens, count

    def short(self, bucket: int) -> float:
        """Load of the short pool in its scarcer resource; 1.0 is all of it."""
        return max(self._tokens.short(bucket), self._count.short(bucket))[0]

    def long(self, bucket: int) -> float:
        """Load of the long pool in its scarcer resource; 1.0 is all of it."""
        return max(self._tokens.long(bucket), self._count.long(bucket))[0]

    def imbalance(self, bucket: int) -> float:
        """The difference of the loads over their sum."""
        short, long = self.short(bucket), self.long(bucket)
        return (short - long) / (short + long) if short + long > 0 else 0.0

    def standard_error(self, bucket: int) -> float:
        """Standard error of the imbalance, if the loads were even; infinite without load."""
        short, short_variance = max(self._tokens.short(bucket), self._count.short(bucket))
        long, long_variance = max(self._tokens.long(bucket), self._count.long(bucket))
        if short + long <= 0:
            return math.inf
        return math.sqrt(short_variance + long_variance) / (short + long)

    def best(self, allowed: Iterable[int], current: int) -> int:
        """The boundary with the least imbalance, of equals the nearest to `current`.

        It is `current` itself when none is allowed.
        """
        return min(
            allowed,
            key=lambda bucket: (round(abs(self.imbalance(bucket)), 9), abs(bucket - current)),
            default=current,
        )
