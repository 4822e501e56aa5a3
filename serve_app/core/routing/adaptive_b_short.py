"""Adaptive `B_short`: the boundary between the pools follows the measured demand.

A request whose token budget is at most `B_short` is at home in the short pool. The question is which
`B_short` gives both pools the same load per unit of capacity, while the mix of requests drifts.

Inputs. Every request from its arrival to its end, waiting or running: its token budget, and the KV tokens
that it is expected to hold. By Little's law the mean number present is arrival rate times time in the system.
So a histogram of them by budget, averaged over `memory_s`, is the demand for capacity by length. It includes
the effects of long answers, slow engines and backlogs, and needs no model of the engine's speed.

    load(pool) = max(KV tokens / KV capacity, requests / batch slots) / speed    of those at home in it
    imbalance(B) = (load(short) - load(long)) / (load(short) + load(long))       rises with B, -1 to 1

The best `B_short` is where the imbalance is zero. Equal load by size is the SITA-E rule (Harchol-Balter,
Crovella, Murta 1999): each pool gets work of similar size, and neither is idle. Spill is separate, and fills
capacity that is free now with any waiting request. Load counts requests where they are at home, not where
they run, so spill does not hide an imbalance.

`speed` is learned, because utilisation is not pace. At the same utilisation, an engine with long prompts may
generate faster than one with a full batch, or slower. When the loads are even and the pools' mean times per
output token still differ, the estimated speed of the slower pool is reduced by a part of the difference.

Why it does not oscillate:
- The loads must differ by more than `tolerance_ratio` of their sum, and by more than four standard errors of
  the means. A request counts for the error by what it uses *and* how long it stays (`demand`).
- The best `B_short` must be better than the current one by half of the tolerance. Where one length is a large
  part of the demand, no `B_short` is even, and the zero lies between two neighbours. Chance then makes one
  better as much as the other worse, so twice the error is required.
- A move is followed by `dwell_s` without another, and is at most `max_step_octaves` long.
- Each time the other pool turns out to be the slower one, further learning of the speed is halved. It
  recovers within half an hour or so.

Ties (lengths without requests): the boundary nearest to the current one. Without traffic, or with a pool
without replicas, nothing moves. Boundaries are on a grid of eight to the octave.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.settings_base import (
    FINITE_POSITIVE,
    INNER_SHARE,
    INTERNAL,
    NOT_NEGATIVE,
    at_least,
    settings,
)
from serve_app.request import PriorityClass, Request

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


# The lower bound when none is given, as a share of the configured `b_short_tokens`.
_LOWEST_RATIO = 1 / 32
# How much of a difference in pace is added to the speed at a time; the time in which that recovers; the most
# that the speeds may differ by.
_GAIN = 0.5
_GAIN_RECOVERY_S = 1_800.0
_MOST_SPEED_RATIO = 4.0
# Seconds between two samples of the demand.
_INTERVAL_S = 1.0
# Standard errors beyond which a difference is significant. A mean over a minute has sixty independent values
# in an hour, so three standard errors would be exceeded by chance far too often.
_SIGNIFICANT = 4.0


@settings(block="adaptive_b_short")
class AdaptiveBShortSettings:
    """Whether, how far and how fast `B_short` moves."""

    # Off, `b_short_tokens` stays as it is set.
    enabled: bool = False
    # Bounds of `B_short` in tokens. Null: a 32nd of `b_short_tokens`, and the short pool's context limit,
    # which always holds as well.
    b_short_min: Annotated[int | None, at_least(1), INTERNAL] = None
    # See `b_short_min`.
    b_short_max: Annotated[int | None, at_least(1), INTERNAL] = None
    # Time constant of the mean demand. Shorter follows sooner; longer is steadier and resolves finer
    # differences.
    memory_s: Annotated[float, FINITE_POSITIVE, INTERNAL] = 60.0
    # Loads that differ by less than this share of their sum count as even: 0.15 is a ratio of 1.35.
    tolerance_ratio: Annotated[float, INNER_SHARE, INTERNAL] = 0.15
    # Largest single move, and the time without another one after it. The effect of a move shows only when the
    # requests that arrived before it have ended.
    max_step_octaves: Annotated[
        float, at_least(1 / PER_OCTAVE).hint("the distance of two borders"), INTERNAL
    ] = 2.0
    # See `max_step_octaves`.
    dwell_s: Annotated[float, NOT_NEGATIVE, INTERNAL] = 30.0

    def __post_init__(self) -> None:
        low, high = self.b_short_min, self.b_short_max
        if low is not None and high is not None and low > high:
            raise ValueError(f"adaptive_b_short.b_short_min of {low} is above b_short_max of {high}")

    def lowest(self, b_short_tokens: int) -> int:
        """The lower bound of `B_short`, given its configured value."""
        if self.b_short_min is not None:
            return self.b_short_min
        return max(1, int(b_short_tokens * _LOWEST_RATIO))


@dataclass(frozen=True, slots=True, kw_only=True)
class BShortChanged:
    """`B_short` has another value from now on.

    Attributes:
        b_short_tokens, was_tokens: the new value and the one before.
        short_load, long_load: the loads of the pools at the old value; 1.0 is all capacity of the long pool,
            and that of the short one times its speed.
        speed_ratio: the learned speed of the short pool, as a multiple of the long pool's.
    """

    b_short_tokens: int
    was_tokens: int
    short_load: float
    long_load: float
    speed_ratio: float


class AdaptiveBShort:
    """`B_short` of one model's pools.

    Args:
        b_short_tokens: its initial value.

    Attributes:
        b_short_tokens: its current value.
        demand: of all requests, which the router reports from arrival to end.
    """

    def __init__(self, settings: AdaptiveBShortSettings, b_short_tokens: int) -> None:
        self._settings = settings
        self.b_short_tokens = b_short_tokens
        self._lowest = settings.lowest(b_short_tokens)
        self.demand = Demand(settings.memory_s)
        self._dwells_until = -math.inf
        self._speed = _SpeedRatio(settings.memory_s)

    def __repr__(self) -> str:
        return f"<AdaptiveBShort {self.b_short_tokens} requests={len(self.demand)}>"

    def is_due(self, now: float) -> bool:
        """Whether it is time for another sample of the demand."""
        last = self.demand.sampled_at
        return last is None or now >= last + _INTERVAL_S

    def adapt(
        self, short: PoolCapacity | None, long: PoolCapacity | None, now: float
    ) -> BShortChanged | None:
        """Sample the demand, and move `B_short` if that is due.

        Args:
            short, long: the capacity of the pools; None while a pool has no replica.
            now: seconds; never less than at the call before.
        """
        self.demand.sample(now)
        if short is None or long is None:
            return None
        if now < self._dwells_until:
            return None
        self._speed.observe(short.tpot_s, long.tpot_s, now)
        loads = self.demand.loads(short, long, self._speed.ratio)
        current = last_bucket_within(self.b_short_tokens)
        chance = _SIGNIFICANT * loads.standard_error(current)
        if abs(loads.imbalance(current)) <= max(self._settings.tolerance_ratio, chance):
            # Only what remains when the loads are even is a difference in speed.
            self._speed.learn(self._settings, now)
            return None
        target = loads.best(self._allowed(short), current)
        if not self._is_better(loads, target, current, chance):
            return None
        return self._move(target, current, loads, now)

    def restore(self, b_short_tokens: int, now: float) -> None:
        """Continue from the value of an earlier process, within the bounds of this one."""
        highest = self._settings.b_short_max or b_short_tokens
        self.b_short_tokens = min(max(b_short_tokens, self._lowest), highest)
        self._dwells_until = now + self._settings.dwell_s

    def _is_better(self, loads: Loads, target: int, current: int, chance: float) -> bool:
        """Whether the loads are significantly more even at the target than at the current value.

        At both values the error has the same size and direction, so it cancels. When the zero lies between
        them, the error makes one better as much as the other worse, and counts for both.
        """
        before, after = loads.imbalance(current), loads.imbalance(target)
        gain = abs(before) - abs(after)
        beyond = abs(after / before) if before * after < 0 else 0.0
        needed = chance * (1 + beyond) if beyond else 0.0
        return gain >= max(self._settings.tolerance_ratio / 2, needed)

    def _allowed(self, short: PoolCapacity) -> range:
        """The buckets that `B_short` may have."""
        highest = min(self._settings.b_short_max or short.context_tokens, short.context_tokens)
        return range(bisect_left(EDGES, self._lowest), last_bucket_within(highest) + 1)

    def _move(self, target: int, current: int, loads: Loads, now: float) -> BShortChanged | None:
        step = int(self._settings.max_step_octaves * PER_OCTAVE)
        bucket = min(max(target, current - step), current + step)
        if EDGES[bucket] == self.b_short_tokens:
            return None
        was, self.b_short_tokens = self.b_short_tokens, EDGES[bucket]
        self._dwells_until = now + self._settings.dwell_s
        self._speed.restart()
        return BShortChanged(
            b_short_tokens=self.b_short_tokens,
            was_tokens=was,
            short_load=loads.short(current),
            long_load=loads.long(current),
            speed_ratio=self._speed.ratio,
        )


class _SpeedRatio:
    """The learned speed of the short pool at the same utilisation, as a multiple of the long pool's.

    Attributes:
        ratio: that multiple.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._tpot_s: list[float | None] = [None, None]
        self._began_at: float | None = None
        self._observed_at = 0.0
        self._learned_at = -math.inf
        self._gain, self._last_sign = _GAIN, 0.0
        self.ratio = 1.0

    def restart(self) -> None:
        """Forget the pace, which belongs to another `B_short`, but not the ratio."""
        self._tpot_s, self._began_at = [None, None], None

    def observe(self, short_tpot_s: float | None, long_tpot_s: float | None, now: float) -> None:
        """Average the reported pace of the pools; a pool without a report keeps its mean."""
        if self._began_at is None:
            self._began_at = self._observed_at = now
        weight = -math.expm1((self._observed_at - now) / self._memory_s)
        self._observed_at = now
        for place, tpot_s in enumerate((short_tpot_s, long_tpot_s)):
            mean = self._tpot_s[place]
            if tpot_s is not None and tpot_s > 0:
                self._tpot_s[place] = tpot_s if mean is None else mean + weight * (tpot_s - mean)

    def learn(self, settings: AdaptiveBShortSettings, now: float) -> None:
        """Attribute a difference in pace that has lasted to the speed."""
        short_s, long_s = self._tpot_s
        if short_s is None or long_s is None or self._began_at is None:
            return
        if now < self._began_at + settings.dwell_s:
            return
        if abs(long_s - short_s) <= settings.tolerance_ratio * (long_s + short_s):
            return
        sign = math.copysign(1.0, long_s - short_s)
        recovered = -math.expm1((self._learned_at - now) / _GAIN_RECOVERY_S)
        self._gain += recovered * (_GAIN - self._gain)
        if sign == -self._last_sign:
            self._gain /= 2
        self._last_sign, self._learned_at = sign, now
        ratio = self.ratio * (long_s / short_s) ** self._gain
        self.ratio = min(max(ratio, 1 / _MOST_SPEED_RATIO), _MOST_SPEED_RATIO)
        self.restart()


# The work that has arrived so far, by the pool where it is at home: counters that only grow.
#
# Whoever wants a rate reads them twice. Requests that are refused for want of capacity count as well: a fleet
# that is too small refuses most of what it should grow for. Those that are refused for what they are do not,
# as beyond the limits of a key. Batch requests do not either, since they use the capacity that others leave.


@dataclass(slots=True)
class PoolArrivals:
    """What has arrived for one pool.

    Attributes:
        prefill_tokens: prompt tokens that no cache was expected to hold.
        output_tokens: tokens that the answers were expected to have.
    """

    requests: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0


class ArrivedWork:
    """The counters of all pools of a model."""

    def __init__(self, pools: Iterable[str]) -> None:
        self._pools = {pool: PoolArrivals() for pool in pools}

    def add(
        self, pools: Sequence[str], request: Request, estimate: TokenEstimate, cached_tokens: int = 0
    ) -> None:
        """Count one request, unless it is of the batch class or no pool can hold it.

        Args:
            pools: that may serve it, its home first.
        """
        if not pools or request.priority is PriorityClass.BATCH:
            return
        arrivals = self._pools[pools[0]]
        arrivals.requests += 1
        arrivals.prefill_tokens += max(0, estimate.expected_prompt_tokens - cached_tokens)
        arrivals.output_tokens += estimate.expected_output_tokens

    def __getitem__(self, pool: str) -> PoolArrivals:
        return self._pools[pool]

    def __repr__(self) -> str:
        return f"<ArrivedWork {self._pools}>"
