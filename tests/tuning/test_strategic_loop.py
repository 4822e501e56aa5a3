import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.policies.length_queues import Partition
from serve_app.tuning import strategic_loop
from serve_app.tuning.strategic_loop import (
    PartitionChange,
    StrategicLoop,
    StrategicSettings,
    partition_distance,
    queue_means,
    refine_and_prune,
)
from tests.tuning.builders import Sample, heavy_tail, interval, paper_mix

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


def test_nothing_is_learned_from_fewer_lengths_than_required() -> None:
    loop = StrategicLoop(USUAL)
    assert play(loop, paper_mix(499, 1)) == []
    assert loop.runs == 0
    (change,) = play(loop, [100], since_s=60.0)
    assert (change.at, change.lengths, change.distance) == (60.0, 500, math.inf)


def test_the_first_partition_is_that_of_the_observed_lengths() -> None:
    loop = StrategicLoop(USUAL)
    lengths = paper_mix(500, 1)
    (change,) = play(loop, lengths)
    assert change.partition == refine_and_prune(lengths, USUAL.refine_and_prune)


def test_queues_are_learned_again_after_the_interval_from_the_last_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strategic_loop, "_MIN_DISTANCE", 1e-9)
    # Eight per second, so that sums of times are exact.
    lengths = paper_mix(2500, 2)
    changes = play(StrategicLoop(USUAL), lengths, per_s=8.0)
    assert [change.at - changes[0].at for change in changes] == [0.0, 60.0, 120.0, 180.0, 240.0]
    assert [change.lengths for change in changes] == [500, 980, 1460, 1940, 2000]
    assert changes[-1].partition == refine_and_prune(lengths[420:2420], USUAL.refine_and_prune)


def test_queues_are_not_learned_again_from_few_new_lengths() -> None:
    loop = StrategicLoop(USUAL)
    play(loop, paper_mix(500, 1))
    play(loop, paper_mix(249, 2), since_s=3600.0)
    assert loop.runs == 1
    play(loop, [100], since_s=7200.0)
    assert loop.runs == 2


def test_a_length_below_one_is_ignored() -> None:
    loop = StrategicLoop(replace(USUAL, window=2))
    assert play(loop, [0, -4, 12]) == []
    (change,) = play(loop, [12], since_s=1.0)
    assert change.lengths == 2


def test_a_partition_that_hardly_differs_is_not_applied() -> None:
    loop = StrategicLoop(USUAL)
    changes = play(loop, paper_mix(14_000, 3))
    assert loop.runs > 20
    assert len(changes) == 1


@pytest.mark.parametrize("after", [heavy_tail(3000, 5), flipped_mix(3000, 5)])
def test_other_traffic_is_learned_within_minutes(after: Sample) -> None:
    loop = StrategicLoop(USUAL)
    play(loop, paper_mix(3000, 4))
    changes = play(loop, after, since_s=300.0)
    assert changes[0].at <= 300.0 + 3 * USUAL.interval_s
    # The old traffic has no influence on the final partition.
    alone = refine_and_prune(after, USUAL.refine_and_prune)
    assert loop.change is not None
    assert partition_distance(loop.change.partition, alone, after) < 0.3


def test_lengths_that_creep_are_followed() -> None:
    loop = StrategicLoop(USUAL)
    play(loop, np.tile([100, 1000], 300))
    for step in range(1, 9):
        play(loop, np.tile([100 + 20 * step, 1000 + 200 * step], 500), since_s=step * 100.0)
    assert loop.change is not None
    # Lengths have risen to 260 and 2,600. Queues differ by at most a third from those of the latest lengths.
    latest = np.tile([260, 2600], 1000)
    alone = refine_and_prune(latest, USUAL.refine_and_prune)
    assert partition_distance(loop.change.partition, alone, latest) < 0.4


def test_without_requests_nothing_happens() -> None:
    loop = StrategicLoop(USUAL)
    assert [loop.due(now) for now in (0.0, 1e3, 1e6)] == [None, None, None]
    play(loop, paper_mix(600, 1), since_s=1e6)
    assert [loop.due(1e6 + now) for now in (600.0, 1e4)] == [None, None]


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.sampled_from([paper_mix, heavy_tail]), st.integers(0, 10_000), st.sampled_from([2.0, 10.0, 40.0]))
def test_a_stationary_mix_rarely_changes_the_partition(mix: Mix, seed: int, per_s: float) -> None:
    loop = StrategicLoop(USUAL)
    # The first is of 500 lengths, and is corrected when there are more.
    assert 1 <= len(play(loop, mix(8000, seed), per_s=per_s)) <= 6
    assert len(play(loop, mix(4000, seed + 1), per_s=per_s, since_s=8000 / per_s)) <= 3


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([2.0, 10.0, 40.0]))
def test_the_same_lengths_at_the_same_times_give_the_same_changes(seed: int, per_s: float) -> None:
    lengths = np.concatenate([paper_mix(1500, seed), heavy_tail(1500, seed)])
    first, second = (play(StrategicLoop(USUAL), lengths, per_s=per_s) for _ in range(2))
    assert first == second


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
