import dataclasses
import math
from collections import deque

import pytest

from serve_app.routing.adaptive_b_short import (
    AdaptiveBShort,
    AdaptiveBShortSettings,
    BShortChanged,
)
from serve_app.routing.demand import PoolCapacity

POOL = PoolCapacity(kv_tokens=400_000, sequences=10_000, context_tokens=16_384)


class Demand:
    """A threshold with the clock in hand, and a crowd whose members change but not their number."""

    def __init__(self, b_short_tokens: int = 8_192, **changes: object) -> None:
        settings = AdaptiveBShortSettings(**{"enabled": True, "b_short_min": 1, **changes})  # type: ignore[arg-type]
        self.threshold = AdaptiveBShort(settings, b_short_tokens)
        self.now = 0.0
        self.moves: list[BShortChanged] = []
        self.came: dict[int, deque[float]] = {}

    @property
    def there(self) -> dict[int, int]:
        return {tokens: len(came) for tokens, came in self.came.items()}

    def come(self, count: int, tokens: int) -> None:
        for _ in range(count):
            self.came.setdefault(tokens, deque()).append(self.threshold.on_arrival(tokens, tokens))

    def leave(self, count: int, tokens: int) -> None:
        for _ in range(count):
            self.threshold.on_departure(tokens, tokens, self.came[tokens].popleft())

    def stay(
        self, seconds: int, short: PoolCapacity | None = POOL, long: PoolCapacity | None = POOL
    ) -> list[BShortChanged]:
        """Time passes, a second at a time; the moves meanwhile."""
        before = len(self.moves)
        for _ in range(seconds):
            self.now += 1.0
            for tokens, count in self.there.items():
                self.leave(count // 10, tokens)
                self.come(count // 10, tokens)
            assert self.threshold.is_due(self.now)
            move = self.threshold.adapt(short, long, self.now)
            self.moves += [move] if move is not None else []
        return self.moves[before:]


def test_the_border_comes_to_lie_where_both_pools_have_the_same_load() -> None:
    demand = Demand()
    for tokens in (500, 1_000, 2_000, 4_000):
        demand.come(4_000 // (tokens // 100), tokens)
    demand.stay(300)
    # Each length holds as many tokens as any other.
    assert 1_000 <= demand.threshold.b_short_tokens < 2_000


def test_two_short_replicas_get_twice_the_load_of_one_long_one() -> None:
    demand = Demand()
    for tokens in (500, 1_000, 2_000):
        demand.come(4_000 // (tokens // 100), tokens)
    twice = dataclasses.replace(POOL, kv_tokens=800_000, sequences=20_000)
    demand.stay(300, short=twice)
    assert 1_000 <= demand.threshold.b_short_tokens < 2_000
    demand.stay(300, long=twice)
    assert 500 <= demand.threshold.b_short_tokens < 1_000


def test_places_in_the_batch_count_where_they_are_scarcer_than_tokens() -> None:
    demand = Demand()
    demand.come(300, 100)
    demand.come(200, 200)
    demand.come(100, 500)
    small_batch = dataclasses.replace(POOL, sequences=256)
    demand.stay(600, short=small_batch, long=small_batch)
    # By tokens the last hundred are heavier than the first three hundred.
    assert 100 <= demand.threshold.b_short_tokens < 200


def test_a_step_is_bounded_and_the_next_one_waits() -> None:
    demand = Demand(max_step_octaves=1.0, dwell_s=30.0)
    demand.come(500, 300)
    demand.come(50, 3_000)
    moves = demand.stay(200)
    times = [move.was_tokens / move.b_short_tokens for move in moves]
    assert [move.was_tokens for move in moves] == [8_192, 4_096, *[m.b_short_tokens for m in moves[1:-1]]]
    assert all(ratio <= 2.0 + 1e-9 for ratio in times)
    assert demand.now > 30 * (len(moves) - 1)
    assert demand.threshold.b_short_tokens < 3_000


def test_a_move_tells_the_loads_that_made_it() -> None:
    demand = Demand(memory_s=10.0, dwell_s=60.0, max_step_octaves=1.0)
    demand.come(128, 1_000)
    demand.come(64, 3_000)
    first, second = demand.stay(240)
    assert (first.was_tokens, first.b_short_tokens, second.was_tokens) == (8_192, 4_096, 4_096)
    assert second.short_load == pytest.approx(320_000 / 400_000, rel=0.01)
    assert second.long_load == 0.0
    assert second.speed_ratio == 1.0


def test_even_loads_move_nothing() -> None:
    demand = Demand()
    demand.come(100, 1_000)
    demand.come(10, 10_000)
    assert demand.stay(600) == []


def test_one_length_alone_moves_the_border_no_further_than_beneath_it_once() -> None:
    """No border is even, so the border does not run from one side of it to the other."""
    demand = Demand()
    demand.come(100, 1_000)
    demand.stay(1_000)
    assert len(demand.moves) <= 3
    settled = len(demand.moves)
    demand.stay(1_000)
    assert len(demand.moves) == settled


def test_the_bounds_hold_and_so_does_the_short_pools_context() -> None:
    low = Demand(b_short_min=2_048)
    low.come(500, 300)
    low.come(100, 2_100)
    low.stay(600)
    assert low.threshold.b_short_tokens == 2_048
    high = Demand(b_short_max=12_000)
    high.come(100, 9_000)
    high.come(200, 15_000)
    high.stay(600)
    assert 9_000 < high.threshold.b_short_tokens <= 12_000
    narrow = Demand(b_short_tokens=4_096)
    narrow.come(100, 14_000)
    narrow.come(100, 5_000)
    narrow.stay(600, short=dataclasses.replace(POOL, context_tokens=6_000))
    assert narrow.threshold.b_short_tokens <= 6_000


def test_few_requests_prove_nothing() -> None:
    demand = Demand()
    demand.come(4, 1_000)
    demand.come(4, 3_000)
    assert demand.stay(600) == []
    demand.come(100, 1_000)
    demand.come(100, 3_000)
    assert demand.stay(60) != []


def test_without_traffic_or_without_a_pool_nothing_moves() -> None:
    assert Demand().stay(600) == []
    demand = Demand()
    demand.come(1_000, 300)
    demand.come(100, 3_000)
    assert demand.stay(300, long=None) == []
    assert demand.stay(300, short=None) == []
    assert demand.stay(60) != []


def test_who_has_left_is_forgotten_in_time() -> None:
    demand = Demand()
    demand.come(300, 300)
    demand.come(300, 900)
    demand.stay(300)
    settled = demand.threshold.b_short_tokens
    assert 300 <= settled < 900
    demand.leave(300, 300)
    demand.leave(300, 900)
    demand.come(300, 3_000)
    demand.come(300, 9_000)
    demand.stay(300)
    assert 3_000 <= demand.threshold.b_short_tokens < 9_000


class Engines:
    """Two pools whose pace follows their load, the short one's at `speed` times that of the long one."""

    def __init__(self, speed: float) -> None:
        self.speed = speed

    def stay(self, demand: Demand, seconds: int) -> None:
        for _ in range(seconds):
            below = sum(n * t for t, n in demand.there.items() if t <= demand.threshold.b_short_tokens)
            above = sum(n * t for t, n in demand.there.items()) - below
            demand.stay(
                1,
                dataclasses.replace(POOL, tpot_s=0.02 + below / POOL.kv_tokens / self.speed),
                dataclasses.replace(POOL, tpot_s=0.02 + above / POOL.kv_tokens),
            )


@pytest.mark.parametrize(("speed", "low", "high"), [(1.0, 800, 1_300), (0.5, 450, 800), (2.0, 1_200, 2_000)])
def test_a_pool_that_is_slower_at_the_same_load_gets_less_of_it(speed: float, low: int, high: int) -> None:
    demand = Demand(b_short_tokens=1_024)
    lengths = [round(200 * 1.1**place) for place in range(30)]
    for tokens in lengths:
        demand.come(max(10, 20_000 // tokens), tokens)
    Engines(speed).stay(demand, 1_500)
    assert low <= demand.threshold.b_short_tokens <= high
    settled = len(demand.moves)
    Engines(speed).stay(demand, 1_500)
    assert len(demand.moves) - settled <= 1


def test_a_difference_in_pace_that_no_border_can_mend_makes_no_border_swing() -> None:
    """Two lengths with nothing between them: either border leaves one pool slower."""
    demand = Demand(b_short_tokens=2_048)
    demand.come(100, 1_000)
    demand.come(100, 3_000)
    demand.come(100, 2_000)
    Engines(1.0).stay(demand, 7_200)
    assert len(demand.moves) <= 8


def test_it_goes_on_from_where_it_stood_within_its_bounds() -> None:
    demand = Demand(b_short_max=10_000)
    demand.threshold.restore(3_000, 0.0)
    assert demand.threshold.b_short_tokens == 3_000
    demand.threshold.restore(20_000, 0.0)
    assert demand.threshold.b_short_tokens == 10_000
    demand.threshold.restore(1, 0.0)
    assert demand.threshold.b_short_tokens == 1
    assert AdaptiveBShortSettings().lowest(8_192) == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b_short_min": 0}, "b_short_min must be at least 1, got 0"),
        ({"b_short_min": 5, "b_short_max": 4}, "b_short_min of 5 is above b_short_max of 4"),
        ({"memory_s": 0.0}, "memory_s must be a positive number, got 0.0"),
        ({"interval_s": math.inf}, "interval_s must be a positive number, got inf"),
        ({"tolerance_ratio": 1.0}, "tolerance_ratio must be above 0 and below 1, got 1.0"),
        ({"max_step_octaves": 0.1}, "max_step_octaves must be at least 0.125"),
        ({"dwell_s": -1.0}, "dwell_s must not be negative, got -1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveBShortSettings(**changes)  # type: ignore[arg-type]
