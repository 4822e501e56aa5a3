import dataclasses

import pytest

from serve_app.request import PromptShape, Request
from serve_app.routing.estimate import TokenEstimate
from serve_app.routing.pools import PoolRouter, RoutingSettings, least_budget_tokens
from tests.builders import request

LIMITS = {"short": 1_000, "long": 4_000}


def estimate(prompt_tokens: int, output_tokens: int = 100, *, least: int | None = None) -> TokenEstimate:
    return TokenEstimate(
        prompt_tokens=prompt_tokens,
        least_prompt_tokens=prompt_tokens if least is None else least,
        expected_prompt_tokens=prompt_tokens,
        max_output_tokens=output_tokens,
        expected_output_tokens=output_tokens,
    )


def estimated_request(max_output_tokens: int | None = 100) -> Request:
    return dataclasses.replace(request(max_output_tokens=max_output_tokens), shape=PromptShape(text_bytes=1))


def router(limits: dict[str, int] | None = None, **changes: object) -> PoolRouter:
    known = LIMITS if limits is None else limits
    return PoolRouter(RoutingSettings(b_short_tokens=600, **changes), known.get)  # type: ignore[arg-type]


def test_a_budget_up_to_b_short_is_at_home_in_the_short_pool_and_spills_to_the_long_one() -> None:
    assert router().route(estimated_request(), estimate(500)) == ("short", "long")
    assert router().route(estimated_request(), estimate(501)) == ("long", "short")


def test_an_estimate_keeps_a_margin_to_the_short_context_because_vllm_cuts_silently() -> None:
    assert router().route(estimated_request(), estimate(800)) == ("long", "short")
    assert router().route(estimated_request(), estimate(801)) == ("long",)
    assert router(cut_margin_ratio=0.0).route(estimated_request(), estimate(900)) == ("long", "short")


def test_an_exact_length_needs_no_margin() -> None:
    assert router().route(request(prompt_tokens=900), estimate(900)) == ("long", "short")
    assert router().route(request(prompt_tokens=901), estimate(901)) == ("long",)


def test_without_spill_there_is_one_pool_to_go_to() -> None:
    assert router(spill=False).route(estimated_request(), estimate(100)) == ("short",)


def test_after_a_refusal_only_longer_pools_are_left() -> None:
    assert router().route(estimated_request(), estimate(100), above_tokens=1_000) == ("long",)
    assert router().route(estimated_request(), estimate(100), above_tokens=4_000) == ()


def test_a_careful_estimate_above_every_limit_still_tries_the_longest_pool() -> None:
    wanted = estimated_request()
    assert router().route(wanted, estimate(5_000, least=3_999)) == ("long",)
    assert router().route(wanted, estimate(5_000, least=4_000)) == ()


def test_max_tokens_above_every_limit_is_refused_as_vllm_does() -> None:
    assert least_budget_tokens(estimated_request(4_001), estimate(10)) == 4_001
    assert router().route(estimated_request(4_001), estimate(10, 4_001)) == ()
    assert router().route(estimated_request(4_000), estimate(10, 4_000)) == ("long",)


def test_a_pool_without_replicas_may_be_a_home_but_nobody_spills_into_it() -> None:
    assert router({"long": 4_000}).route(estimated_request(), estimate(100)) == ("short", "long")
    assert router({"short": 1_000}).route(estimated_request(), estimate(700)) == ("long", "short")
    assert router({"short": 1_000}).route(estimated_request(), estimate(100)) == ("short",)
    assert router({}).longest_context() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pools": ()}, "one or two pools"),
        ({"pools": ("a", "a")}, "must differ"),
        ({"b_short_tokens": 0}, "b_short_tokens must be at least 1, got 0"),
        ({"cut_margin_ratio": 1.0}, "cut_margin_ratio must be at least 0 and below 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutingSettings(**changes)  # type: ignore[arg-type]
