import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.routing.estimation.estimate import EstimatorSettings, TokenEstimator
from serve_app.request import Request, TextCategory, Usage
from tests.core.routing.prompts import request

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
    before = learned.state()["text"]
    learned.observe(request(text_bytes=4000, media_items=1), Usage(prompt_tokens=9000, output_tokens=1))
    assert learned.state()["text"] == before


def with_images(count: int, text_bytes: int, tokens_each: int) -> tuple[Request, Usage]:
    """Return a chat about images with the cold start's ratio and template."""
    asked = request(text_bytes=text_bytes, messages=1, media_items=count)
    tokens = round(text_bytes / 4.2 + 21 + count * tokens_each)
    return asked, Usage(prompt_tokens=tokens, output_tokens=9)


def test_image_tokens_are_not_learned_from_prompts_that_are_mostly_text() -> None:
    learned = estimator()
    before = learned.state()["media"]
    learned.observe(*with_images(1, 40_000, 9_000))
    assert learned.state()["media"] == before
    learned.observe(*with_images(1, 200, 9_000))
    assert learned.state()["media"] != before


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
