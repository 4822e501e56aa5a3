from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.routing.estimation.output_length import OutputEstimate
from serve_app.core.routing.pools import PoolRouter, RoutingSettings, least_budget_tokens
from serve_app.request import PromptShape, Request
from tests.builders import request

LIMITS = {"short": 1_000, "long": 4_000}


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


def router(limits: dict[str, int] | None = None, **changes: object) -> PoolRouter:
    known = LIMITS if limits is None else limits
    return PoolRouter(RoutingSettings(b_short_tokens=600, **changes), known.get)  # type: ignore[arg-type]


def test_a_budget_up_to_b_short_is_at_home_in_the_short_pool_and_spills_to_the_long_one() -> None:
    assert router().route(estimated_request(), estimate(500)) == ("short", "long")
    assert router().route(estimated_request(), estimate(501)) == ("long", "short")


def test_a_budget_up_to_the_context_of_a_pool_may_spill_into_it() -> None:
    assert router().route(estimated_request(), estimate(900)) == ("long", "short")
    assert router().route(estimated_request(), estimate(901)) == ("long",)


def test_without_spill_only_the_home_pool_may_serve_a_request() -> None:
    assert router(spill=False).route(estimated_request(), estimate(100)) == ("short",)


def test_after_a_rejection_only_pools_with_a_longer_context_remain() -> None:
    assert router().route(estimated_request(), estimate(100), above_tokens=1_000) == ("long",)
    assert router().route(estimated_request(), estimate(100), above_tokens=4_000) == ()


def test_an_upper_estimate_above_every_limit_still_tries_the_longest_pool() -> None:
    wanted = estimated_request()
    assert router().route(wanted, estimate(5_000, least=3_999)) == ("long",)
    assert router().route(wanted, estimate(5_000, least=4_000)) == ()


def test_max_tokens_above_every_limit_is_rejected_as_vllm_does() -> None:
    assert least_budget_tokens(estimated_request(4_001), estimate(10)) == 4_001
    assert router().route(estimated_request(4_001), estimate(10, 4_001)) == ()
    assert router().route(estimated_request(4_000), estimate(10, 4_000)) == ("long",)


def test_a_pool_without_replicas_may_be_a_home_but_no_request_spills_into_it() -> None:
    assert router({"long": 4_000}).route(estimated_request(), estimate(100)) == ("short", "long")
    assert router({"short": 1_000}).route(estimated_request(), estimate(700)) == ("long", "short")
    assert router({"short": 1_000}).route(estimated_request(), estimate(100)) == ("short",)
    assert router({}).longest_context() is None


def test_a_request_without_max_tokens_needs_one_token_beside_its_prompt() -> None:
    assert least_budget_tokens(estimated_request(None), estimate(10)) == 11
    assert least_budget_tokens(estimated_request(1), estimate(10)) == 11
    assert least_budget_tokens(estimated_request(0), estimate(10)) == 10
