import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.routing.estimation.overhead import MediaTokens, OverheadSettings, TemplateOverhead

OBSERVATIONS = st.lists(
    st.tuples(st.integers(-1, 300), st.floats(-1e6, 1e6), st.floats(0, 1e6)),
    max_size=40,
)


def overhead() -> TemplateOverhead:
    return TemplateOverhead(OverheadSettings())


def test_one_exact_observation_moves_both_unknowns_by_their_share_of_the_doubt() -> None:
    """Prior 16 +- 16 and 5 +- 2, one message seen to cost 30: gain 256 and 4 of 256 + 4 + 1, surprise 9."""
    learned = overhead()
    learned.observe(1, 30.0, 0.0)
    assert learned.per_request == pytest.approx(16 + 9 * 256 / 261)
    assert learned.per_message == pytest.approx(5 + 9 * 4 / 261)


def test_chats_of_different_lengths_tell_the_two_unknowns_apart() -> None:
    learned, rng = overhead(), random.Random(1)
    for _ in range(100):
        messages = rng.choice((1, 2, 3, 7))
        learned.observe(messages, 23 + 4 * messages + rng.uniform(-1, 1), 2.0)
    assert learned.per_request == pytest.approx(23, abs=1.5)
    assert learned.per_message == pytest.approx(4, abs=0.4)


def test_chats_of_one_message_teach_the_sum() -> None:
    learned = overhead()
    for _ in range(50):
        learned.observe(1, 31.0, 2.0)
    assert learned.tokens(1) == pytest.approx(31, abs=0.5)


def test_a_long_prompt_teaches_next_to_nothing() -> None:
    learned = overhead()
    learned.observe(1, 300.0, 2000.0)
    assert learned.tokens(1) == pytest.approx(21, abs=0.1)


def test_a_system_prompt_of_three_hundred_tokens_is_followed_within_a_dozen_reports() -> None:
    learned = overhead()
    for _ in range(12):
        learned.observe(1, 300.0, 2.0)
    assert learned.tokens(1) == pytest.approx(300, abs=10)


def test_one_odd_report_hardly_moves_what_is_known() -> None:
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


def test_a_plain_completion_costs_the_settings_constant_and_teaches_nothing() -> None:
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
    learned = MediaTokens(OverheadSettings())
    for items, tokens in observations:
        learned.observe(items, tokens)
    return learned


def test_the_mean_of_media_is_plain_while_it_warms_up_and_then_follows() -> None:
    """1,024 counts as one observation: (1024 + 576) / 2, then (1024 + 576 + 576) / 3."""
    assert media([(1, 576.0)]).mean == pytest.approx(800.0)
    assert media([(1, 576.0), (2, 1152.0)]).mean == pytest.approx((1024 + 576 + 576) / 3)
    assert media([(1, 576.0)] * 200).mean == pytest.approx(576.0, rel=0.01)
    assert media([(1, 576.0)] * 200 + [(1, 3000.0)] * 60).mean == pytest.approx(3000.0, rel=0.05)


def test_one_absurd_report_of_media_is_believed_only_up_to_a_limit() -> None:
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
