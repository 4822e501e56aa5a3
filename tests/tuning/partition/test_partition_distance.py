import math

import pytest

from serve_app.scheduling.policies.partition import Partition
from serve_app.tuning.partition.strategic_loop import partition_distance, queue_means
from tests.tuning.builders import interval

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
