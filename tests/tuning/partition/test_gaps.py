import numpy as np

from serve_app.tuning.partition.gaps import Values, coarse_cuts, gap_cuts


def values(*numbers: float) -> Values:
    return np.array(numbers, dtype=np.float64)


def never_settled(_: Values) -> bool:
    return False


def test_coarse_cuts_separate_short_medium_and_long() -> None:
    lengths = values(10, 12, 14, 500, 510, 520, 4000, 4010)

    assert coarse_cuts(lengths, clusters=3, seed=0) == [3, 6]


def test_there_are_no_more_clusters_than_distinct_lengths() -> None:
    assert coarse_cuts(values(7, 7, 7), clusters=3, seed=0) == []
    assert coarse_cuts(values(7, 7, 900), clusters=3, seed=0) == [2]


def test_equal_lengths_stay_in_one_cluster() -> None:
    lengths = values(*[1] * 50, *[2] * 50, *[3] * 50, *[4] * 50)

    assert set(coarse_cuts(lengths, clusters=3, seed=0)) <= {50, 100, 150}


def test_the_widest_significant_gap_splits_and_each_half_is_judged_by_its_own_mean() -> None:
    # Gaps 1 1 8 1 1 88: mean 16.7, only 88 exceeds 1.5 means. Without it: mean 2.4, 8 is significant.
    # Then 1 1 and 1 1: no gap stands out.
    lengths = values(10, 11, 12, 20, 21, 22, 110)

    assert gap_cuts(lengths, (0, 7), 1.5, never_settled) == [3, 6]


def test_a_higher_alpha_finds_fewer_gaps() -> None:
    # 88 is 5.3 mean gaps; the next one, 8, is 3.3 of the mean that is left.
    lengths = values(10, 11, 12, 20, 21, 22, 110)

    assert gap_cuts(lengths, (0, 7), 4.0, never_settled) == [6]
    assert gap_cuts(lengths, (0, 7), 6.0, never_settled) == []


def test_a_gap_of_exactly_alpha_means_is_not_significant() -> None:
    # Gaps 1 and 3: mean 2.
    assert gap_cuts(values(1, 2, 5), (0, 3), 1.5, never_settled) == []


def test_a_settled_range_is_not_split() -> None:
    lengths = values(10, 11, 12, 20, 21, 22, 110)

    assert gap_cuts(lengths, (0, 7), 1.5, lambda members: len(members) < 7) == [6]


def test_only_what_lies_between_the_edges_is_looked_at() -> None:
    assert gap_cuts(values(1, 100, 101, 102, 500), (1, 4), 1.5, never_settled) == []


def test_a_sample_that_falls_apart_one_by_one_needs_no_deep_recursion() -> None:
    widening = np.cumsum(1.5 ** np.arange(120.0))

    assert len(gap_cuts(widening, (0, 120), 0.9, never_settled)) == 119
