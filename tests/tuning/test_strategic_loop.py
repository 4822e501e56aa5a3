import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.policies.length_queues import Partition
from serve_app.tuning import strategic_loop
from serve_app.tuning.refine_and_prune import refine_and_prune
from serve_app.tuning.strategic_loop import (
    PartitionChange,
    Reason,
    StrategicLoop,
    StrategicSettings,
    adjusted,
    has_drifted,
    partition_distance,
    queue_means,
)
from tests.tuning.builders import Sample, extents, heavy_tail, interval, paper_mix

USUAL = StrategicSettings()
Mix = Callable[[int, int], Sample]


def flipped_mix(count: int, seed: int) -> Sample:
    """Return 20 % of 32 to 256 tokens, 80 % of 1,024 to 4,096."""
    rng = np.random.default_rng(seed)
    short = rng.random(count) < 0.2
    return np.where(short, rng.integers(32, 257, count), rng.integers(1024, 4097, count))


def play(
    loop: StrategicLoop, lengths: Sequence[int] | Sample, *, per_s: float = 10.0, since_s: float = 0.0
) -> list[PartitionChange]:
    """Feed the lengths one by one, poll each time, and return the changes."""
    changes = []
    for number, length in enumerate(lengths):
        loop.observe(int(length))
        partition = loop.due(since_s + number / per_s)
        if partition is not None:
            assert loop.change is not None
            assert loop.change.partition == partition
            changes.append(loop.change)
    return changes


def reasons(changes: list[PartitionChange]) -> list[Reason]:
    return [change.reason for change in changes]


def test_nothing_is_learned_from_fewer_lengths_than_required() -> None:
    loop = StrategicLoop(USUAL)
    assert play(loop, paper_mix(499, 1)) == []
    assert loop.full_runs == 0
    (change,) = play(loop, [100], since_s=60.0)
    assert (change.reason, change.at, change.lengths) == (Reason.FIRST, 60.0, 500)


def test_the_first_partition_is_that_of_the_lengths_seen() -> None:
    loop = StrategicLoop(USUAL)
    lengths = paper_mix(500, 1)
    (change,) = play(loop, lengths)
    assert change.partition == refine_and_prune(lengths, USUAL.refine_and_prune)


def test_queues_are_learned_again_after_the_interval_from_the_last_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strategic_loop, "_MIN_DISTANCE", 1e-9)
    monkeypatch.setattr(strategic_loop, "_ADJUST_EVERY_S", math.inf)
    monkeypatch.setattr(strategic_loop, "_SAMPLE", 6_000)
    loop, lengths = StrategicLoop(USUAL), paper_mix(7000, 2)
    changes = play(loop, lengths)
    assert reasons(changes) == [Reason.FIRST, Reason.INTERVAL]
    assert changes[1].at == pytest.approx(changes[0].at + USUAL.interval_s)
    assert changes[1].lengths == 6_000
    assert changes[1].partition == refine_and_prune(lengths[500:6_500], USUAL.refine_and_prune)


def test_a_length_below_one_is_ignored() -> None:
    loop = StrategicLoop(replace(USUAL, window=2))
    assert play(loop, [0, -4, 12]) == []
    (change,) = play(loop, [12], since_s=1.0)
    assert change.lengths == 2


def test_a_partition_that_hardly_differs_is_not_applied() -> None:
    loop = StrategicLoop(USUAL)
    changes = play(loop, paper_mix(14_000, 3))
    assert loop.full_runs == 3
    assert reasons(changes) == [Reason.FIRST]


def test_other_lengths_are_detected_within_two_drift_tests() -> None:
    loop = StrategicLoop(USUAL)
    before, after = paper_mix(3000, 4), heavy_tail(3000, 5)
    play(loop, before)
    changes = play(loop, after, since_s=300.0)
    assert changes[0].reason is Reason.DRIFT
    assert changes[0].at <= 300.0 + USUAL.window / 10.0
    # The old traffic has no influence on the final partition.
    alone = refine_and_prune(after, USUAL.refine_and_prune)
    assert loop.change is not None
    assert partition_distance(loop.change.partition, alone, after) < strategic_loop._MIN_DISTANCE


def test_a_flip_of_the_mix_is_learned_from() -> None:
    loop = StrategicLoop(USUAL)
    play(loop, paper_mix(3000, 4))
    assert loop.full_runs == 1
    after = flipped_mix(3000, 5)
    play(loop, after, since_s=300.0)
    assert loop.full_runs > 1
    alone = refine_and_prune(after, USUAL.refine_and_prune)
    assert loop.change is not None
    assert partition_distance(loop.change.partition, alone, after) < strategic_loop._MIN_DISTANCE


def test_a_kind_of_prompts_that_left_its_queue_is_learned_again_however_few_requests_there_are() -> None:
    # A trained estimator sees the long quarter of the prompts as shorter than at first.
    loop = StrategicLoop(replace(USUAL, window=48))
    play(loop, [4, 4, 4, 880] * 12)
    (change,) = play(loop, [4, 4, 4, 735] * 40, since_s=60.0)
    # The drift test is not sure on such samples: one such shift in ten is chance.
    assert not has_drifted([4, 4, 4, 880] * 12, [4, 4, 4, 735] * 15)
    assert change.reason is Reason.DRIFT
    assert queue_means(change.partition, [735])[0] < 880


def test_lengths_that_creep_are_followed_between_full_runs() -> None:
    loop = StrategicLoop(USUAL)
    play(loop, np.tile([100, 1000], 300))
    changes = play(loop, np.tile([107, 1070], 2000), since_s=60.0)
    assert reasons(changes) == [Reason.ADJUSTED]
    assert [len(change.partition) for change in changes] == [2]
    assert 105 < changes[0].partition.intervals[0].mean_tokens < 107


def test_without_requests_nothing_happens() -> None:
    loop = StrategicLoop(USUAL)
    assert [loop.due(now) for now in (0.0, 1e3, 1e6)] == [None, None, None]
    play(loop, paper_mix(600, 1), since_s=1e6)
    assert [loop.due(1e6 + now) for now in (600.0, 1e4)] == [None, None]


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([paper_mix, heavy_tail]), st.integers(0, 10_000), st.sampled_from([2.0, 10.0, 40.0]))
def test_a_stationary_mix_leaves_the_partition_unchanged(mix: Mix, seed: int, per_s: float) -> None:
    loop = StrategicLoop(USUAL)
    changes = play(loop, mix(8000, seed), per_s=per_s)
    # The first is of 500 lengths, and is corrected when there are more.
    assert reasons(changes)[0] is Reason.FIRST
    assert len(changes) <= 5
    assert len(play(loop, mix(4000, seed + 1), per_s=per_s, since_s=8000 / per_s)) <= 1


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([2.0, 10.0, 40.0]))
def test_the_same_lengths_at_the_same_times_give_the_same_changes(seed: int, per_s: float) -> None:
    lengths = np.concatenate([paper_mix(1500, seed), heavy_tail(1500, seed)])
    first, second = (play(StrategicLoop(USUAL), lengths, per_s=per_s) for _ in range(2))
    assert first == second
    assert Reason.DRIFT in reasons(first)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(-5, 200_000), min_size=1, max_size=400), st.integers(2, 40))
def test_whatever_arrives_it_answers_with_partitions(lengths: list[int], window: int) -> None:
    quick = replace(USUAL, window=window, interval_s=5.0)
    for change in play(StrategicLoop(quick), lengths):
        assert isinstance(change.partition, Partition)
        assert change.lengths <= len(lengths)


# The drift test


def test_a_shift_counts_when_it_matters_and_is_no_chance() -> None:
    before = paper_mix(2000, 1)
    flipped = np.where(np.random.default_rng(2).random(500) < 0.3, before[:500], 3000)
    assert has_drifted(before, flipped)
    # Three in a hundred moved: significant, but too few. And four lengths prove nothing.
    many = np.arange(100_000) % 1000 + 1
    assert not has_drifted(many, many + 30)
    assert has_drifted(many, many + 120)
    assert not has_drifted([1, 2, 3, 4], [4, 5, 6, 7])


def test_the_same_traffic_gives_hardly_a_false_alarm() -> None:
    # A chance of 0.001 each, and the required tenth: one of 200 would be plenty.
    alarms = [has_drifted(heavy_tail(500, seed), heavy_tail(500, seed + 1000)) for seed in range(200)]
    assert sum(alarms) <= 1


# Adjustment

TWO = Partition((interval(100, 200, 150.0, 10), interval(1000, 2000, 1500.0, 10)))


def moved(lengths: Sequence[int]) -> Partition:
    """Adjust to each length a hundred times, so that a queue has enough members."""
    return adjusted(TWO, list(lengths) * 100)


def test_a_queue_moves_a_quarter_of_the_way_to_its_recent_members() -> None:
    after = moved([110, 130, 1600, 2000])
    assert [queue.mean_tokens for queue in after.intervals] == [142.5, 1575.0]
    assert extents(after) == extents(TWO)
    # 210 and 95 are within a tenth of the first queue; 911 is nearer than a tenth to the second.
    assert extents(moved([95, 210, 911, 1500])) == [(98, 203), (977, 2000)]


def test_bubbles_and_few_members_move_no_queue() -> None:
    assert moved([50, 60, 400, 500, 600, 9000, 9000]) == TWO
    assert adjusted(TWO, [101] * 199) == TWO


@settings(deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(1, 200_000), max_size=60))
def test_queues_stay_as_many_and_apart_and_only_widen(seed: int, recent: Sequence[int]) -> None:
    partition = refine_and_prune(heavy_tail(300, seed), USUAL.refine_and_prune)
    after = adjusted(partition, list(recent) * 100)
    assert len(after) == len(partition)
    for old, new in zip(partition.intervals, after.intervals, strict=True):
        assert new.min_tokens <= old.min_tokens
        assert new.max_tokens >= old.max_tokens
        assert new.count == old.count


# Distances

FINE = Partition((interval(10, 20, 15.0, 5), interval(30, 50, 40.0, 5), interval(100, 300, 200.0, 5)))
COARSE = Partition((interval(10, 50, 30.0, 10), interval(100, 300, 200.0, 5)))


def test_a_prompt_counts_to_its_queue_or_the_one_below_its_gap() -> None:
    assert list(queue_means(FINE, [5, 10, 25, 30, 99, 100, 4000])) == [15, 15, 15, 40, 40, 200, 200]


def test_the_distance_is_the_mean_ratio_of_the_queues_means() -> None:
    # 15 against 30, 40 against 30, 200 against 200.
    expected = (math.log(2) + math.log(4 / 3) + 0) / 3

    assert partition_distance(FINE, COARSE, [12, 40, 150]) == pytest.approx(expected)
    assert partition_distance(COARSE, FINE, [12, 40, 150]) == pytest.approx(expected)


def test_a_partition_is_at_no_distance_from_itself() -> None:
    assert partition_distance(FINE, FINE, [1, 40, 9000]) == 0.0
