"""Routing of estimates near the limits. The rule itself: `test_many_pools` and `test_two_pools`."""

import pytest

from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.routing.estimation.output_length import OutputEstimate
from serve_app.core.routing.pools import PoolRouter, RoutingSettings, least_budget_tokens
from serve_app.request import PromptShape, Request
from tests.builders import request


def estimate(prompt_tokens: int, output_tokens: int = 100, *, least: int | None = None) -> TokenEstimate:
    return TokenEstimate(
        prompt_tokens=prompt_tokens,
        least_prompt_tokens=prompt_tokens if least is None else least,
        expected_prompt_tokens=prompt_tokens,
        max_output_tokens=output_tokens,
        least_output_tokens=output_tokens,
        expected_output_tokens=output_tokens,
        output=OutputEstimate(output_tokens, output_tokens, output_tokens),
    )


def estimated_request(max_output_tokens: int | None = 100) -> Request:
    return request(max_output_tokens=max_output_tokens, shape=PromptShape(text_bytes=1))


@pytest.fixture
def router() -> PoolRouter:
    return PoolRouter(RoutingSettings(b_short_tokens=600), {"short": 1_000, "long": 4_000}.get)


def test_an_upper_estimate_above_every_limit_still_tries_the_longest_pool(router: PoolRouter) -> None:
    wanted = estimated_request()
    assert router.route(wanted, estimate(5_000, least=3_999)) == ("long",)
    assert router.route(wanted, estimate(5_000, least=4_000)) == ()


def test_max_tokens_above_every_limit_is_rejected_as_vllm_does(router: PoolRouter) -> None:
    assert least_budget_tokens(estimated_request(4_001), estimate(10)) == 4_001
    assert router.route(estimated_request(4_001), estimate(10, 4_001)) == ()
    assert router.route(estimated_request(4_000), estimate(10, 4_000)) == ("long",)


def test_a_request_without_max_tokens_needs_one_token_beside_its_prompt() -> None:
    assert least_budget_tokens(estimated_request(None), estimate(10)) == 11
    assert least_budget_tokens(estimated_request(1), estimate(10)) == 11
    assert least_budget_tokens(estimated_request(0), estimate(10)) == 10
