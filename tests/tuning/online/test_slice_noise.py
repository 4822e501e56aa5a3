import random

import pytest

from serve_app.metrics.record import RequestRecord
from serve_app.tuning.objective.objective import ObjectiveSettings
from serve_app.tuning.online.rollout_settings import RolloutSettings
from serve_app.tuning.online.slice_noise import (
    Measured,
    SliceNoise,
    neighbours_in,
    rewards_in,
    slice_noise_of,
    steady_slices,
)
from tests.metrics.builders import record

SETTINGS = RolloutSettings(slice_s=10.0, settle_s=2.0)
OBJECTIVE = ObjectiveSettings(min_requests=5)


def arrived(at: float, ttft_s: float) -> RequestRecord:
    first = at + ttft_s
    return record(
        request_id=f"r{at}", arrived_at=at, dispatched_at=at, first_token_at=first, finished_at=first + 0.5
    )


def found(records: list[RequestRecord], begin: float, end: float) -> SliceNoise:
    rewards = rewards_in(steady_slices(begin, end, SETTINGS), records, OBJECTIVE)
    return slice_noise_of(neighbours_in(Measured(reward) for reward in rewards))


def slices(*ttfts_s: float) -> list[RequestRecord]:
    """Ten seconds of traffic at each pace; the first two of each are not judged, and are awful."""
    return [
        arrived(10.0 * place + second, ttft_s if second >= 2 else 60.0)
        for place, ttft_s in enumerate(ttfts_s)
        for second in range(10)
    ]


def test_traffic_that_is_always_alike_has_no_slice_noise() -> None:
    slice_noise = found(slices(0.2, 0.2, 0.2, 0.2), 0.0, 40.0)
    assert slice_noise.reward == pytest.approx(0.0)
    assert slice_noise.attainment == {"default short": 0.0}


def test_slice_noise_is_the_root_mean_square_of_the_differences_of_neighbours() -> None:
    # Within the target and beyond it, in turn: attainment 1, 0, 1, 1.
    slice_noise = found(slices(0.2, 5.0, 0.2, 0.2), 0.0, 40.0)
    assert slice_noise.attainment["default short"] == pytest.approx((2 / 3) ** 0.5)
    assert slice_noise.reward > 0.8


def test_only_whole_slices_since_the_last_change_count() -> None:
    records = slices(5.0, 0.2, 0.2, 0.2)
    random.Random(0).shuffle(records)
    assert found(records, 10.0, 40.0).reward == pytest.approx(0.0)
    assert found(records, 9.0, 40.0).reward == pytest.approx(0.0)
    assert found(records, 0.0, 40.0).reward > 0.5


@pytest.mark.parametrize("end", [-5.0, 0.0, 19.0])
def test_without_two_slices_nothing_is_known_and_trials_are_strict(end: float) -> None:
    assert found(slices(0.2, 5.0), 0.0, end).reward == pytest.approx(0.0)


def test_a_slice_that_cannot_be_measured_is_no_neighbour() -> None:
    few = [one for one in slices(0.2, 5.0, 0.2) if not 10.0 <= one.arrived_at < 17.0]
    assert found(few, 0.0, 30.0).reward == pytest.approx(0.0)
