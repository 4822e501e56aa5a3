import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.routing.estimation.estimate import MediaTokens


def media(observations: list[tuple[int, float]]) -> MediaTokens:
    learned = MediaTokens()
    for items, tokens in observations:
        learned.observe(items, tokens)
    return learned


def test_the_mean_of_media_is_plain_while_it_warms_up_and_then_follows() -> None:
    """1,024 counts as one observation: (1024 + 576) / 2, then (1024 + 576 + 576) / 3."""
    assert media([(1, 576.0)]).mean == pytest.approx(800.0)
    assert media([(1, 576.0), (2, 1152.0)]).mean == pytest.approx((1024 + 576 + 576) / 3)
    assert media([(1, 576.0)] * 200).mean == pytest.approx(576.0, rel=0.01)
    assert media([(1, 576.0)] * 200 + [(1, 3000.0)] * 60).mean == pytest.approx(3000.0, rel=0.05)


def test_the_weight_of_an_absurd_media_report_is_limited() -> None:
    learned = media([(1, 1024.0)] * 100)
    learned.observe(1, 1e9)
    assert learned.mean == pytest.approx(0.95 * 1024 + 0.05 * 20 * 1024, rel=0.01)


@given(st.lists(st.tuples(st.integers(-3, 100), st.floats(-1e9, 1e9) | st.just(math.nan)), max_size=40))
def test_media_stay_finite_and_are_restored_as_they_were(observations: list[tuple[int, float]]) -> None:
    learned, copy = media(observations), media([])
    assert 0 <= learned.mean < math.inf
    assert 0 <= learned.deviation < math.inf
    copy.restore(learned.state())
    assert copy.state() == learned.state()


def test_media_items_are_averaged_with_the_error_of_the_forecast() -> None:
    learned = MediaTokens()
    learned.mean = 1_000.0
    learned.observe(2, 1_200.0)  # 600 each, against 1,000; half the weight
    assert (learned.mean, learned.deviation) == pytest.approx((800.0, 200.0))
    learned.observe(1, 500.0)  # a third of the weight
    assert (learned.mean, learned.deviation) == pytest.approx((700.0, 200.0 + (300 - 200) / 3))
    for _ in range(200):
        learned.observe(1, 700.0)
    # The memory is that of a step of a twentieth.
    learned.observe(1, 1_700.0)
    assert learned.mean == pytest.approx(750.0, abs=1.0)
    assert learned.state()["weight"] == pytest.approx(20.0)
