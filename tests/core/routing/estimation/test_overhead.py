import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.routing.estimation.overhead import MediaTokens, TemplateOverhead

OBSERVATIONS = st.lists(
    st.tuples(st.integers(-1, 300), st.floats(-1e6, 1e6), st.floats(0, 1e6)),
    max_size=40,
)


def overhead() -> TemplateOverhead:
    return TemplateOverhead()


def test_one_exact_observation_moves_both_unknowns_by_their_share_of_the_doubt() -> None:
    """Prior 16 +- 16 and 5 +- 2, one message that costs 30: gain 256 and 4 of 256 + 4 + 1, surprise 9."""
    learned = overhead()
    learned.observe(1, 30.0, 0.0)
    assert learned.per_request == pytest.approx(16 + 9 * 256 / 261)
    assert learned.per_message == pytest.approx(5 + 9 * 4 / 261)


def test_chats_of_different_lengths_separate_the_two_unknowns() -> None:
    learned, rng = overhead(), random.Random(1)
    for _ in range(100):
        messages = rng.choice((1, 2, 3, 7))
        learned.observe(messages, 23 + 4 * messages + rng.uniform(-1, 1), 2.0)
    assert learned.per_request == pytest.approx(23, abs=1.5)
    assert learned.per_message == pytest.approx(4, abs=0.4)


def test_chats_of_one_message_determine_the_sum() -> None:
    learned = overhead()
    for _ in range(50):
        learned.observe(1, 31.0, 2.0)
    assert learned.tokens(1) == pytest.approx(31, abs=0.5)


def test_a_long_prompt_hardly_changes_the_overhead() -> None:
    learned = overhead()
    learned.observe(1, 300.0, 2000.0)
    assert learned.tokens(1) == pytest.approx(21, abs=0.1)


def test_a_system_prompt_of_three_hundred_tokens_is_followed_within_a_dozen_reports() -> None:
    learned = overhead()
    for _ in range(12):
        learned.observe(1, 300.0, 2.0)
    assert learned.tokens(1) == pytest.approx(300, abs=10)


def test_one_odd_report_hardly_changes_the_estimate() -> None:
    learned = overhead()
    for _ in range(50):
        learned.observe(1, 31.0, 2.0)
    learned.observe(1, 100_000.0, 2.0)
    assert learned.tokens(1) == pytest.approx(31, abs=6)


def test_a_changed_template_is_followed() -> None:
    learned = overhead()
    for tokens in [31.0] * 500 + [60.0] * 60:
        learned.observe(1, tokens, 2.0)
    assert learned.tokens(1) == pytest.approx(60, abs=2)


def test_a_plain_completion_has_a_constant_overhead_and_is_not_learned_from() -> None:
    learned = overhead()
    before = learned.state()
    learned.observe(0, 500.0, 0.0)
    assert (learned.tokens(0), learned.deviation(0)) == (1.0, 0.0)
    assert learned.state() == before


@given(OBSERVATIONS)
def test_whatever_is_observed_the_overhead_stays_a_number_of_tokens(
    observations: list[tuple[int, float, float]],
) -> None:
    learned, copy = overhead(), overhead()
    for messages, tokens, deviation in observations:
        learned.observe(messages, tokens, deviation)
        for count in (0, 1, 2, 50):
            assert 0 <= learned.tokens(count) < math.inf
            assert 0 <= learned.deviation(count) < math.inf
    copy.restore(learned.state())
    assert copy.state() == learned.state()


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


def test_the_filter_is_a_kalman_filter_of_two_unknowns_with_drift_and_bounds() -> None:
    """Against matrices: the same state and uncertainty after every observation."""
    learned, rng = overhead(), random.Random(7)
    mean, prior, drift = np.array([16.0, 5.0]), np.diag([256.0, 4.0]), np.array([0.01, 0.0005])
    doubt = prior.copy()
    outliers = 0
    for step in range(60):
        messages, error = rng.choice((1, 2, 5, 9)), rng.uniform(0.5, 6.0)
        tokens = 30 + 6.0 * messages + rng.gauss(0, error) + (400 if step in (20, 45) else 0)
        seen_by = np.array([1.0, messages])
        variance = seen_by @ doubt @ seen_by + error**2 + 1
        gain, surprise = doubt @ seen_by / variance, tokens - seen_by @ mean
        limit = 4 * math.sqrt(variance)
        mean = mean + gain * min(max(surprise, -limit), limit)
        if abs(surprise) <= limit:
            doubt = doubt - np.outer(gain, gain) * variance + np.diag(drift)
        else:
            doubt, outliers = doubt * 4, outliers + 1
        kept = np.clip(np.diag(doubt), drift, np.diag(prior))
        bound = math.sqrt(kept[0] * kept[1])
        shared = min(max(doubt[0, 1], -bound), bound)
        doubt = np.array([[kept[0], shared], [shared, kept[1]]])

        learned.observe(messages, tokens, error)

        assert (learned.per_request, learned.per_message) == pytest.approx(tuple(mean)), step
        for count in (1, 3, 40):
            unit = np.array([1.0, count])
            assert learned.deviation(count) == pytest.approx(math.sqrt(unit @ doubt @ unit)), step
    assert outliers >= 2
    assert learned.deviation(0) == 0.0


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
