from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.scheduling.policies.partition import Partition
from serve_app.tuning.partition.online_adjustment import AdjustmentSettings, adjusted
from serve_app.tuning.partition.refine_and_prune import refine_and_prune
from serve_app.tuning.partition.settings import RefineAndPruneSettings
from tests.tuning.builders import extents, heavy_tail, interval

HALF = AdjustmentSettings(rate=0.5, min_members=2)
TWO = Partition((interval(100, 200, 150.0, 10), interval(1000, 2000, 1500.0, 10)))


def means(partition: Partition) -> list[float]:
    return [queue.mean_tokens for queue in partition.intervals]


def test_a_mean_goes_its_share_of_the_way_to_the_recent_members() -> None:
    moved = adjusted(TWO, [110, 130, 1600, 2000], HALF)

    assert means(moved) == [(150 + 120) / 2, (1500 + 1800) / 2]
    assert extents(moved) == extents(TWO)


def test_a_bound_widens_towards_what_routing_lets_in() -> None:
    # 210 and 95 are within a tenth of the first queue; 911 is nearer than a tenth to the second.
    moved = adjusted(TWO, [95, 210, 911, 1500], HALF)

    assert extents(moved) == [(97, 205), (955, 2000)]


def test_what_goes_to_bubbles_moves_no_queue() -> None:
    assert adjusted(TWO, [50, 60, 400, 500, 600, 9000, 9000], HALF) == TWO


def test_too_few_members_move_no_queue() -> None:
    assert adjusted(TWO, [101, 1900, 1900], HALF).intervals[0] == TWO.intervals[0]
    assert adjusted(TWO, [101, 1900, 1900], HALF).intervals[1] != TWO.intervals[1]


def test_a_rate_of_zero_adjusts_nothing() -> None:
    assert adjusted(TWO, [101, 101, 1900, 1900], AdjustmentSettings(rate=0, min_members=1)) == TWO


@settings(deadline=None)
@given(
    st.integers(0, 1000),
    st.lists(st.integers(1, 200_000), max_size=300),
    st.floats(0, 1),
    st.floats(0, 0.9),
)
def test_queues_stay_as_many_and_apart_and_only_widen(
    seed: int, recent: Sequence[int], rate: float, tolerance_ratio: float
) -> None:
    partition = refine_and_prune(heavy_tail(300, seed), RefineAndPruneSettings())
    adjustment = AdjustmentSettings(rate=rate, min_members=1, tolerance_ratio=tolerance_ratio)

    moved = adjusted(partition, recent, adjustment)

    assert len(moved) == len(partition)
    for before, after in zip(partition.intervals, moved.intervals, strict=True):
        assert after.min_tokens <= before.min_tokens
        assert after.max_tokens >= before.max_tokens
        assert after.count == before.count


@pytest.mark.parametrize(
    "wrong",
    [{"interval_s": 0}, {"rate": 1.5}, {"min_members": 0}, {"min_distance": 0}, {"tolerance_ratio": 1}],
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AdjustmentSettings(**wrong)
