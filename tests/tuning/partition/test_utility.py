import pytest

from serve_app.tuning.partition.utility import prune, utility
from tests.tuning.builders import interval


def test_utility_is_the_sum_of_densities_over_the_distance_of_means() -> None:
    # rho: 20 / 10 = 2 and 30 / 20 = 1.5; means 50 apart: 3.5 / 50.
    lower, upper = interval(100, 110, 105.0, 20), interval(145, 165, 155.0, 30)

    assert utility(lower, upper) == pytest.approx(3.5 / 50)


def test_a_queue_of_one_length_counts_as_one_token_wide() -> None:
    # rho: 40 / 1 and 10 / 10; means 10 apart.
    assert utility(interval(8, 8, 8.0, 40), interval(13, 23, 18.0, 10)) == pytest.approx(41 / 10)


QUEUES = [
    interval(10, 20, 15.0, 100),  # rho 10
    interval(21, 31, 25.0, 100),  # rho 10, U with the first: 20 / 10 = 2
    interval(100, 200, 145.0, 50),  # rho 0.5, U: 10.5 / 120 = 0.0875
    interval(1000, 2000, 1345.0, 20),  # rho 0.02, U: 0.52 / 1200 = 0.00043
]


def test_the_densest_and_closest_neighbours_are_merged_first() -> None:
    merged = prune(QUEUES, 3)

    assert merged == [interval(10, 31, 20.0, 200), *QUEUES[2:]]


def test_utilities_are_taken_anew_after_each_merge() -> None:
    # After the first merge: rho 200 / 21 = 9.52, U with the third (9.52 + 0.5) / 125 = 0.080 > 0.00043.
    merged = prune(QUEUES, 2)

    assert [(queue.min_tokens, queue.max_tokens, queue.count) for queue in merged] == [
        (10, 200, 250),
        (1000, 2000, 20),
    ]
    assert merged[0].mean_tokens == pytest.approx((20 * 200 + 145 * 50) / 250)


def test_pruning_keeps_every_request_and_the_outer_bounds() -> None:
    (only,) = prune(QUEUES, 1)

    assert (only.min_tokens, only.max_tokens, only.count) == (10, 2000, 270)


def test_few_enough_queues_stay_as_they_are() -> None:
    assert prune(QUEUES, 4) == QUEUES


def test_of_equal_utilities_the_shorter_pair_is_merged() -> None:
    alike = [interval(10, 20, 15.0, 10), interval(30, 40, 35.0, 10), interval(50, 60, 55.0, 10)]

    assert prune(alike, 2)[0].max_tokens == 40
