from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.tuning.strategic_loop import (
    PAPER,
    LengthsError,
    RefineAndPruneSettings,
    prune,
    refine_and_prune,
    utility,
)
from tests.tuning.builders import Sample, extents, heavy_tail, interval, paper_mix

STABLE = RefineAndPruneSettings()
FINE = replace(STABLE, alpha=1.0)
# The alpha of the authors' released code.
RELEASED = replace(PAPER, alpha=5.5)
EVERY_KIND = pytest.mark.parametrize(
    "kind", [STABLE, FINE, PAPER, RELEASED], ids=["stable", "fine", "paper", "released"]
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
    for kind in (FINE, PAPER):
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
    for kind in (STABLE, FINE, PAPER):
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
    kind=st.sampled_from([STABLE, FINE, PAPER, replace(PAPER, min_cluster_size=2)]),
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
