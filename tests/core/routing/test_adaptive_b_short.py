import dataclasses
from collections import deque

import pytest

from serve_app.core.routing.adaptive_b_short import (
    AdaptiveBShort,
    AdaptiveBShortSettings,
    BShortChanged,
    PoolCapacity,
)

POOL = PoolCapacity(kv_tokens=400_000, sequences=10_000, context_tokens=16_384)


class Crowd:
    """Adaptive `B_short` on a manual clock, with requests that change while the length distribution stays."""

    def __init__(self, b_short_tokens: int = 8_192, **changes: object) -> None:
        settings = AdaptiveBShortSettings(**{"enabled": True, "b_short_min": 1, **changes})  # type: ignore[arg-type]
        self.adaptive = AdaptiveBShort(settings, b_short_tokens)
        self.now = 0.0
        self.moves: list[BShortChanged] = []
        self.marks: dict[int, deque[float]] = {}

    @property
    def present(self) -> dict[int, int]:
        return {tokens: len(marks) for tokens, marks in self.marks.items()}

    def arrive(self, count: int, tokens: int) -> None:
        for _ in range(count):
            self.marks.setdefault(tokens, deque()).append(self.adaptive.demand.on_arrival(tokens, tokens))

    def depart(self, count: int, tokens: int) -> None:
        for _ in range(count):
            self.adaptive.demand.on_departure(tokens, tokens, self.marks[tokens].popleft())

    def pass_time(
        self, seconds: int, short: PoolCapacity | None = POOL, long: PoolCapacity | None = POOL
    ) -> list[BShortChanged]:
        """Advance second by second; return the moves."""
        before = len(self.moves)
        for _ in range(seconds):
            self.now += 1.0
            for tokens, count in self.present.items():
                self.depart(count // 10, tokens)
                self.arrive(count // 10, tokens)
            assert self.adaptive.is_due(self.now)
            move = self.adaptive.adapt(short, long, self.now)
            self.moves += [move] if move is not None else []
        return self.moves[before:]


def test_b_short_settles_where_both_pools_have_the_same_load() -> None:
    crowd = Crowd()
    for tokens in (500, 1_000, 2_000, 4_000):
        crowd.arrive(4_000 // (tokens // 100), tokens)
    crowd.pass_time(300)
    # Each length holds as many tokens as any other.
    assert 1_000 <= crowd.adaptive.b_short_tokens < 2_000


def test_two_short_replicas_get_twice_the_load_of_one_long_one() -> None:
    crowd = Crowd()
    for tokens in (500, 1_000, 2_000):
        crowd.arrive(4_000 // (tokens // 100), tokens)
    twice = dataclasses.replace(POOL, kv_tokens=800_000, sequences=20_000)
    crowd.pass_time(300, short=twice)
    assert 1_000 <= crowd.adaptive.b_short_tokens < 2_000
    crowd.pass_time(300, long=twice)
    assert 500 <= crowd.adaptive.b_short_tokens < 1_000


def test_batch_slots_count_where_they_are_scarcer_than_tokens() -> None:
    crowd = Crowd()
    crowd.arrive(300, 100)
    crowd.arrive(200, 200)
    crowd.arrive(100, 500)
    small_batch = dataclasses.replace(POOL, sequences=256)
    crowd.pass_time(600, short=small_batch, long=small_batch)
    # By tokens, the last hundred outweigh the first three hundred.
    assert 100 <= crowd.adaptive.b_short_tokens < 200


def test_a_step_is_bounded_and_followed_by_the_dwell_time() -> None:
    crowd = Crowd(max_step_octaves=1.0, dwell_s=30.0)
    crowd.arrive(500, 300)
    crowd.arrive(50, 3_000)
    moves = crowd.pass_time(200)
    times = [move.was_tokens / move.b_short_tokens for move in moves]
    assert [move.was_tokens for move in moves] == [8_192, 4_096, *[m.b_short_tokens for m in moves[1:-1]]]
    assert all(ratio <= 2.0 + 1e-9 for ratio in times)
    assert crowd.now > 30 * (len(moves) - 1)
    assert crowd.adaptive.b_short_tokens < 3_000


def test_a_move_states_the_loads_that_caused_it() -> None:
    crowd = Crowd(memory_s=10.0, dwell_s=60.0, max_step_octaves=1.0)
    crowd.arrive(128, 1_000)
    crowd.arrive(64, 3_000)
    first, second = crowd.pass_time(240)
    assert (first.was_tokens, first.b_short_tokens, second.was_tokens) == (8_192, 4_096, 4_096)
    assert second.short_load == pytest.approx(320_000 / 400_000, rel=0.01)
    assert second.long_load == 0.0
    assert second.speed_ratio == 1.0


def test_b_short_stays_at_even_loads() -> None:
    crowd = Crowd()
    crowd.arrive(100, 1_000)
    crowd.arrive(10, 10_000)
    assert crowd.pass_time(600) == []


def test_one_length_alone_moves_b_short_to_one_side_of_it_and_no_further() -> None:
    """No value evens the loads, so `B_short` must not alternate between the two sides of the length."""
    crowd = Crowd()
    crowd.arrive(100, 1_000)
    crowd.pass_time(1_000)
    assert len(crowd.moves) <= 3
    settled = len(crowd.moves)
    crowd.pass_time(1_000)
    assert len(crowd.moves) == settled


def test_b_short_stays_within_its_bounds_and_the_short_pools_context() -> None:
    low = Crowd(b_short_min=2_048)
    low.arrive(500, 300)
    low.arrive(100, 2_100)
    low.pass_time(600)
    assert low.adaptive.b_short_tokens == 2_048
    high = Crowd(b_short_max=12_000)
    high.arrive(100, 9_000)
    high.arrive(200, 15_000)
    high.pass_time(600)
    assert 9_000 < high.adaptive.b_short_tokens <= 12_000
    narrow = Crowd(b_short_tokens=4_096)
    narrow.arrive(100, 14_000)
    narrow.arrive(100, 5_000)
    narrow.pass_time(600, short=dataclasses.replace(POOL, context_tokens=6_000))
    assert narrow.adaptive.b_short_tokens <= 6_000


def test_few_requests_are_not_significant() -> None:
    crowd = Crowd()
    crowd.arrive(4, 1_000)
    crowd.arrive(4, 3_000)
    assert crowd.pass_time(600) == []
    crowd.arrive(100, 1_000)
    crowd.arrive(100, 3_000)
    assert crowd.pass_time(60) != []


def test_b_short_stays_without_traffic_or_without_a_pool() -> None:
    assert Crowd().pass_time(600) == []
    crowd = Crowd()
    crowd.arrive(1_000, 300)
    crowd.arrive(100, 3_000)
    assert crowd.pass_time(300, long=None) == []
    assert crowd.pass_time(300, short=None) == []
    assert crowd.pass_time(60) != []


def test_the_demand_of_ended_requests_decays() -> None:
    crowd = Crowd()
    crowd.arrive(300, 300)
    crowd.arrive(300, 900)
    crowd.pass_time(300)
    settled = crowd.adaptive.b_short_tokens
    assert 300 <= settled < 900
    crowd.depart(300, 300)
    crowd.depart(300, 900)
    crowd.arrive(300, 3_000)
    crowd.arrive(300, 9_000)
    crowd.pass_time(300)
    assert 3_000 <= crowd.adaptive.b_short_tokens < 9_000


class Engines:
    """Two pools whose pace follows their load, the short one at `speed` times the pace of the long one."""

    def __init__(self, speed: float) -> None:
        self.speed = speed

    def pass_time(self, crowd: Crowd, seconds: int) -> None:
        for _ in range(seconds):
            below = sum(n * t for t, n in crowd.present.items() if t <= crowd.adaptive.b_short_tokens)
            above = sum(n * t for t, n in crowd.present.items()) - below
            crowd.pass_time(
                1,
                dataclasses.replace(POOL, tpot_s=0.02 + below / POOL.kv_tokens / self.speed),
                dataclasses.replace(POOL, tpot_s=0.02 + above / POOL.kv_tokens),
            )


@pytest.mark.parametrize(("speed", "low", "high"), [(1.0, 800, 1_300), (0.5, 450, 800), (2.0, 1_200, 2_000)])
def test_a_pool_that_is_slower_at_the_same_load_gets_less_of_it(speed: float, low: int, high: int) -> None:
    crowd = Crowd(b_short_tokens=1_024)
    lengths = [round(200 * 1.1**place) for place in range(30)]
    for tokens in lengths:
        crowd.arrive(max(10, 20_000 // tokens), tokens)
    Engines(speed).pass_time(crowd, 1_500)
    assert low <= crowd.adaptive.b_short_tokens <= high
    settled = len(crowd.moves)
    Engines(speed).pass_time(crowd, 1_500)
    assert len(crowd.moves) - settled <= 1


def test_a_difference_in_pace_that_no_b_short_can_remove_causes_no_oscillation() -> None:
    """Few lengths with gaps between them: any value leaves one pool slower."""
    crowd = Crowd(b_short_tokens=2_048)
    crowd.arrive(100, 1_000)
    crowd.arrive(100, 3_000)
    crowd.arrive(100, 2_000)
    Engines(1.0).pass_time(crowd, 7_200)
    assert len(crowd.moves) <= 8


def test_a_restored_value_stays_within_the_bounds() -> None:
    crowd = Crowd(b_short_max=10_000)
    crowd.adaptive.restore(3_000, 0.0)
    assert crowd.adaptive.b_short_tokens == 3_000
    crowd.adaptive.restore(20_000, 0.0)
    assert crowd.adaptive.b_short_tokens == 10_000
    crowd.adaptive.restore(1, 0.0)
    assert crowd.adaptive.b_short_tokens == 1
    assert AdaptiveBShortSettings().lowest(8_192) == 256


class GivenLoads:
    """Loads with a given imbalance before a move and after it."""

    def __init__(self, before: float, after: float) -> None:
        self._imbalance = {0: before, 1: after}

    def imbalance(self, bucket: int) -> float:
        return self._imbalance[bucket]


@pytest.mark.parametrize(
    ("before", "after", "chance", "is_better"),
    [
        (0.5, 0.1, 0.2, True),
        (0.5, 0.45, 0.2, False),  # less than half the tolerance
        (0.5, -0.5, 0.0, False),  # as uneven on the other side
        (0.5, 0.1, 0.9, True),  # the same error at both cancels
        (0.5, -0.1, 0.3, True),  # beyond zero it counts, 1.2 times here
        (0.5, -0.1, 0.35, False),
        (0.5, -0.25, 0.15, True),
        (0.5, -0.25, 0.2, False),  # 1.5 times
        (-0.5, 0.1, 0.35, False),
        (0.5, 0.0, 0.9, True),
    ],
)
def test_a_move_has_to_be_better_by_more_than_chance(
    before: float, after: float, chance: float, is_better: bool
) -> None:
    adaptive = AdaptiveBShort(AdaptiveBShortSettings(enabled=True, tolerance_ratio=0.1), 8_192)
    loads = GivenLoads(before, after)
    assert adaptive._is_better(loads, 1, 0, chance) is is_better  # type: ignore[arg-type]


def test_a_value_of_an_earlier_process_has_the_same_dwell_time_as_a_move() -> None:
    crowd = Crowd(dwell_s=60.0)
    crowd.adaptive.restore(4_096, 0.0)
    for tokens in (500, 1_000):
        crowd.arrive(4_000, tokens)
    assert crowd.pass_time(59) == []
    assert crowd.pass_time(60) != []
