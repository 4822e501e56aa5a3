"""Adaptive `B_short`: moves the boundary between the pools with the measured demand.

The short pool is the home pool of a request whose token budget is at most `B_short`. The adaptation finds the
`B_short` that gives both pools the same load per unit of capacity, while the mix of requests drifts.

Inputs. Every request from its arrival to its end, queued or running: its token budget, and the KV tokens that
it is expected to hold. By Little's law the mean number present is the arrival rate times the time in the
system. A histogram of these requests by budget, averaged over `memory_s`, is therefore the demand for
capacity by length. It includes the effects of long answers, slow engines and backlogs, and needs no model of
the engine's speed.

    load(pool) = max(KV tokens / KV capacity, requests / batch slots) / speed
    imbalance(B) = (load(short) - load(long)) / (load(short) + load(long))

The load of a pool is that of the requests with this home pool. The imbalance rises with B, from -1 to 1.

The best `B_short` is where the imbalance is zero. Equal load by size is the SITA-E rule (Harchol-Balter,
Crovella, Murta 1999): each pool gets work of similar size, and neither is idle. Spill is separate, and fills
capacity that is free now with any queued request. Load counts requests in their home pool, not where they
run, so spill does not hide an imbalance.

`speed` is learned, because utilisation does not determine pace. At the same utilisation, an engine with long
prompts may generate faster or slower than one with a full batch. If the loads are even and the pools' mean
times per output token still differ, the estimated speed of the slower pool is reduced by a part of the
difference.

Oscillation is prevented as follows:
- The loads must differ by more than `tolerance_ratio` of their sum, and by more than four standard errors of
  the means. The error of a request depends on its use *and* on how long it stays (`Demand`).
- The best `B_short` must be better than the current one by half of the tolerance. If one length is a large
  part of the demand, no `B_short` is even, and the zero lies between two neighbours. Chance then makes one
  better as much as the other worse, so twice the error is required.
- A move is followed by `dwell_s` without another one, and is at most `max_step_octaves` long.
- Each time the other pool becomes the slower one, further learning of the speed is halved. It recovers within
  about half an hour.

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
    """Return the first bucket whose upper edge is at least this budget."""
    return min(bisect_left(EDGES, budget_tokens), len(EDGES) - 1)


def last_bucket_within(tokens: int) -> int:
    """Return the last bucket whose upper edge is at most `tokens`."""
    return max(bisect_right(EDGES, tokens) - 1, 0)


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """The total capacity of all replicas of a pool.

    Attributes:
        context_tokens: context limit of its smallest replica.
        tpot_s: recent mean time per output token; None if none was reported.
    """

    kv_tokens: int
    sequences: int
    context_tokens: int
    tpot_s: float | None = None


class Demand:
    """The queued and running requests by length, and their mean use of resources.

    Args:
        memory_s: time constant of the means, in seconds.

    Attributes:
        sampled_at: time of the last sample; None before the first.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._tokens, self._count = _Resource(), _Resource()
        # Seconds from the first sample to the last. A request counts from the last sample before its arrival.
        self._clock_s = 0.0
        self.sampled_at: float | None = None

    def __len__(self) -> int:
        """Return the number of queued and running requests."""
        return sum(self._count.present)

    def on_arrival(self, budget_tokens: int, kv_tokens: int) -> float:
        """Add a request. Return a mark to pass to `on_departure`.

        Args:
            kv_tokens: KV tokens that it is expected to hold.
        """
        bucket = bucket_of(budget_tokens)
        self._tokens.on_arrival(bucket, kv_tokens)
        self._count.on_arrival(bucket, 1)
        return self._clock_s

    def on_departure(self, budget_tokens: int, kv_tokens: int, arrival_mark: float) -> None:
        """Remove a request. Takes the values passed to `on_arrival`, and the mark that it returned."""
        bucket = bucket_of(budget_tokens)
        decayed = math.exp((arrival_mark - self._clock_s) / self._memory_s)
        self._tokens.on_departure(bucket, kv_tokens, decayed)
        self._count.on_departure(bucket, 1, decayed)

    def sample(self, now: float) -> None:
        """Update the means with the use since the last sample."""
        elapsed_s = 0.0 if self.sampled_at is None else now - self.sampled_at
        self.sampled_at = now
        self._clock_s += elapsed_s
        factor = math.exp(-elapsed_s / self._memory_s)
        self._tokens.decay(factor)
        self._count.decay(factor)

    def loads(self, short: PoolCapacity, long: PoolCapacity, speed_ratio: float) -> "Loads":
        """Return the loads of two pools that share these requests, for every boundary.

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
    """

    def __init__(self) -> None:
        self.present = [0] * len(EDGES)
        self.means = [0.0] * len(EDGES)
        # Sums over the present requests of w², w² u and w² u², where u is the decay since the arrival. The
        # last one also includes w² (1 - u)² of requests that have ended, as both decay alike.
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
        """Return the variances of the means by bucket, caused by random arrivals alone."""
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
        # Rounding errors could make the difference negative.
        mean = max(self._means[-1] - self._means[bucket], 0.0)
        variance = max(self._variances[-1] - self._variances[bucket], 0.0)
        return mean / self._long_capacity, variance / self._long_capacity**2


class Loads:
    """The loads of both pools for every boundary, which is the last bucket of the short pool."""

    def __init__(self, tokens: _ResourceLoads, count: _ResourceLoads) -> None:
        self._tokens, self._count = tokens, count

    def short(self, bucket: int) -> float:
        """Return the load of the short pool in its scarcer resource; 1.0 is all of it."""
        return max(self._tokens.short(bucket), self._count.short(bucket))[0]

    def long(self, bucket: int) -> float:
        """Return the load of the long pool in its scarcer resource; 1.0 is all of it."""
        return max(self._tokens.long(bucket), self._count.long(bucket))[0]

    def imbalance(self, bucket: int) -> float:
        """Return the difference of the loads over their sum."""
        short, long = self.short(bucket), self.long(bucket)
        return (short - long) / (short + long) if short + long > 0 else 0.0

    def standard_error(self, bucket: int) -> float:
        """Return the standard error of the imbalance if the loads were even; infinite without load."""
        short, short_variance = max(self._tokens.short(bucket), self._count.short(bucket))
        long, long_variance = max(self._tokens.long(bucket), self._count.long(bucket))
        if short + long <= 0:
            return math.inf
        return math.sqrt(short_variance + long_variance) / (short + long)

    def best(self, allowed: Iterable[int], current: int) -> int:
        """Return the most even boundary, of equals the nearest one; `current` if none is allowed."""
        return min(
            allowed,
            key=lambda bucket: (round(abs(self.imbalance(bucket)), 9), abs(bucket - current)),
            default=current,
        )


# Default of the lower bound, as a share of the configured `b_short_tokens`.
_LOWEST_RATIO = 1 / 32
# Part of a difference in pace that is added to the speed at a time, the time constant of its recovery, and
# the maximum ratio of the speeds.
_GAIN = 0.5
_GAIN_RECOVERY_S = 1_800.0
_MAX_SPEED_RATIO = 4.0
# Seconds between two samples of the demand.
_INTERVAL_S = 1.0
# Standard errors beyond which a difference is significant. A mean over a minute has sixty independent values
# in an hour, so chance would exceed three standard errors far too often.
_SIGNIFICANT = 4.0


@settings(block="adaptive_b_short")
class AdaptiveBShortSettings:
    """Adaptation of `B_short`: bounds and speed."""

    # If false, `b_short_tokens` is fixed.
    enabled: bool = False
    # Lower bound of `B_short` in tokens. Null is a 32nd of `b_short_tokens`.
    b_short_min: Annotated[int | None, at_least(1), INTERNAL] = None
    # Upper bound of `B_short` in tokens. Null is the short pool's context limit, which always applies as
    # well.
    b_short_max: Annotated[int | None, at_least(1), INTERNAL] = None
    # Time constant of the mean demand, in seconds. Shorter follows sooner; longer is steadier and resolves
    # finer differences.
    memory_s: Annotated[float, FINITE_POSITIVE, INTERNAL] = 60.0
    # Loads that differ by less than this share of their sum count as even: 0.15 is a ratio of 1.35.
    tolerance_ratio: Annotated[float, INNER_SHARE, INTERNAL] = 0.15
    # Largest single move, in octaves.
    max_step_octaves: Annotated[
        float, at_least(1 / PER_OCTAVE).hint("the distance between two boundaries"), INTERNAL
    ] = 2.0
    # Seconds after a move without another one. The effect of a move shows only when the requests that arrived
    # before it have ended.
    dwell_s: Annotated[float, NOT_NEGATIVE, INTERNAL] = 30.0

    def __post_init__(self) -> None:
        low, high = self.b_short_min, self.b_short_max
        if low is not None and high is not None and low > high:
            raise ValueError(f"adaptive_b_short.b_short_min of {low} is above b_short_max of {high}")

    def lowest(self, b_short_tokens: int) -> int:
        """Return the lower bound of `B_short`, given its configured value."""
        if self.b_short_min is not None:
            return self.b_short_min
        return max(1, int(b_short_tokens * _LOWEST_RATIO))


@dataclass(frozen=True, slots=True, kw_only=True)
class BShortChanged:
    """A change of `B_short`.

    Attributes:
        b_short_tokens, was_tokens: the new and the previous value.
        short_load, long_load: loads of the pools at the previous value; 1.0 is all capacity of the long pool,
            and that of the short pool times its speed.
        speed_ratio: the learned speed of the short pool, as a multiple of the long pool's.
    """

    b_short_tokens: int
    was_tokens: int
    short_load: float
    long_load: float
    speed_ratio: float


class AdaptiveBShort:
    """Adapts `B_short` of one model's pools.

    Attributes:
        demand: demand of all requests; the router reports their arrivals and ends.
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
        """Return whether the next sample of the demand is due."""
        last = self.demand.sampled_at
        return last is None or now >= last + _INTERVAL_S

    def adapt(
        self, short: PoolCapacity | None, long: PoolCapacity | None, now: float
    ) -> BShortChanged | None:
        """Sample the demand, and move `B_short` if needed.

        Args:
            short, long: capacities of the pools; None for a pool without replicas.
            now: time in seconds, not less than in the previous call.
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
            # A difference in pace is attributed to speed only if the loads are even.
            self._speed.learn(self._settings, now)
            return None
        target = loads.best(self._allowed(short), current)
        if not self._is_better(loads, target, current, chance):
            return None
        return self._move(target, current, loads, now)

    def restore(self, b_short_tokens: int, now: float) -> None:
        """Continue from the value of an earlier process, within the current bounds."""
        highest = self._settings.b_short_max or b_short_tokens
        self.b_short_tokens = min(max(b_short_tokens, self._lowest), highest)
        self._dwells_until = now + self._settings.dwell_s

    def _is_better(self, loads: Loads, target: int, current: int, chance: float) -> bool:
        """Return whether the loads are significantly more even at the target than at the current value.

        At both values the error has the same size and direction, so it cancels. If the zero lies between
        them, the error makes one better as much as the other worse, and counts for both.
        """
        before, after = loads.imbalance(current), loads.imbalance(target)
        gain = abs(before) - abs(after)
        beyond = abs(after / before) if before * after < 0 else 0.0
        needed = chance * (1 + beyond) if beyond else 0.0
        return gain >= max(self._settings.tolerance_ratio / 2, needed)

    def _allowed(self, short: PoolCapacity) -> range:
        """Return the buckets allowed for `B_short`."""
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
    """The learned speed of the short pool relative to the long pool, at the same utilisation."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._tpot_s: list[float | None] = [None, None]
        self._began_at: float | None = None
        self._observed_at = 0.0
        self._learned_at = -math.inf
        self._gain, self._last_sign = _GAIN, 0.0
        self.ratio = 1.0

    def restart(self) -> None:
        """Reset the mean paces, which belong to the previous `B_short`. The ratio is retained."""
        self._tpot_s, self._began_at = [None, None], None

    def observe(self, short_tpot_s: float | None, long_tpot_s: float | None, now: float) -> None:
        """Update the mean paces of the pools. A pool without a report retains its mean."""
        if self._began_at is None:
            self._began_at = self._observed_at = now
        weight = -math.expm1((self._observed_at - now) / self._memory_s)
        self._observed_at = now
        for place, tpot_s in enumerate((short_tpot_s, long_tpot_s)):
            mean = self._tpot_s[place]
            if tpot_s is not None and tpot_s > 0:
                self._tpot_s[place] = tpot_s if mean is None else mean + weight * (tpot_s - mean)

    def learn(self, settings: AdaptiveBShortSettings, now: float) -> None:
        """Attribute a lasting difference in pace to the speed."""
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
        self.ratio = min(max(ratio, 1 / _MAX_SPEED_RATIO), _MAX_SPEED_RATIO)
        self.restart()


# Arrived work by home pool: counters that only increase, from which readers compute rates.
#
# Requests rejected for lack of capacity count, because a fleet that is too small rejects most of the demand
# to which it should scale. Requests rejected for other reasons, such as the limits of a key, do not count.
# Nor do batch requests, because they use only capacity that others leave.


@dataclass(slots=True)
class PoolArrivals:
    """The work that has arrived for one pool.

    Attributes:
        prefill_tokens: prompt tokens that were not expected to be cached.
        output_tokens: expected tokens of the answers.
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
        """Count a request for its home pool, unless it is of the batch class or no pool can hold it."""
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
