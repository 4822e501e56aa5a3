import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.routing.estimation.bytes_per_token import BytesPerToken, EstimatorSettings

POSITIVE = st.floats(1e-6, 1e9)
OBSERVATIONS = st.lists(st.tuples(st.floats(-10, 1e7), st.floats(-10, 1e7)), max_size=60)


def ratio(cold_start: float = 4.0, **settings: Any) -> BytesPerToken:
    return BytesPerToken(EstimatorSettings(**settings), cold_start)


def warm() -> BytesPerToken:
    """Return a ratio of 4.0 after its warm-up."""
    learned = ratio(4.0)
    learned.weight = 1_000.0
    return learned


def test_the_average_is_plain_while_it_warms_up() -> None:
    """Cold start 4.0 counts as two observations: (4 + 4 + 3) / 3, then (4 + 4 + 3 + 5) / 4."""
    learned = ratio(4.0)
    learned.observe(300, 100)
    assert learned.mean == pytest.approx(11 / 3)
    learned.observe(500, 100)
    assert learned.mean == pytest.approx(4.0)


def test_the_deviation_is_the_error_of_the_forecast_that_was_made() -> None:
    """Start 0.15 * 4 = 0.6; |3 - 4| = 1 with weight 1/3, then |5 - 11/3| = 4/3 with weight 1/4."""
    learned = ratio(4.0)
    learned.observe(300, 100)
    assert learned.deviation == pytest.approx(0.6 * 2 / 3 + 1 / 3)
    learned.observe(500, 100)
    assert learned.deviation == pytest.approx((0.6 * 2 / 3 + 1 / 3) * 3 / 4 + 4 / 3 / 4)


def test_after_the_warm_up_beta_applies_as_in_the_paper() -> None:
    learned = warm()
    learned.observe(300, 100)
    assert learned.mean == pytest.approx(0.95 * 4.0 + 0.05 * 3.0)
    assert learned.deviation == pytest.approx(0.95 * 0.6 + 0.05 * 1.0)


def test_a_short_text_moves_the_average_in_proportion_to_its_length() -> None:
    short, long = warm(), warm()
    short.observe(3 * 16, 16)
    long.observe(3 * 640, 640)
    assert (4.0 - short.mean) == pytest.approx((4.0 - long.mean) * 16 / 64)


def test_fifty_observations_outweigh_a_cold_start_that_is_three_times_off() -> None:
    learned = ratio(4.0)
    for _ in range(50):
        learned.observe(1300, 1000)
    assert learned.mean == pytest.approx(1.3, rel=0.05)


def test_one_absurd_observation_counts_only_up_to_the_outlier_limit() -> None:
    learned = warm()
    learned.observe(1_000_000, 100)
    assert learned.mean == pytest.approx(0.95 * 4.0 + 0.05 * 12.0)


@pytest.mark.parametrize(("size", "tokens"), [(100, 0), (100, -5), (0, 10), (-1, 10)])
def test_an_observation_that_cannot_be_is_ignored(size: float, tokens: float) -> None:
    learned = ratio(4.0)
    learned.observe(size, tokens)
    assert learned.state() == ratio(4.0).state()


def test_the_careful_divisor_is_the_mean_less_gamma_deviations() -> None:
    learned = ratio(4.0, gamma=2.0)
    assert learned.conservative == pytest.approx(4.0 - 2 * 0.6)


def test_equal_requests_do_not_remove_the_margin() -> None:
    learned = ratio(4.0, gamma=2.0)
    for _ in range(1000):
        learned.observe(4000, 1000)
    assert learned.conservative == pytest.approx(4.0 * (1 - 2 * 0.03))


@given(OBSERVATIONS, st.floats(0, 50), POSITIVE)
def test_the_divisors_keep_their_order_and_the_floor_holds(
    observations: list[tuple[float, float]], gamma: float, cold_start: float
) -> None:
    learned = ratio(cold_start, gamma=gamma)
    for size, tokens in observations:
        learned.observe(size, tokens)
        assert 0 < learned.conservative <= learned.unbiased <= learned.mean < learned.optimistic < math.inf
        assert learned.conservative >= min(learned.unbiased, 1.0)
        assert 0 <= learned.deviation < math.inf


def test_the_error_of_an_estimate_grows_with_the_text_and_the_deviation() -> None:
    learned = ratio()
    learned.mean, learned.deviation = 4.0, 0.5
    # 4,000 bytes are 1,000 tokens; the ratio's mean absolute deviation is an eighth.
    assert learned.standard_error(4_000) == pytest.approx(1_000 * 0.125 * math.sqrt(math.pi / 2), rel=1e-3)


def test_the_warm_up_ends_at_the_memory_of_the_averages() -> None:
    learned = ratio()
    for _ in range(200):
        learned.observe(400, 100)
    assert learned.weight == pytest.approx(20.0)
