import json
import math
import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.core.routing.estimation.byte_classes import CLASSES, measure_text
from serve_app.core.routing.estimation.estimate import EstimatorSettings, PromptLength
from serve_app.request import PromptShape, TextCategory
from tests.core.routing.prompts import CHINESE, CODE, GERMAN, KOREAN, PROSE, RUSSIAN

SHAPES = st.builds(
    PromptShape,
    text_bytes=st.integers(0, 10**8),
    category=st.sampled_from(TextCategory),
    messages=st.integers(0, 500),
    tool_bytes=st.integers(0, 10**6),
    prompts=st.integers(1, 100),
    byte_classes=st.just(()) | st.tuples(*[st.integers(0, 10**6)] * CLASSES),
)
HISTORY = st.lists(st.tuples(SHAPES, st.floats(-5, 1e9) | st.just(math.nan)), max_size=40)


def shape(text: bytes, times: float = 1, **changes: int) -> PromptShape:
    text = text * math.ceil(times)
    text = text[: round(len(text) * times / math.ceil(times))]
    byte_classes, category = measure_text(text)
    return PromptShape(text_bytes=len(text), category=category, byte_classes=byte_classes, **changes)


def learned(margin_deviations: float = 1.0) -> PromptLength:
    return PromptLength(EstimatorSettings(margin_deviations=margin_deviations))


def test_english_has_four_to_five_bytes_per_token_before_the_first_observation() -> None:
    assert 4.0 < learned().bytes_per_token(shape(PROSE)) < 5.0
    assert 4.0 < learned().bytes_per_token(PromptShape(text_bytes=4_000)) < 5.0
    for text in (CODE, CHINESE, KOREAN, GERMAN):
        assert 2.0 < learned().bytes_per_token(shape(text)) < 4.5
    # Two bytes a letter.
    assert 4.0 < learned().bytes_per_token(shape(RUSSIAN)) < 5.5


def test_the_first_observation_is_a_step_of_recursive_least_squares() -> None:
    made, asked = learned(), shape(PROSE, 20, messages=3, tool_bytes=500)
    mean = made.weights.copy()
    covariance = np.array(made.state()["covariance"]).reshape(len(mean), len(mean))
    sizes = np.array([*asked.byte_classes, 500, 1, 3], float)
    expected = float(sizes @ mean)
    text = expected - mean[-2] - 3 * mean[-1]
    variance = sizes @ covariance @ sizes + (0.06 * text) ** 2 + 1
    made.observe(asked, 1.05 * expected)
    assert made.weights == pytest.approx(mean + covariance @ sizes * 0.05 * expected / variance)


def test_scripts_are_learned_apart_and_from_few_observations() -> None:
    made = learned()
    before = made.bytes_per_token(shape(CHINESE))
    russian = shape(RUSSIAN, 20)
    for _ in range(3):
        made.observe(russian, russian.text_bytes / 4.0)
    assert made.bytes_per_token(russian) == pytest.approx(4.0, rel=0.05)
    assert made.bytes_per_token(shape(CHINESE)) == pytest.approx(before, rel=0.05)
    _, high, _ = made.estimate(russian)
    assert high == pytest.approx(russian.text_bytes / 4.0, rel=0.2)


def test_a_text_of_two_kinds_needs_no_category_of_its_own() -> None:
    made, rng = learned(), random.Random(1)
    for _ in range(60):
        text, bytes_per_token = rng.choice([(PROSE, 4.6), (CHINESE, 3.2)])
        size = shape(text, rng.uniform(2, 30))
        made.observe(size, size.text_bytes / bytes_per_token)
    both = shape(PROSE * 5 + CHINESE * 5)
    true = len(PROSE) * 5 / 4.6 + len(CHINESE) * 5 / 3.2
    assert made.estimate(both)[0] == pytest.approx(true, rel=0.04)


def test_the_margin_shrinks_to_the_error_that_was_measured() -> None:
    def margin(error: float, count: int) -> float:
        made, rng = learned(), random.Random(2)
        for _ in range(count):
            size = shape(PROSE, rng.uniform(5, 40))
            made.observe(size, size.text_bytes / 4.4 * (1 + rng.gauss(0, error)))
        expected, high, _ = made.estimate(shape(PROSE, 20))
        return high / expected - 1

    assert margin(0.1, 0) > 0.15
    assert margin(0.1, 300) == pytest.approx(0.1, abs=0.03)
    assert margin(0.02, 300) == pytest.approx(0.02, abs=0.012)


@pytest.mark.parametrize(("margin_deviations", "share"), [(1.0, 0.25), (1.5, 0.12), (2.0, 0.06)])
def test_the_upper_estimate_covers_more_with_a_wider_margin(margin_deviations: float, share: float) -> None:
    made, rng = learned(margin_deviations), random.Random(4)
    judged = []
    for number in range(600):
        size = shape(PROSE, rng.uniform(5, 40), messages=rng.choice((1, 3)))
        tokens = size.text_bytes / 4.4 * (1 + rng.gauss(0, 0.06)) + 20 + 5 * size.messages
        if number >= 100:
            judged.append((made.estimate(size), tokens))
        made.observe(size, tokens)
    assert sum(high < tokens for (_, high, _), tokens in judged) <= share * len(judged)
    assert all(low <= tokens for (_, _, low), tokens in judged)


def test_no_upper_estimate_exceeds_one_token_per_byte() -> None:
    rare = PromptShape(text_bytes=4_000, byte_classes=(0,) * (CLASSES - 1) + (1_000,))
    digits = shape(b"0123456789" * 100)
    assert learned(50.0).estimate(digits)[1] <= 1_000 + 112
    assert learned(50.0).estimate(rare)[1] == 4_001


def test_a_default_system_prompt_is_learned_within_a_dozen_reports() -> None:
    made = learned()
    asked = shape(PROSE, 0.2, messages=1)
    text = made.estimate(shape(PROSE, 0.2))[0] - 1
    for _ in range(12):
        made.observe(asked, text + 300.0)
    assert made.estimate(asked)[0] == pytest.approx(text + 300, abs=10)


def test_chats_of_different_lengths_separate_template_and_text() -> None:
    made, rng = learned(), random.Random(2)
    for _ in range(150):
        size = shape(PROSE, math.exp(rng.uniform(-2, 4)), messages=rng.choice((1, 3, 5)))
        made.observe(size, size.text_bytes / rng.gauss(4.5, 0.2) + 23 + 5 * size.messages)
    assert made.bytes_per_token(shape(PROSE)) == pytest.approx(4.5, rel=0.03)
    assert made.estimate(PromptShape(text_bytes=0, messages=1))[0] == pytest.approx(28, abs=4)


def test_one_odd_report_hardly_changes_the_estimate() -> None:
    made, asked = learned(), shape(PROSE, 20)
    for _ in range(50):
        made.observe(asked, asked.text_bytes / 4.4)
    made.observe(asked, 1e6)
    made.observe(asked, 1.0)
    assert made.bytes_per_token(asked) == pytest.approx(4.4, rel=0.1)


def test_a_changed_tokenizer_is_followed() -> None:
    made, rng = learned(), random.Random(3)
    for ratio in [4.4] * 300 + [3.0] * 60:
        size = shape(PROSE, rng.uniform(5, 40))
        made.observe(size, size.text_bytes / ratio)
    assert made.bytes_per_token(shape(PROSE)) == pytest.approx(3.0, rel=0.05)


def known(kinds: int = 1) -> tuple[PromptLength, list[PromptShape]]:
    """Return a model that has learned 400 prompts of several kinds in turn, and one prompt of each kind."""
    made = learned()
    shapes = [shape(PROSE, 10, messages=kind + 1) for kind in range(kinds)]
    for number in range(400):
        made.observe(shapes[number % kinds], 1_000.0)
    return made, shapes


def was_learned(made: PromptLength, size: PromptShape, tokens: float) -> bool:
    before = made.weights.copy()
    made.observe(size, tokens)
    return not np.array_equal(before, made.weights)


def test_a_known_length_is_learned_from_every_eighth_prompt() -> None:
    made, (asked,) = known()
    expected = made.estimate(asked)[0]
    assert sum(was_learned(made, asked, expected + 1) for _ in range(800)) == pytest.approx(100, abs=2)
    # Other categories are not known yet.
    assert all(was_learned(made, shape(CHINESE, 10), 900.0 + number % 2) for number in range(100))


def test_traffic_that_repeats_after_eight_prompts_is_sampled_in_all_its_kinds() -> None:
    made, shapes = known(kinds=8)
    sampled = [number % 8 for number in range(800) if was_learned(made, shapes[number % 8], 1_001.0)]
    assert set(sampled) == set(range(8))
    assert max(map(sampled.count, range(8))) <= 2 * min(map(sampled.count, range(8)))


def test_an_outlier_among_known_lengths_is_followed_by_learning_from_all() -> None:
    made, (asked,) = known()
    while not was_learned(made, asked, 2_000.0):
        pass
    expected = made.estimate(asked)[0]
    assert all(was_learned(made, asked, expected + 1) for _ in range(16))
    assert not all(was_learned(made, asked, expected + 1) for _ in range(16))


def test_a_sample_teaches_the_same_error_and_margin_as_all_prompts() -> None:
    def errors(count: int) -> tuple[float, float]:
        made, rng = learned(), random.Random(5)
        under, total = 0, 0.0
        for number in range(count + 400):
            size = shape(PROSE, rng.uniform(5, 40), messages=rng.choice((1, 3)))
            tokens = size.text_bytes / 4.4 * (1 + rng.gauss(0, 0.06)) + 20 + 5 * size.messages
            expected, high, _ = made.estimate(size)
            if number >= count:
                total, under = total + abs(tokens / expected - 1), under + (high < tokens)
            made.observe(size, tokens)
        return total / 400, under / 400

    # The first 200 are learned in full.
    error, under = errors(50)
    sampled_error, sampled_under = errors(4_000)
    assert sampled_error == pytest.approx(error, rel=0.15)
    assert sampled_under == pytest.approx(under, abs=0.06)


@given(HISTORY, SHAPES)
@example([(PromptShape(text_bytes=0, messages=1), 28.0)], PromptShape(text_bytes=0, messages=1))
def test_whatever_is_observed_estimates_are_ordered_and_restored(
    history: list[tuple[PromptShape, float]], asked: PromptShape
) -> None:
    made, copy = learned(), learned()
    for size, tokens in history:
        made.observe(size, tokens)
    expected, high, low = made.estimate(asked)
    assert 0 <= low <= expected <= high < math.inf
    copy.restore(json.loads(json.dumps(made.state())))
    assert copy.state() == made.state()
    assert copy.estimate(asked) == (expected, high, low)
