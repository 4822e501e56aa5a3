"""The strategic loop, its refinement and pruning, and the stability of the queues it learns."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.policies.length_queues import Partition
from serve_app.lab.workloads import TraceChoice, resolve
from serve_app.tuning import strategic_loop
from serve_app.tuning.strategic_loop import (
    PAPER,
    LengthsError,
    PartitionChange,
    RefineAndPruneSettings,
    StrategicLoop,
    StrategicSettings,
    partition_distance,
    prune,
    queue_means,
    refine_and_prune,
    utility,
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


# -- refine and prune -------------------------------------------------------------------------------------

STABLE = RefineAndPruneSettings()
FINE_SETTINGS = replace(STABLE, alpha=1.0)
# The alpha of the authors' released code.
RELEASED = replace(PAPER, alpha=5.5)
EVERY_KIND = pytest.mark.parametrize(
    "kind", [STABLE, FINE_SETTINGS, PAPER, RELEASED], ids=["stable", "fine", "paper", "released"]
)


def test_the_published_steps_on_a_sample_worked_by_hand() -> None:
    # k-means: {10 .. 30}, {1000, 1010}, {4000}. In the first, gaps 1 1 17 1: mean 5, 17 > 1.5 * 5 splits;
    # then neither 1 1 nor 1 has a significant gap. 1000 and 1010 differ by less than 0.2 of their mean.
    lengths = [10, 11, 12, 29, 30, 1000, 1010, 4000]
    partition = refine_and_prune(lengths, replace(PAPER, min_cluster_size=2))

    assert extents(partition) == [(10, 12), (29, 30), (1000, 1010), (4000, 4000)]
    assert [queue.count for queue in partition.intervals] == [3, 2, 2, 1]
    assert [queue.mean_tokens for queue in partition.intervals] == [11.0, 29.5, 1005.0, 4000.0]


def test_the_published_refinement_leaves_small_clusters_whole() -> None:
    lengths = [10, 11, 12, 29, 30, 1000, 1010, 4000]

    assert extents(refine_and_prune(lengths, PAPER)) == [(10, 30), (1000, 1010), (4000, 4000)]


def test_alpha_decides_which_gaps_of_a_sample_are_significant() -> None:
    # In {10 .. 30} the widest gap is 17, 3.4 times the mean gap of 5.
    lengths = [10, 11, 12, 29, 30, 1000, 1010, 4000]
    published = replace(PAPER, min_cluster_size=2)

    assert extents(refine_and_prune(lengths, replace(published, alpha=3.3)))[:2] == [(10, 12), (29, 30)]
    assert extents(refine_and_prune(lengths, replace(published, alpha=RELEASED.alpha)))[0] == (10, 30)


def test_alpha_acts_on_the_gaps_between_logarithms() -> None:
    # Each is 1.3 times the previous one, so all gaps are alike and wide enough to count.
    lengths = [round(100 * 1.3**step) for step in range(12)]

    assert len(refine_and_prune(lengths, replace(STABLE, alpha=0.9))) == 12
    assert len(refine_and_prune(lengths, replace(STABLE, alpha=1.5))) == STABLE.clusters


def test_pruning_ends_at_the_wanted_number_of_queues() -> None:
    for kind in (FINE_SETTINGS, PAPER):
        partition = refine_and_prune(paper_mix(5000, seed=1), replace(kind, max_queues=7))

        assert len(partition) == 7
        assert sum(queue.count for queue in partition.intervals) == 5000


def test_lengths_around_a_few_sizes_get_a_queue_each() -> None:
    rng = np.random.default_rng(5)
    modes = [
        rng.integers(centre - spread, centre + spread + 1, 400)
        for centre, spread in ((120, 4), (600, 20), (3000, 90))
    ]

    for size in (40, 400):
        partition = refine_and_prune(np.concatenate([mode[:size] for mode in modes]), STABLE)
        assert [queue.count for queue in partition.intervals] == [size] * 3


def test_the_gap_between_short_and_long_prompts_is_never_bridged() -> None:
    for kind in (STABLE, FINE_SETTINGS, PAPER):
        bounds = extents(refine_and_prune(paper_mix(2000, seed=2), kind))

        assert not [pair for pair in bounds if pair[0] <= 256 and pair[1] >= 1024]


@pytest.mark.parametrize("traffic", [paper_mix, heavy_tail])
def test_a_lower_alpha_makes_more_queues(traffic: Callable[[int, int], Sample]) -> None:
    lengths = traffic(20_000, 3)
    counts = [len(refine_and_prune(lengths, replace(STABLE, alpha=alpha))) for alpha in (1.0, 2.0, 6.0)]

    assert counts[0] >= 2 * counts[2]
    assert counts == sorted(counts, reverse=True)


def test_the_stable_steps_on_a_sample_worked_by_hand() -> None:
    # Logarithms; k-means: {10 .. 30}, {1000, 1010}, {4000}. Gaps of the first .10 .09 .88 .03, mean .28: only
    # .88 is wider than 3 means, and what it leaves is narrower than a fifth.
    lengths = [10, 11, 12, 29, 30, 1000, 1010, 4000]

    for alpha, first in ((3.0, [(10, 12), (29, 30)]), (3.5, [(10, 30)])):
        found = extents(refine_and_prune(lengths, replace(STABLE, alpha=alpha)))
        assert found == [*first, (1000, 1010), (4000, 4000)]


def test_a_queue_with_too_small_a_share_joins_its_nearer_neighbour() -> None:
    lengths = [100] * 90 + [150] * 4 + [1000] * 90

    found = refine_and_prune(lengths, replace(STABLE, alpha=1.0, min_share=0.05))
    assert [queue.count for queue in found.intervals] == [94, 90]
    found = refine_and_prune(lengths, replace(STABLE, alpha=1.0, min_share=0.01))
    assert [queue.count for queue in found.intervals] == [90, 4, 90]


@EVERY_KIND
@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([7], [(7, 7)]),
        ([512] * 1000, [(512, 512)]),
        ([1] * 300 + [4096] * 300, [(1, 1), (4096, 4096)]),
        ([2**53, 2**53], [(2**53, 2**53)]),
    ],
    ids=["a single one", "all the same", "two", "huge"],
)
def test_few_distinct_lengths_give_a_queue_each(
    kind: RefineAndPruneSettings, lengths: list[int], expected: list[tuple[int, int]]
) -> None:
    assert extents(refine_and_prune(lengths, kind)) == expected


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "at least one prompt length"),
        (np.ones((2, 2), dtype=np.int64), "shape"),
        ([100, 0, 7], "got 0"),
        ([100, -3], "got -3"),
        ([100, 2**53 + 1], "got 9007199254740993"),
        ([100, 2**70], "whole numbers"),
        ([1.5, 2.0], "whole numbers"),
        ([True, False], "whole numbers"),
        (["12"], "whole numbers"),
    ],
)
def test_an_invalid_prompt_length_is_rejected_by_name(lengths: Any, message: str) -> None:
    with pytest.raises(LengthsError, match=message):
        refine_and_prune(lengths, STABLE)


@EVERY_KIND
def test_the_order_of_the_lengths_does_not_matter_and_the_input_is_left_alone(
    kind: RefineAndPruneSettings,
) -> None:
    lengths = heavy_tail(3000, seed=6)
    shuffled = np.random.default_rng(7).permutation(lengths)
    before = shuffled.copy()

    assert refine_and_prune(shuffled, kind) == refine_and_prune(lengths, kind)
    assert (shuffled == before).all()


def test_any_integer_type_gives_the_same_queues() -> None:
    lengths = paper_mix(1000, seed=8)
    expected = refine_and_prune(lengths, STABLE)

    assert refine_and_prune(lengths.tolist(), STABLE) == expected
    assert refine_and_prune(lengths.astype(np.uint16), STABLE) == expected


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 2**53) | st.integers(1, 300), min_size=1, max_size=150),
    kind=st.sampled_from([STABLE, FINE_SETTINGS, PAPER, replace(PAPER, min_cluster_size=2)]),
    max_queues=st.integers(1, 8),
)
def test_any_lengths_are_divided_without_loss_in_order_and_within_the_limit(
    lengths: list[int], kind: RefineAndPruneSettings, max_queues: int
) -> None:
    partition = refine_and_prune(lengths, replace(kind, max_queues=max_queues))

    assert len(partition) <= max_queues
    assert sum(queue.count for queue in partition.intervals) == len(lengths)
    for queue in partition.intervals:
        assert queue.count == sum(queue.min_tokens <= length <= queue.max_tokens for length in lengths)
    assert (partition.intervals[0].min_tokens, partition.intervals[-1].max_tokens) == (
        min(lengths),
        max(lengths),
    )


def test_the_trap_the_published_refinement_follows_the_size_of_the_sample() -> None:
    unpruned = replace(RELEASED, max_queues=100_000)
    found = {count: refine_and_prune(paper_mix(count, seed=9), unpruned).intervals for count in (500, 10_000)}

    assert len(found[500]) < 20
    assert len(found[10_000]) > 150
    published = refine_and_prune(paper_mix(1000, seed=9), replace(PAPER, max_queues=100_000))
    assert min(queue.count for queue in published.intervals) == 1


# Pruning

QUEUES = [
    interval(10, 20, 15.0, 100),  # rho 10
    interval(21, 31, 25.0, 100),  # rho 10, U with the first: 20 / 10 = 2
    interval(100, 200, 145.0, 50),  # rho 0.5, U: 10.5 / 120 = 0.0875
    interval(1000, 2000, 1345.0, 20),  # rho 0.02, U: 0.52 / 1200 = 0.00043
]


def test_utility_is_the_sum_of_densities_over_the_distance_of_means() -> None:
    assert utility(QUEUES[0], QUEUES[1]) == pytest.approx(2.0)
    # A queue of one length counts as one token wide: 40 / 1 and 10 / 10; means 10 apart.
    assert utility(interval(8, 8, 8.0, 40), interval(13, 23, 18.0, 10)) == pytest.approx(41 / 10)


def test_the_densest_and_closest_neighbours_are_merged_first_and_utilities_recomputed() -> None:
    assert prune(QUEUES, 4) == QUEUES
    assert prune(QUEUES, 3) == [interval(10, 31, 20.0, 200), *QUEUES[2:]]
    # After the first merge: rho 200 / 21 = 9.52, U with the third (9.52 + 0.5) / 125 = 0.080 > 0.00043.
    merged = prune(QUEUES, 2)
    assert [(queue.min_tokens, queue.max_tokens, queue.count) for queue in merged] == [
        (10, 200, 250),
        (1000, 2000, 20),
    ]
    assert merged[0].mean_tokens == pytest.approx((20 * 200 + 145 * 50) / 250)


def test_of_equal_utilities_the_shorter_pair_is_merged() -> None:
    alike = [interval(10, 20, 15.0, 10), interval(30, 40, 35.0, 10), interval(50, 60, 55.0, 10)]
    assert prune(alike, 2)[0].max_tokens == 40


# -- stability of learned queues --------------------------------------------------------------------------
# The same traffic gives the same queues for any sample size. Tolerance between a sample of 500 to 20,000
# requests and one of 50,000 of the same distribution: the number of queues differs by at most a quarter or
# three, whichever is more. The queues of the same prompts have mean lengths that differ by at most 45 % on
# average (`partition_distance`), and by a quarter from 5,000 requests on. The published refinement differs
# by several times as much.

MANY = 50_000
DISTANCE, DISTANCE_OF_MANY = 0.45, 0.25


def lmsys(count: int, seed: int) -> Sample:
    trace = resolve(TraceChoice(name="lmsys", requests=count), seed)
    return np.array([request.prompt_tokens for request in trace.requests])


def allowed_difference(queues: int) -> float:
    return max(3, queues / 4)


def holds_the_least_share(partition: Partition, requests: int) -> bool:
    return all(queue.count >= STABLE.min_share * requests for queue in partition.intervals)


@pytest.mark.application
@pytest.mark.parametrize("traffic", [paper_mix, heavy_tail, lmsys])
def test_queues_stay_nearly_the_same_from_500_to_50000_requests(
    traffic: Callable[[int, int], Sample],
) -> None:
    reference = refine_and_prune(traffic(MANY, 100), STABLE)
    prompts = traffic(4000, 101)

    for count in (500, 1000, 5000, 20_000):
        for seed in range(4):
            found = refine_and_prune(traffic(count, seed), STABLE)
            assert abs(len(found) - len(reference)) <= allowed_difference(len(reference))
            assert partition_distance(found, reference, prompts) <= (
                DISTANCE_OF_MANY if count >= 5000 else DISTANCE
            )
            assert holds_the_least_share(found, count)


def test_the_published_refinement_exceeds_the_same_tolerance() -> None:
    reference = refine_and_prune(lmsys(MANY, 100), PAPER)
    found = refine_and_prune(lmsys(1000, 1), PAPER)

    assert partition_distance(found, reference, lmsys(4000, 101)) > 2 * DISTANCE


@st.composite
def mixtures(draw: st.DrawFn) -> Callable[[int, int], Sample]:
    """Draw one to three log-normal kinds of prompts, each with at least a tenth of the requests."""
    kinds = draw(
        st.lists(
            st.tuples(st.floats(20, 30_000), st.floats(0.05, 1.5), st.floats(0.2, 1.0)),
            min_size=1,
            max_size=3,
        )
    )
    medians, sigmas, shares = (np.array(column) for column in zip(*kinds, strict=True))

    def traffic(count: int, seed: int) -> Sample:
        rng = np.random.default_rng(seed)
        kind = rng.choice(len(kinds), count, p=shares / shares.sum())
        drawn = np.exp(np.log(medians)[kind] + sigmas[kind] * rng.standard_normal(count))
        lengths: Sample = np.clip(drawn, 1, 10**6).astype(np.int64)
        return lengths

    return traffic


@settings(max_examples=25, deadline=None)
@given(traffic=mixtures(), count=st.integers(500, 20_000), seed=st.integers(0, 1000))
def test_the_queues_of_any_traffic_are_few_and_hold_the_least_share_at_any_size(
    traffic: Callable[[int, int], Sample], count: int, seed: int
) -> None:
    reference = refine_and_prune(traffic(MANY, 2000), STABLE)
    found = refine_and_prune(traffic(count, seed), STABLE)

    assert max(len(found), len(reference)) < STABLE.max_queues
    assert holds_the_least_share(found, count)
    assert holds_the_least_share(reference, MANY)


def test_fifty_thousand_lengths_take_hardly_longer_than_five_hundred() -> None:
    def cpu_s(count: int) -> float:
        lengths, times_s = lmsys(count, 0), []
        for _ in range(3):
            began = time.process_time()
            refine_and_prune(lengths, STABLE)
            times_s.append(time.process_time() - began)
        return min(times_s)

    cpu_s(500)  # imports k-means

    assert cpu_s(MANY) < 5 * cpu_s(500)
