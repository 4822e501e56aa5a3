"""Token estimates of requests, prompts and media."""

import json
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.core.routing.estimation.byte_classes import CLASSES, measure_text
from serve_app.core.routing.estimation.estimate import (
    EstimatorSettings,
    MediaTokens,
    PromptLength,
    PromptLengthState,
    TokenEstimator,
)
from serve_app.core.routing.snapshot import decoded, encoded
from serve_app.request import PromptShape, Request, TextCategory, Usage
from tests.core.routing.prompts import CHINESE, CODE, GERMAN, KOREAN, PROSE, RUSSIAN, request

REQUESTS = st.builds(
    request,
    max_output_tokens=st.none() | st.integers(0, 10**7),
    tenant=st.sampled_from(["a", "b"]),
    choices=st.integers(1, 8),
    text_bytes=st.integers(0, 10**8),
    category=st.sampled_from(TextCategory),
    messages=st.integers(0, 500),
    tool_bytes=st.integers(0, 10**6),
    media_items=st.integers(0, 20),
    prompt_tokens=st.none() | st.integers(0, 10**6),
    prompts=st.integers(1, 100),
)
USAGES = st.builds(Usage, prompt_tokens=st.integers(-5, 10**8), output_tokens=st.integers(-5, 10**7))
HISTORY = st.lists(st.tuples(REQUESTS, USAGES), max_size=30)


def estimator(**ratio: Any) -> TokenEstimator:
    return TokenEstimator(EstimatorSettings(**ratio))


def trained_estimator(history: list[tuple[Request, Usage]], **ratio: Any) -> TokenEstimator:
    learned = estimator(**ratio)
    for asked, usage in history:
        learned.observe(asked, usage)
    return learned


def test_the_budget_is_the_upper_estimate_and_the_clients_limit() -> None:
    estimate = estimator().estimate(request(text_bytes=3900, max_output_tokens=100))
    assert estimate.least_prompt_tokens < estimate.expected_prompt_tokens < estimate.prompt_tokens
    assert estimate.budget_tokens == estimate.prompt_tokens + 100


def test_an_exact_prompt_length_needs_no_ratio() -> None:
    estimate = estimator().estimate(request(text_bytes=999_999, prompt_tokens=1234))
    lengths = (estimate.prompt_tokens, estimate.expected_prompt_tokens, estimate.least_prompt_tokens)
    assert lengths == (1234, 1234, 1234)


def test_embeddings_generate_nothing() -> None:
    estimate = estimator().estimate(request(max_output_tokens=0))
    assert (estimate.max_output_tokens, estimate.expected_output_tokens) == (0, 0)
    assert estimate.budget_tokens == estimate.prompt_tokens


def test_choices_take_kv_cache_together_but_a_context_each() -> None:
    one, four = (estimator().estimate(request(max_output_tokens=64, choices=n)) for n in (1, 4))
    assert four.budget_tokens == one.budget_tokens
    assert four.expected_output_tokens == pytest.approx(4 * one.expected_output_tokens, abs=4)


def test_a_batch_is_checked_by_its_longest_prompt_and_charged_by_its_sum() -> None:
    one = estimator().estimate(request(text_bytes=4000, max_output_tokens=0))
    batch = estimator().estimate(request(text_bytes=400_000, prompts=100, max_output_tokens=0))
    assert batch.prompt_tokens == pytest.approx(2 * one.prompt_tokens, rel=0.01)
    assert batch.least_prompt_tokens == pytest.approx(one.least_prompt_tokens, rel=0.01)
    assert batch.expected_prompt_tokens == pytest.approx(100 * one.expected_prompt_tokens, rel=0.01)


def test_media_items_cost_the_settings_constant_at_first_and_affect_no_ratio() -> None:
    learned = estimator()
    bare = learned.estimate(request(text_bytes=400, messages=1))
    with_image = learned.estimate(request(text_bytes=400, messages=1, media_items=2))
    assert with_image.expected_prompt_tokens - bare.expected_prompt_tokens == 2048
    before = learned.state().text
    learned.observe(request(text_bytes=4000, media_items=1), Usage(prompt_tokens=9000, output_tokens=1))
    assert learned.state().text == before


def with_images(count: int, text_bytes: int, tokens_each: int) -> tuple[Request, Usage]:
    """Return a chat about images with the cold start's ratio and template."""
    asked = request(text_bytes=text_bytes, messages=1, media_items=count)
    tokens = round(text_bytes / 4.2 + 21 + count * tokens_each)
    return asked, Usage(prompt_tokens=tokens, output_tokens=9)


def test_image_tokens_are_not_learned_from_prompts_that_are_mostly_text() -> None:
    learned = estimator()
    before = learned.state().media
    learned.observe(*with_images(1, 40_000, 9_000))
    assert learned.state().media == before
    learned.observe(*with_images(1, 200, 9_000))
    assert learned.state().media != before


@pytest.mark.parametrize("tokens_each", [85, 576, 9_000])
def test_the_tokens_of_images_are_learned_from_prompts_that_are_mostly_images(tokens_each: int) -> None:
    learned = trained_estimator([with_images(1 + index % 3, 200, tokens_each) for index in range(60)])
    asked, usage = with_images(2, 200, tokens_each)
    estimate = learned.estimate(asked)
    assert estimate.expected_prompt_tokens == pytest.approx(usage.prompt_tokens, rel=0.1, abs=30)
    assert estimate.prompt_tokens >= usage.prompt_tokens


def test_images_of_all_sizes_are_covered_by_the_careful_estimate() -> None:
    rng = random.Random(5)
    sizes = [int(math.exp(rng.uniform(5, 9))) for _ in range(300)]
    learned = trained_estimator([with_images(1, 100, size) for size in sizes[:100]])
    judged = [
        (learned.estimate(asked), usage) for asked, usage in (with_images(1, 100, s) for s in sizes[100:])
    ]
    assert sum(estimate.prompt_tokens < usage.prompt_tokens for estimate, usage in judged) < 0.35 * len(
        judged
    )
    expected = sum(estimate.expected_prompt_tokens for estimate, _ in judged)
    assert expected == pytest.approx(sum(usage.prompt_tokens for _, usage in judged), rel=0.25)


def test_short_chats_do_not_bias_the_ratio_of_long_ones() -> None:
    learned = estimator()
    for _ in range(500):
        asked = request(text_bytes=30, messages=1)
        learned.observe(asked, Usage(prompt_tokens=7 + 28, output_tokens=5))
    estimate = learned.estimate(request(text_bytes=30_000, messages=1))
    assert estimate.expected_prompt_tokens == pytest.approx(30_000 / 4.3, rel=0.2)


def test_tools_are_learned_where_they_are_the_bulk_of_the_prompt() -> None:
    learned = estimator()
    asked = request(text_bytes=80, messages=1, tool_bytes=9000)
    for _ in range(50):
        learned.observe(asked, Usage(prompt_tokens=2000 + 20 + 21, output_tokens=5))
    assert learned.estimate(asked).expected_prompt_tokens == pytest.approx(2041, rel=0.03)


@given(HISTORY, REQUESTS)
def test_estimates_are_ordered_whatever_was_observed(
    history: list[tuple[Request, Usage]], asked: Request
) -> None:
    estimate = trained_estimator(history).estimate(asked)
    prompts = asked.shape.prompts
    assert 0 <= estimate.least_prompt_tokens <= estimate.prompt_tokens
    assert estimate.prompt_tokens * prompts >= estimate.expected_prompt_tokens
    assert estimate.least_prompt_tokens * prompts <= max(estimate.expected_prompt_tokens + prompts, prompts)
    assert 0 <= estimate.expected_output_tokens <= asked.spec.choices * estimate.max_output_tokens
    assert estimate.expected_tokens == estimate.expected_prompt_tokens + estimate.expected_output_tokens


@given(HISTORY, st.integers(0, 10**7), st.integers(0, 10**7), st.sampled_from(TextCategory))
def test_more_bytes_never_mean_fewer_tokens(
    history: list[tuple[Request, Usage]], one: int, other: int, category: TextCategory
) -> None:
    learned = trained_estimator(history)
    less, more = (
        learned.estimate(request(text_bytes=size, category=category)) for size in sorted((one, other))
    )
    assert less.prompt_tokens <= more.prompt_tokens
    assert less.expected_prompt_tokens <= more.expected_prompt_tokens
    assert less.least_prompt_tokens <= more.least_prompt_tokens


# -- prompt lengths ---------------------------------------------------------------------------------------

SHAPES = st.builds(
    PromptShape,
    text_bytes=st.integers(0, 10**8),
    category=st.sampled_from(TextCategory),
    messages=st.integers(0, 500),
    tool_bytes=st.integers(0, 10**6),
    prompts=st.integers(1, 100),
    byte_classes=st.just(()) | st.tuples(*[st.integers(0, 10**6)] * CLASSES),
)
SHAPE_HISTORY = st.lists(st.tuples(SHAPES, st.floats(-5, 1e9) | st.just(math.nan)), max_size=40)


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
    covariance = np.array(made.state().covariance).reshape(len(mean), len(mean))
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


@given(SHAPE_HISTORY, SHAPES)
@example([(PromptShape(text_bytes=0, messages=1), 28.0)], PromptShape(text_bytes=0, messages=1))
def test_whatever_is_observed_estimates_are_ordered_and_restored(
    history: list[tuple[PromptShape, float]], asked: PromptShape
) -> None:
    made, copy = learned(), learned()
    for size, tokens in history:
        made.observe(size, tokens)
    expected, high, low = made.estimate(asked)
    assert 0 <= low <= expected <= high < math.inf
    copy.restore(decoded(json.loads(json.dumps(encoded(made.state()))), PromptLengthState))
    assert copy.state() == made.state()
    assert copy.estimate(asked) == (expected, high, low)


# -- media tokens -----------------------------------------------------------------------------------------


def media(observations: list[tuple[int, float]]) -> MediaTokens:
    learned = MediaTokens.prior()
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
    learned = media(observations)
    assert 0 <= learned.mean < math.inf
    assert 0 <= learned.deviation < math.inf
    assert decoded(encoded(learned), MediaTokens) == learned


def test_media_items_are_averaged_with_the_error_of_the_forecast() -> None:
    learned = MediaTokens.prior()
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
    assert learned.weight == pytest.approx(20.0)
