import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.routing.estimation import output_length
from serve_app.core.routing.estimation.output_length import (
    LengthCurve,
    OutputLengthEstimator,
    OutputState,
    bucket_of,
)
from serve_app.request import TextCategory, Usage
from tests.core.routing.prompts import request

QUARTER_OCTAVE = 2**0.25


def observe(
    learned: OutputLengthEstimator,
    tokens: int,
    times: int = 1,
    *,
    limit: int | None = None,
    tenant: str = "t1",
) -> None:
    for _ in range(times):
        asked = request(max_output_tokens=limit, tenant=tenant)
        learned.observe(asked, Usage(prompt_tokens=10, output_tokens=tokens))


def expected(learned: OutputLengthEstimator, limit: int) -> float:
    return learned.estimate(request(max_output_tokens=limit)).expected


def test_without_a_limit_or_with_an_absurd_one_the_default_holds_until_enough_is_learned() -> None:
    learned = OutputLengthEstimator()
    observe(learned, 100, times=49)
    assert learned.estimate(request(max_output_tokens=None)).limit == 1024
    assert learned.estimate(request(max_output_tokens=1_000_000)).limit == 1024
    observe(learned, 100)
    assert 100 <= learned.estimate(request(max_output_tokens=None)).limit <= 100 * QUARTER_OCTAVE
    assert 100 <= learned.estimate(request(max_output_tokens=1_000_000)).limit <= 100 * QUARTER_OCTAVE


def test_the_quantile_and_the_mean_of_a_known_distribution_are_found() -> None:
    learned, rng = OutputLengthEstimator(), random.Random(5)
    for _ in range(5000):
        observe(learned, max(1, round(rng.expovariate(1 / 200))))
    assert learned.estimate(request(max_output_tokens=None)).limit == pytest.approx(
        200 * math.log(100), rel=0.3
    )
    assert expected(learned, 100) == pytest.approx(200 * (1 - math.exp(-0.5)), rel=0.1)
    assert expected(learned, 8000) == pytest.approx(200, rel=0.1)


def test_answers_cut_off_at_their_limit_do_not_lower_the_learned_length() -> None:
    """Exponential lengths of mean 400, cut at 200 in half of the requests: the mean stays that of all."""
    learned, rng = OutputLengthEstimator(), random.Random(6)
    for index in range(5000):
        length = max(1, round(rng.expovariate(1 / 400)))
        limit = 200 if index % 2 else None
        observe(learned, min(length, limit or length), limit=limit)
    assert expected(learned, 16_000) == pytest.approx(400, rel=0.15)


def test_where_every_answer_runs_to_its_limit_the_limit_is_expected() -> None:
    learned = OutputLengthEstimator()
    observe(learned, 5, times=50)
    observe(learned, 500, times=2000, limit=500)
    assert expected(learned, 500) == pytest.approx(500, rel=0.02)


def test_a_generous_limit_is_not_expected_to_be_used() -> None:
    learned = OutputLengthEstimator()
    observe(learned, 200, times=100, limit=4096)
    assert expected(learned, 4096) == pytest.approx(200, rel=0.15)


def test_too_few_natural_ends_to_see_the_quantile_fall_back_to_the_longer_default() -> None:
    learned = OutputLengthEstimator()
    observe(learned, 5, times=50)
    observe(learned, 50, times=300, limit=50)
    assert learned.estimate(request(max_output_tokens=None)).limit == 1024


def test_before_anything_is_learned_the_expected_length_grows_with_the_limit_up_to_the_prior_mean() -> None:
    learned = OutputLengthEstimator()
    assert expected(learned, 0) == 0
    assert expected(learned, 256) == pytest.approx(256 * (1 - math.exp(-1)))
    assert expected(learned, 60_000) == pytest.approx(256)


def test_choices_count_as_answers_of_their_mean_length() -> None:
    learned = OutputLengthEstimator()
    asked = request(max_output_tokens=None, choices=4)
    for _ in range(50):
        learned.observe(asked, Usage(prompt_tokens=10, output_tokens=400))
    assert expected(learned, 10_000) == pytest.approx(100, rel=0.15)


def test_a_new_tenant_uses_its_category_until_it_has_enough_observations() -> None:
    learned = OutputLengthEstimator()
    observe(learned, 1000, times=200, tenant="writer")
    observe(learned, 4, times=50, tenant="classifier")
    assert learned.estimate(request(max_output_tokens=None, tenant="classifier")).limit <= 5
    assert learned.estimate(request(max_output_tokens=None, tenant="stranger")).limit >= 1000


def test_categories_are_separate() -> None:
    learned = OutputLengthEstimator()
    observe(learned, 1000, times=100)
    asked = request(max_output_tokens=None, category=TextCategory.CODE)
    assert learned.estimate(asked).limit == 1024


def test_new_lengths_replace_old_ones() -> None:
    learned = OutputLengthEstimator()
    observe(learned, 1000, times=100)
    observe(learned, 10, times=3000)
    assert learned.estimate(request(max_output_tokens=None)).limit <= 12


def test_the_least_recently_seen_tenant_is_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_length, "_MAX_TENANTS", 2)
    learned = OutputLengthEstimator()
    for tenant in ("a", "b", "a", "c"):
        observe(learned, 10, tenant=tenant)
    assert [each.tenant for each in learned.state().tenants] == ["a", "c"]


def test_embeddings_and_answers_of_no_tokens_are_not_learned_from() -> None:
    learned = OutputLengthEstimator()
    observe(learned, 5, limit=0)
    observe(learned, 0)
    assert learned.state() == OutputState({}, [])
    assert learned.estimate(request(max_output_tokens=0)).limit == 0


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.booleans()), max_size=80),
    st.integers(0, 10**7),
    st.integers(0, 10**7),
)
def test_the_expected_length_never_exceeds_the_limit_and_grows_with_it(
    answers: list[tuple[float, bool]], one: int, other: int
) -> None:
    curve = LengthCurve()
    for tokens, was_cut in answers:
        curve.observe(bucket_of(tokens), was_cut=was_cut)
    low, high = sorted((one, other))
    assert 0 <= curve.expected(low) <= low * (1 + 1e-9)
    assert curve.expected(low) <= curve.expected(high) * (1 + 1e-9)
    assert 1 <= curve.quantile() <= 65_536


def test_weights_that_are_scaled_down_in_time_change_no_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled, whole = LengthCurve(), LengthCurve()
    # The weight of the next observation exceeds 1.1 every 96 observations.
    for number in range(400):
        tokens, was_cut = 10.0 + number * 7 % 900, number % 3 == 0
        monkeypatch.setattr(output_length, "_MAX_SCALE", 1.1)
        scaled.observe(bucket_of(tokens), was_cut=was_cut)
        monkeypatch.setattr(output_length, "_MAX_SCALE", 1e12)
        whole.observe(bucket_of(tokens), was_cut=was_cut)
    assert scaled.state().scale != whole.state().scale
    assert scaled.quantile() == whole.quantile()
    assert [scaled.expected(limit) for limit in (50, 200, 800)] == pytest.approx(
        [whole.expected(limit) for limit in (50, 200, 800)]
    )


@pytest.mark.parametrize("lengths", [(), (100, 400)])
def test_the_rest_of_an_answer_ends_where_the_whole_one_does(lengths: tuple[int, ...]) -> None:
    learned = OutputLengthEstimator()
    for tokens in lengths:
        observe(learned, tokens, times=100, limit=500)
    whole = learned.estimate(request(max_output_tokens=500))
    rest = whole.after(150).after(50)
    assert (rest.limit, rest.longest) == (300, 300.0)
    for age in (0.0, 60.0):
        assert rest.ends(age) == pytest.approx([end - 200 for end in whole.ends(200 + age)])
    assert 0 < rest.expected <= 300
    if lengths:
        # Answers of 100 tokens have ended.
        assert rest.expected > whole.expected - 150
    assert whole.after(10_000).expected == 1.0
