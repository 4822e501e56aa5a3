"""What room do requests of each length take on average, and how much of that is chance?

A resource (KV tokens, or places in a batch) is averaged with an exponential window of `memory_s`. A request
that takes `w` of it for a time `r` adds `w (1 - exp(-r / memory_s))` to the average of its length, and that
fades after it has left. When requests come independently of one another, the variance of such a sum is the
sum of the squares of what each one adds (Campbell's theorem for a Poisson stream). So the squares are summed,
too. Long requests weigh twice in them: they take more, and they stay longer.

With `u = exp(-age / memory_s)` the square of what a request adds is `w² (1 - 2u + u²)` while it is there, and
`w² (1 - u)²`, as it was at its end, that fades with the square of the window thereafter. Three sums by length
therefore do, whatever the number of requests.

Lengths lie on a grid of eight places to the octave.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

PER_OCTAVE = 8
_OCTAVES = 21  # up to two million tokens
EDGES = [round(2 ** (place / PER_OCTAVE)) for place in range(_OCTAVES * PER_OCTAVE + 1)]


def place_of(budget_tokens: int) -> int:
    """The first place whose border makes such a request short."""
    return min(bisect_left(EDGES, budget_tokens), len(EDGES) - 1)


def place_below(tokens: int) -> int:
    """The last place whose border is at most `tokens`."""
    return max(bisect_right(EDGES, tokens) - 1, 0)


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """What all replicas of a pool hold together.

    Attributes:
        context_tokens: the context limit of its smallest replica.
        tpot_s: mean time per output token lately; None when nothing was generated, or nobody told.
    """

    kv_tokens: int
    sequences: int
    context_tokens: int
    tpot_s: float | None = None


class Demand:
    """The requests that are there by length, and what they took on average.

    Args:
        memory_s: of the averages.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._tokens, self._count = _Resource(), _Resource()
        # Seconds from the first sample to the last: whoever comes is there from the sample before.
        self._clock_s = 0.0
        self._sampled_at: float | None = None

    @property
    def sampled_at(self) -> float | None:
        """When it was last averaged; None before the first time."""
        return self._sampled_at

    def __len__(self) -> int:
        """Requests that are there."""
        return sum(self._count.there)

    def on_arrival(self, budget_tokens: int, kv_tokens: int) -> float:
        """A request is there; returns what `left` is to be given."""
        place = place_of(budget_tokens)
        self._tokens.on_arrival(place, kv_tokens)
        self._count.on_arrival(place, 1)
        return self._clock_s

    def on_departure(self, budget_tokens: int, kv_tokens: int, came_at: float) -> None:
        """A request that came is over."""
        place = place_of(budget_tokens)
        faded = math.exp((came_at - self._clock_s) / self._memory_s)
        self._tokens.on_departure(place, kv_tokens, faded)
        self._count.on_departure(place, 1, faded)

    def sample(self, now: float) -> None:
        """Average what was there since the last sample."""
        elapsed_s = 0.0 if self._sampled_at is None else now - self._sampled_at
        self._sampled_at = now
        self._clock_s += elapsed_s
        kept = math.exp(-elapsed_s / self._memory_s)
        self._tokens.fade(kept)
        self._count.fade(kept)

    def loads(self, short: PoolCapacity, long: PoolCapacity, speed_ratio: float) -> "Loads":
        """The loads of two pools that share these requests.

        Args:
            speed_ratio: how fast the short pool is at the same share of room taken, as a multiple of the long
                one.
        """
        return Loads(
            (
                _Share(self._tokens, short.kv_tokens * speed_ratio, long.kv_tokens),
                _Share(self._count, short.sequences * speed_ratio, long.sequences),
            )
        )


class _Resource:
    """What is taken of one resource, by place.

    Attributes:
        there: by those that are there now.
        means: on average.
    """

    def __init__(self) -> None:
        self.there = [0] * len(EDGES)
        self.means = [0.0] * len(EDGES)
        # The sum of w² over those that are there; of w² u; and of w² u² over them with w² (1 - u)² of those
        # that have left, which fade alike.
        self._squares = [0] * len(EDGES)
        self._once = [0.0] * len(EDGES)
        self._twice = [0.0] * len(EDGES)

    def on_arrival(self, place: int, amount: int) -> None:
        self.there[place] += amount
        square = amount * amount
        self._squares[place] += square
        self._once[place] += square
        self._twice[place] += square

    def on_departure(self, place: int, amount: int, faded: float) -> None:
        self.there[place] -= amount
        square = amount * amount
        self._squares[place] -= square
        self._once[place] -= square * faded
        self._twice[place] += square * (1 - 2 * faded)

    def fade(self, kept: float) -> None:
        for place, value in enumerate(self.there):
            mean = self.means[place]
            if mean or value:
                self.means[place] = value + kept * (mean - value)
                self._once[place] *= kept
                self._twice[place] *= kept * kept

    def variances(self) -> list[float]:
        """Of the averages, by place, as far as chance explains them."""
        sums = zip(self._squares, self._once, self._twice, strict=True)
        return [max(0.0, there - 2 * once + twice) for there, once, twice in sums]


class _Share:
    """What two pools have of one resource, for every place of the border: loads and their variances."""

    def __init__(self, of: _Resource, short_capacity: float, long_capacity: float) -> None:
        self._means, self._variances = list(accumulate(of.means)), list(accumulate(of.variances()))
        self._short_capacity, self._long_capacity = short_capacity, long_capacity

    def short(self, place: int) -> tuple[float, float]:
        return (
            self._means[place] / self._short_capacity,
            self._variances[place] / self._short_capacity**2,
        )

    def long(self, place: int) -> tuple[float, float]:
        # What floating point leaves of nothing may be less than it.
        mean = max(self._means[-1] - self._means[place], 0.0)
        variance = max(self._variances[-1] - self._variances[place], 0.0)
        return mean / self._long_capacity, variance / self._long_capacity**2


class Loads:
    """The loads of both pools for every place of the border."""

    def __init__(self, shares: tuple[_Share, _Share]) -> None:
        self._tokens, self._count = shares

    def short(self, place: int) -> float:
        """Of the scarcer resource, 1.0 is all of it."""
        return max(self._tokens.short(place), self._count.short(place))[0]

    def long(self, place: int) -> float:
        """Of the scarcer resource, 1.0 is all of it."""
        return max(self._tokens.long(place), self._count.long(place))[0]

    def imbalance(self, place: int) -> float:
        """The difference of the loads over their sum."""
        short, long = self.short(place), self.long(place)
        return (short - long) / (short + long) if short + long > 0 else 0.0

    def standard_error(self, place: int) -> float:
        """Of the imbalance, if the loads were even there; infinite when there is no load."""
        short, short_variance = max(self._tokens.short(place), self._count.short(place))
        long, long_variance = max(self._tokens.long(place), self._count.long(place))
        if short + long <= 0:
            return math.inf
        return math.sqrt(short_variance + long_variance) / (short + long)

    def best(self, allowed: Iterable[int], present: int) -> int:
        """The evenest place, of several the nearest to the present one; that itself if none is allowed."""
        return min(
            allowed,
            key=lambda place: (round(abs(self.imbalance(place)), 9), abs(place - present)),
            default=present,
        )
