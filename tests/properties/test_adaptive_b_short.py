"""Adaptive `B_short` on random traffic: it stays within bounds, settles, and follows the mix.

Arrivals are Poisson, lengths come from a mix, and each request stays for an exponential time whose mean grows
with its length, as in an engine that is neither idle nor full. Bounds, steps and dwell time always hold, so
hypothesis searches for counter-examples. Settling is statistical, so it is counted over many mixes with fixed
seeds.
"""

import heapq
import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.routing.adaptive_b_short import (
    AdaptiveBShort,
    AdaptiveBShortSettings,
    BShortChanged,
    PoolCapacity,
)

CONTEXT = 16_384
SETTINGS = AdaptiveBShortSettings(enabled=True)
# Long enough for means over one mix, and for `B_short` to cross its whole range.
SETTLED_S = 600.0
HOUR_S = 3_600.0


@dataclass(frozen=True)
class Mix:
    """Kinds of requests: (share, median tokens, spread in octaves)."""

    kinds: tuple[tuple[float, int, float], ...]

    def draw(self, rng: random.Random) -> int:
        _, median, octaves = rng.choices(self.kinds, [share for share, _, _ in self.kinds])[0]
        return min(CONTEXT, max(1, round(median * 2 ** rng.gauss(0, octaves))))


CHATS = Mix(((1.0, 500, 1.0),))
DOCUMENTS = Mix(((0.5, 500, 1.0), (0.5, 5_000, 0.7)))


class Traffic:
    """Adaptive `B_short` under a stream of requests.

    Args:
        replicas: in the short and in the long pool.
        begin: the initial `B_short`.
    """

    def __init__(self, seed: int, replicas: tuple[int, int], begin: int) -> None:
        self.rng = random.Random(seed)
        self.short, self.long = (
            PoolCapacity(kv_tokens=100_000 * count, sequences=64 * count, context_tokens=CONTEXT)
            for count in replicas
        )
        self.adaptive = AdaptiveBShort(SETTINGS, begin)
        self.lowest = SETTINGS.lowest(begin)
        self.now = self.look_at = 0.0
        self.present: list[tuple[float, int, float]] = []
        self.moves: list[tuple[float, BShortChanged]] = []

    def play(self, mix: Mix, seconds: float, rate_per_s: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += self.rng.expovariate(rate_per_s)
            while self.look_at <= self.now:
                self._look(self.look_at)
                self.look_at += 1.0
            tokens = mix.draw(self.rng)
            mark = self.adaptive.demand.on_arrival(tokens, tokens)
            leaves_at = self.now + self.rng.expovariate(1 / mean_stay_s(tokens))
            heapq.heappush(self.present, (leaves_at, tokens, mark))

    def _look(self, now: float) -> None:
        while self.present and self.present[0][0] <= now:
            _, tokens, mark = heapq.heappop(self.present)
            self.adaptive.demand.on_departure(tokens, tokens, mark)
        move = self.adaptive.adapt(self.short, self.long, now)
        if move is not None:
            self.moves.append((now, move))
        assert self.lowest <= self.adaptive.b_short_tokens <= CONTEXT

    def moves_since(self, when: float) -> list[BShortChanged]:
        return [move for at, move in self.moves if at >= when]

    def true_imbalance(self, mix: Mix) -> float:
        """Return the imbalance of the mix's mean demand at the current `B_short`."""
        taken: Counter[tuple[bool, str]] = Counter()
        rng = random.Random(0)
        for tokens in (mix.draw(rng) for _ in range(20_000)):
            is_short = tokens <= self.adaptive.b_short_tokens
            taken[is_short, "tokens"] += round(1_000 * tokens * mean_stay_s(tokens))
            taken[is_short, "places"] += round(1_000 * mean_stay_s(tokens))
        short, long = (
            max(taken[is_short, "tokens"] / pool.kv_tokens, taken[is_short, "places"] / pool.sequences)
            for is_short, pool in ((True, self.short), (False, self.long))
        )
        return (short - long) / (short + long)


def mean_stay_s(tokens: int) -> float:
    return 2 + tokens / 1_000


def random_mix(rng: random.Random) -> Mix:
    """Return one to three kinds, up to 1.5 octaves wide: a 16 K request among thousands of 200 tokens."""
    return Mix(
        tuple(
            (
                rng.uniform(0.05, 1.0),
                round(math.exp(rng.uniform(math.log(100), math.log(12_000)))),
                rng.uniform(0.2, 1.5),
            )
            for _ in range(rng.choice((1, 2, 3)))
        )
    )


def moves_in_an_hour(seed: int) -> list[BShortChanged]:
    """Return the moves under a constant random mix after `B_short` has settled."""
    rng = random.Random(seed)
    traffic = Traffic(seed, rng.choice(((1, 1), (2, 1), (1, 3), (4, 4))), 8_192)
    mix = random_mix(rng)
    traffic.play(mix, SETTLED_S, rate_per_s=4.0)
    traffic.play(mix, HOUR_S, rate_per_s=4.0)
    return traffic.moves_since(SETTLED_S)


WIDE = Mix(((0.57, 1_328, 1.45), (0.43, 1_666, 0.78)))


def test_on_a_constant_wide_mix_b_short_stays() -> None:
    """Few requests cause half of the demand here, so the error must not depend on their number alone."""
    traffic = Traffic(8, (2, 1), 8_192)
    traffic.play(WIDE, SETTLED_S, rate_per_s=4.0)
    traffic.play(WIDE, HOUR_S, rate_per_s=4.0)
    assert len(traffic.moves_since(SETTLED_S)) <= 4
    assert abs(traffic.true_imbalance(WIDE)) < 0.5


@pytest.mark.slow
def test_on_constant_mixes_b_short_moves_less_than_once_an_hour() -> None:
    """Forty hours; a mean over a minute has sixty independent values in an hour."""
    counts = [len(moves_in_an_hour(seed)) for seed in range(40)]
    assert sum(counts) < 40
    assert max(counts) <= 6
    assert sum(count == 0 for count in counts) >= 25


@pytest.mark.parametrize(("first", "then"), [(CHATS, DOCUMENTS), (DOCUMENTS, CHATS)])
def test_it_follows_a_mix_that_flips_within_six_minutes(first: Mix, then: Mix) -> None:
    traffic = Traffic(0, (2, 2), 8_192)
    traffic.play(first, SETTLED_S, rate_per_s=6.0)
    before = traffic.adaptive.b_short_tokens
    assert abs(traffic.true_imbalance(then)) > 0.6
    traffic.play(then, 360.0, rate_per_s=6.0)
    assert abs(traffic.true_imbalance(then)) < 0.35
    assert (traffic.adaptive.b_short_tokens > before) == (then is DOCUMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
def test_it_follows_every_flip_and_then_stays(seed: int) -> None:
    rng = random.Random(seed)
    first, then = rng.sample((CHATS, DOCUMENTS), 2)
    replicas = rng.randint(1, 4)
    traffic = Traffic(seed, (replicas, replicas), rng.choice((1_000, 4_096, 8_192, 16_384)))
    traffic.play(first, SETTLED_S, rate_per_s=6.0)
    traffic.play(then, SETTLED_S, rate_per_s=6.0)
    b_short = traffic.adaptive.b_short_tokens
    # Even within the statistical error, or at a bound.
    at_a_bound = b_short <= 1.1 * traffic.lowest or b_short >= CONTEXT / 1.1
    assert abs(traffic.true_imbalance(then)) < 0.45 or at_a_bound
    traffic.play(then, HOUR_S, rate_per_s=6.0)
    # If the even value is between two grid values, `B_short` alternates between them now and then.
    assert len(traffic.moves_since(2 * SETTLED_S)) <= 6


kinds = st.tuples(st.floats(0.05, 1.0), st.integers(100, 12_000), st.floats(0.2, 1.5))
mixes = st.lists(kinds, min_size=1, max_size=3).map(lambda kinds: Mix(tuple(kinds)))


@settings(max_examples=10)
@given(
    st.lists(st.tuples(mixes, st.floats(0.5, 8.0)), min_size=2, max_size=5),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from([1_000, 4_096, 8_192, 16_384]),
    st.integers(0, 1_000),
)
def test_its_bounds_step_and_dwell_time_always_hold(
    phases: list[tuple[Mix, float]], replicas: tuple[int, int], begin: int, seed: int
) -> None:
    traffic = Traffic(seed, replicas, begin)
    for mix, rate in phases:
        traffic.play(mix, 120.0, rate)
    for (at, move), (later, following) in itertools.pairwise(traffic.moves):
        assert later - at >= SETTINGS.dwell_s
        assert following.was_tokens == move.b_short_tokens
    for _, move in traffic.moves:
        assert move.b_short_tokens != move.was_tokens
        # A value that starts between two grid values moves by up to one more.
        octaves = abs(math.log2(move.b_short_tokens / move.was_tokens))
        assert octaves <= SETTINGS.max_step_octaves + 1 / 8 + 1e-3
