"""Where should the border between the pools lie, so that both are loaded alike?

Question. A request whose token budget is at most `B_short` is at home in the short pool. Which `B_short`
gives both pools the same load per unit of capacity, while the mix of requests drifts?

Inputs. Every request from its arrival to its end, waiting or running, wherever it runs: its token budget and
the KV tokens that it is expected to hold. By Little's law the mean of what is there is arrival rate times
time in the system, so a histogram of it by budget, averaged over `memory_s`, is the demand for room by
length. It contains what long answers, slow engines and backlogs do to demand, and no model of the engine's
speed is needed.

    load(pool) = max(KV tokens / KV capacity, requests / batch places) / speed    of those at home in it
    imbalance(B) = (load(short) - load(long)) / (load(short) + load(long))   rises with B, -1 to 1

The best border is where the imbalance is zero. Equal load by size is the SITA-E rule (Harchol-Balter,
Crovella, Murta 1999); it gives each pool work of one size and keeps neither idle. Spill is a different thing:
it fills room that is free *now* with whoever waits. Load counts requests where they are at home, not where
they run, so spill does not hide an imbalance.

`speed` is learned, because room is not pace: at the same share of room taken, an engine whose prompts are
long may generate faster than one with a full batch, or slower. While the loads are even and the pools' mean
times per output token still differ, the slower pool's speed is taken for less, by a part of the difference
at a time.

Why it does not flap:
- The loads must differ by more than `tolerance_ratio` of their sum, and by more than chance explains: by four
  standard errors of the averages, in which a request counts by what it takes *and* how long it stays
  (`serve_app/routing/demand.py`).
- The best border must be better than the present one by half of the tolerance. Where one length makes up much
  of the demand no border is even, and the zero lies between two neighbours. Then chance makes one better as
  much as the other worse, so that twice the error is asked for.
- A move is followed by `dwell_s` without another, and is at most `max_step_octaves` long.
- Each time that the other pool turns out to be the slower one, what is learned of the speed from then on
  counts half; it recovers within half an hour or so.

At ties (lengths that nobody asks for) the border nearest to the present one. No traffic: no moves. A pool
without replicas: no moves. Borders lie on a grid of eight to the octave.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Annotated

from serve_app.routing.demand import EDGES, PER_OCTAVE, Demand, Loads, PoolCapacity, place_below
from serve_app.settings_base import FINITE_POSITIVE, INNER_SHARE, NOT_NEGATIVE, at_least, settings

# The lower bound when none is given, as a share of the border that the settings begin with.
_LOWEST_RATIO = 1 / 32
# How much of a difference in pace goes into the speed at a time; the time in which that recovers; the most
# that the speeds may differ by.
_GAIN = 0.5
_GAIN_RECOVERY_S = 1_800.0
_MOST_SPEED_RATIO = 4.0
# Standard errors beyond which a difference is no chance. An average over a minute is a new one sixty times an
# hour, and wanders beyond three standard errors in one hour out of two, beyond four in one out of sixteen.
_SURE = 4.0


@settings(block="adaptive_b_short")
class AdaptiveBShortSettings:
    """Whether, how far and how fast `B_short` moves."""

    enabled: bool = False
    # Bounds of the border in tokens. None: a 32nd of `b_short_tokens`, and the short pool's context limit,
    # which always holds as well.
    b_short_min: Annotated[int | None, at_least(1)] = None
    b_short_max: Annotated[int | None, at_least(1)] = None
    # Demand is averaged over so long. Shorter follows sooner; longer is steadier and sees finer differences.
    memory_s: Annotated[float, FINITE_POSITIVE] = 60.0
    # Loads that differ by less than this share of their sum are even: 0.15 is 1.35 times one another.
    tolerance_ratio: Annotated[float, INNER_SHARE] = 0.15
    # A border moves at most so far at once, and then stays for so long: what has moved shows only when those
    # who came under the old border are done.
    max_step_octaves: Annotated[float, at_least(1 / PER_OCTAVE).hint("the distance of two borders")] = 2.0
    dwell_s: Annotated[float, NOT_NEGATIVE] = 30.0
    # Between two looks at the demand.
    interval_s: Annotated[float, FINITE_POSITIVE] = 1.0

    def __post_init__(self) -> None:
        low, high = self.b_short_min, self.b_short_max
        if low is not None and high is not None and low > high:
            raise ValueError(f"adaptive_b_short.b_short_min of {low} is above b_short_max of {high}")

    def lowest(self, b_short_tokens: int) -> int:
        """The lower bound for a border that begins at `b_short_tokens`."""
        if self.b_short_min is not None:
            return self.b_short_min
        return max(1, int(b_short_tokens * _LOWEST_RATIO))


@dataclass(frozen=True, slots=True, kw_only=True)
class BShortChanged:
    """`B_short` has another value from now on.

    Attributes:
        b_short_tokens, was_tokens: the new value and the one before.
        short_load, long_load: the loads of the pools at the old value; 1.0 is all room of the long pool, and
            of the short one as far as it is as fast.
        speed_ratio: what is taken for the speed of the short pool over that of the long one.
    """

    b_short_tokens: int
    was_tokens: int
    short_load: float
    long_load: float
    speed_ratio: float


class AdaptiveBShort:
    """The border of one model's pools.

    Args:
        b_short_tokens: where it begins.

    Attributes:
        b_short_tokens: where it stands.
    """

    def __init__(self, settings: AdaptiveBShortSettings, b_short_tokens: int) -> None:
        self._settings = settings
        self.b_short_tokens = b_short_tokens
        self._lowest = settings.lowest(b_short_tokens)
        self._demand = Demand(settings.memory_s)
        self._stays_until = -math.inf
        self._speeds = _Speeds(settings.memory_s)

    def __repr__(self) -> str:
        return f"<AdaptiveBShort {self.b_short_tokens} requests={len(self._demand)}>"

    def on_arrival(self, budget_tokens: int, kv_tokens: int) -> float:
        """A request is there: it waits or runs. Returns what `left` is to be given.

        Args:
            budget_tokens: the most it may take; decides where it is at home.
            kv_tokens: what it is expected to hold of a KV cache.
        """
        return self._demand.on_arrival(budget_tokens, kv_tokens)

    def on_departure(self, budget_tokens: int, kv_tokens: int, came_at: float) -> None:
        """A request that came is over.

        Args:
            budget_tokens, kv_tokens: those with which it came.
            came_at: what `came` returned.
        """
        self._demand.on_departure(budget_tokens, kv_tokens, came_at)

    def is_due(self, now: float) -> bool:
        """Whether it is time for another look."""
        last = self._demand.sampled_at
        return last is None or now >= last + self._settings.interval_s

    def adapt(
        self, short: PoolCapacity | None, long: PoolCapacity | None, now: float
    ) -> BShortChanged | None:
        """Look at the demand, and move the border if that is due.

        Args:
            short, long: the capacity of the pools; None while a pool has no replica.
            now: seconds; never less than at the call before.
        """
        self._demand.sample(now)
        if short is None or long is None:
            return None
        if now < self._stays_until:
            return None
        self._speeds.observe(short.tpot_s, long.tpot_s, now)
        loads = self._demand.loads(short, long, self._speeds.ratio)
        present = place_below(self.b_short_tokens)
        chance = _SURE * loads.standard_error(present)
        if abs(loads.imbalance(present)) <= max(self._settings.tolerance_ratio, chance):
            # Only what is left when the loads are even can be speed.
            self._speeds.learn(self._settings, now)
            return None
        target = loads.best(self._allowed(short), present)
        if not self._is_better(loads, target, present, chance):
            return None
        return self._move(target, present, loads, now)

    def restore(self, b_short_tokens: int, now: float) -> None:
        """Go on from where the border stood in an earlier process, within the bounds of this one."""
        highest = self._settings.b_short_max or b_short_tokens
        self.b_short_tokens = min(max(b_short_tokens, self._lowest), highest)
        self._stays_until = now + self._settings.dwell_s

    def _is_better(self, loads: Loads, target: int, present: int, chance: float) -> bool:
        """Whether the loads are surely more even at the target than at present.

        At both borders chance errs by the same amount and in the same direction: those between them do not
        matter. When the zero lies between two borders, the error makes one the better as much as the other
        the worse, and counts for both.
        """
        before, after = loads.imbalance(present), loads.imbalance(target)
        gain = abs(before) - abs(after)
        beyond = abs(after / before) if before * after < 0 else 0.0
        needed = chance * (1 + beyond) if beyond else 0.0
        return gain >= max(self._settings.tolerance_ratio / 2, needed)

    def _allowed(self, short: PoolCapacity) -> range:
        """The places that a border may have."""
        highest = min(self._settings.b_short_max or short.context_tokens, short.context_tokens)
        return range(bisect_left(EDGES, self._lowest), place_below(highest) + 1)

    def _move(self, target: int, present: int, loads: Loads, now: float) -> BShortChanged | None:
        step = int(self._settings.max_step_octaves * PER_OCTAVE)
        place = min(max(target, present - step), present + step)
        if EDGES[place] == self.b_short_tokens:
            return None
        was, self.b_short_tokens = self.b_short_tokens, EDGES[place]
        self._stays_until = now + self._settings.dwell_s
        self._speeds.restart()
        return BShortChanged(
            b_short_tokens=self.b_short_tokens,
            was_tokens=was,
            short_load=loads.short(present),
            long_load=loads.long(present),
            speed_ratio=self._speeds.ratio,
        )


class _Speeds:
    """How fast the short pool is at the same share of room taken, as a multiple of the long one.

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
        """Forget the pace, for it is of another border, but not the speeds."""
        self._tpot_s, self._began_at = [None, None], None

    def observe(self, short_tpot_s: float | None, long_tpot_s: float | None, now: float) -> None:
        """Average what the pools tell of their pace; a pool that tells nothing keeps its average."""
        if self._began_at is None:
            self._began_at = self._observed_at = now
        weight = -math.expm1((self._observed_at - now) / self._memory_s)
        self._observed_at = now
        for place, tpot_s in enumerate((short_tpot_s, long_tpot_s)):
            mean = self._tpot_s[place]
            if tpot_s is not None and tpot_s > 0:
                self._tpot_s[place] = tpot_s if mean is None else mean + weight * (tpot_s - mean)

    def learn(self, settings: AdaptiveBShortSettings, now: float) -> None:
        """Take a difference in pace that has lasted for one in speed."""
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
