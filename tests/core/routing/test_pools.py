"""Routing over pools, and the work that arrived for each."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.routing.estimation.estimate import EstimatorSettings, TokenEstimate, TokenEstimator
from serve_app.core.routing.estimation.output_length import OutputEstimate
from serve_app.core.routing.pools import ArrivedWork, PoolRouter, RoutingSettings, least_budget_tokens
from serve_app.request import PriorityClass, PromptShape, Request
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


# -- any number of pools ----------------------------------------------------------------------------------

TIERS = {"small": 1_000, "middle": 4_000, "large": 16_000}


def router_of(known: dict[str, int], *pools: str, **changes: object) -> PoolRouter:
    settings = RoutingSettings(
        pools=pools or tuple(TIERS),
        b_short_tokens=600,
        **changes,  # type: ignore[arg-type]
    )
    return PoolRouter(settings, known.get)


def test_home_is_the_smallest_pool_and_spill_prefers_longer_contexts() -> None:
    route = router_of(TIERS).route
    assert route(estimated_request(), estimate(500)) == ("small", "middle", "large")
    assert route(estimated_request(), estimate(501)) == ("middle", "large", "small")
    assert route(estimated_request(), estimate(901)) == ("middle", "large")
    assert route(estimated_request(), estimate(3_900)) == ("middle", "large")
    assert route(estimated_request(), estimate(3_901)) == ("large",)


def test_a_boundary_may_be_below_what_the_pool_holds() -> None:
    route = router_of(TIERS, boundaries_tokens=(2_000,)).route
    assert route(estimated_request(), estimate(1_900)) == ("middle", "large")
    assert route(estimated_request(), estimate(1_901)) == ("large", "middle")


def test_a_pool_without_replicas_is_home_where_its_boundary_is_known() -> None:
    left = {"small": 1_000, "large": 16_000}
    stated = router_of(left, boundaries_tokens=(3_000,)).route
    assert stated(estimated_request(), estimate(2_000)) == ("middle", "large")
    assert router_of(left).route(estimated_request(), estimate(2_000)) == ("large",)
    assert router_of({"small": 1_000}).route(estimated_request(), estimate(2_000)) == ("large",)
    assert router_of({"small": 1_000}, spill=False).route(estimated_request(), estimate(700)) == ("large",)


def test_of_pools_with_the_same_context_the_cheapest_is_home_wherever_it_is_listed() -> None:
    known = {"fast": 4_000, "cheap": 4_000, "large": 16_000}
    route = router_of(known, *known, costs=(3.0, 1.0, 9.0)).route
    assert route(estimated_request(), estimate(100)) == ("cheap", "fast", "large")
    assert route(estimated_request(), estimate(3_000)) == ("fast", "large", "cheap")
    equal = router_of(known, *known, costs=(1.0, 1.0, 9.0)).route
    assert equal(estimated_request(), estimate(100)) == ("fast", "cheap", "large")
    other_contexts = router_of({**known, "fast": 2_000}, *known, costs=(3.0, 1.0, 9.0)).route
    assert other_contexts(estimated_request(), estimate(100)) == ("fast", "cheap", "large")
    not_known = router_of({"large": 16_000}, *known, costs=(3.0, 1.0, 9.0))
    assert not_known.order() == ("fast", "cheap", "large")


def test_a_rejected_request_goes_to_a_longer_pool() -> None:
    route = router_of(TIERS).route
    assert route(estimated_request(), estimate(100), above_tokens=1_000) == ("middle", "large")
    assert route(estimated_request(), estimate(100), above_tokens=4_000) == ("large",)
    # A pool before the rejecting one is not longer, even while it has no replica.
    left = router_of({"large": 16_000}, boundaries_tokens=(4_000,))
    assert left.route(estimated_request(), estimate(100), above_tokens=1_000) == ("large",)
    gone = router_of({"small": 1_000, "middle": 4_000})
    assert gone.route(estimated_request(), estimate(100), above_tokens=4_000) == ("large",)
    lost_middle = router_of({"small": 1_000, "large": 16_000}, boundaries_tokens=(4_000,))
    assert lost_middle.route(estimated_request(), estimate(2_000), above_tokens=16_000) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pools": ()}, "at least one pool"),
        ({"pools": ("a", "a")}, "must differ"),
        ({"pools": ("a", "b", "c"), "boundaries_tokens": (1, 2)}, "got 2 for 3 pools"),
        ({"pools": ("a", "b", "c"), "boundaries_tokens": (8_000,)}, r"must increase.*\[8192, 8000\]"),
        ({"costs": (1.0,)}, "one positive value for each pool"),
        ({"costs": (1.0, 0.0)}, "one positive value for each pool"),
    ],
)
def test_incompatible_settings_are_rejected(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutingSettings(**changes)  # type: ignore[arg-type]


contexts = st.lists(st.sampled_from([500, 1_000, 1_000, 4_000, 16_000]), min_size=1, max_size=6).map(sorted)


@given(
    contexts=contexts,
    has_replicas=st.lists(st.booleans(), min_size=6, max_size=6),
    costs=st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=6, max_size=6),
    prompt_tokens=st.integers(1, 20_000),
    output_tokens=st.sampled_from([1, 100, 2_000]),
    above_tokens=st.sampled_from([0, 0, 0, 500, 1_000, 4_000]),
    is_exact=st.booleans(),
    spill=st.booleans(),
)
def test_the_rule_holds_for_any_pools(
    contexts: list[int],
    has_replicas: list[bool],
    costs: list[float],
    prompt_tokens: int,
    output_tokens: int,
    above_tokens: int,
    is_exact: bool,
    spill: bool,
) -> None:
    pools = tuple(f"p{place}" for place in range(len(contexts)))
    known = {pool: limit for pool, limit, has in zip(pools, contexts, has_replicas, strict=False) if has}
    cost_of = dict(zip(pools, costs, strict=False))
    settings = RoutingSettings(
        pools=pools, b_short_tokens=contexts[0], costs=tuple(cost_of.values()), spill=spill
    )
    routed = PoolRouter(settings, known.get)
    wanted = request(prompt_tokens=prompt_tokens) if is_exact else estimated_request(output_tokens)
    upper = estimate(prompt_tokens, output_tokens)
    preference = routed.route(wanted, upper, above_tokens=above_tokens)
    order = routed.order()

    def fits(pool: str) -> bool:
        limit = known.get(pool)
        return limit is not None and limit > above_tokens and upper.budget_tokens <= limit

    assert_ordered(order, known, cost_of)
    fitting = [pool for pool in order if fits(pool)]
    spills, home = preference[1:], preference[:1]
    # Spill only into pools that fit, once each.
    assert set(spills) <= set(fitting)
    assert len(set(preference)) == len(preference)
    # It goes somewhere if any pool fits; otherwise only to the last resort or a home without replicas.
    if fitting:
        assert preference
        assert not spill or set(fitting) <= set(preference)
    for pool in home:
        is_last_resort = pool == order[-1] and least_budget_tokens(wanted, upper) <= known.get(pool, 0)
        assert fits(pool) or pool not in known or (is_last_resort and not fitting)
    # Where every pool has replicas, the smallest that fits is home.
    if len(known) == len(pools) and fitting:
        assert home == (fitting[0],)
        assert preference == (tuple(fitting) if spill else home)


def assert_ordered(order: tuple[str, ...], known: dict[str, int], cost_of: dict[str, float]) -> None:
    """Check the order: by context, then by cost."""
    for before, after in pairwise(order):
        if before in known and after in known:
            assert (known[before], cost_of[before]) <= (known[after], cost_of[after])


# -- two pools under the rule for any number: routed exactly as by the rule for two -----------------------

B_SHORT = 600
tokens = st.sampled_from(
    [0, 1, 99, 499, 500, 501, 800, 801, 899, 900, 901, 3_500, 3_501, 3_900, 3_901, 5_000]
)
limits = st.sampled_from([None, 500, 1_000, 1_000, 4_000])


def as_two_pools_were_routed(
    known: Mapping[str, int | None],
    wanted: Request,
    upper: TokenEstimate,
    above_tokens: int,
    *,
    spill: bool,
    b_short_tokens: int = B_SHORT,
) -> tuple[str, ...]:
    """Route by the rule for exactly two pools."""
    budget = upper.budget_tokens
    holds: list[str] = []
    for pool in ("short", "long") if budget <= b_short_tokens else ("long", "short"):
        limit = known[pool]
        if limit is None:
            if not holds and not (above_tokens and pool == "short"):
                holds.append(pool)
        elif budget <= limit and limit > above_tokens:
            holds.append(pool)
    if holds:
        return tuple(holds) if spill else (holds[0],)
    longest = known["long"]
    if longest is None or longest <= above_tokens or least_budget_tokens(wanted, upper) > longest:
        return ()
    return ("long",)


@given(
    short=limits,
    long=limits,
    prompt_tokens=tokens,
    least=tokens,
    output_tokens=st.sampled_from([0, 1, 100, 4_001]),
    above_tokens=st.sampled_from([0, 0, 500, 1_000, 4_000]),
    is_exact=st.booleans(),
    spill=st.booleans(),
)
def test_two_pools_are_routed_as_by_the_two_pool_rule(
    short: int | None,
    long: int | None,
    prompt_tokens: int,
    least: int,
    output_tokens: int,
    above_tokens: int,
    is_exact: bool,
    spill: bool,
) -> None:
    known = {"short": short, "long": long}
    wanted = request(prompt_tokens=prompt_tokens) if is_exact else estimated_request(output_tokens)
    upper = estimate(prompt_tokens, output_tokens, least=min(least, prompt_tokens))
    router = PoolRouter(RoutingSettings(b_short_tokens=B_SHORT, spill=spill), known.get)
    assert router.route(wanted, upper, above_tokens=above_tokens) == as_two_pools_were_routed(
        known, wanted, upper, above_tokens, spill=spill
    )


# -- arrived work -----------------------------------------------------------------------------------------

ESTIMATOR = TokenEstimator(EstimatorSettings())


def test_work_is_counted_at_home_without_what_is_cached_and_without_batch() -> None:
    arrived = ArrivedWork(("short", "long"))
    one = request(prompt_tokens=100, max_output_tokens=7)
    estimate = ESTIMATOR.estimate(one)
    arrived.add(("short", "long"), one, estimate, cached_tokens=60)
    arrived.add(("short",), request(priority=PriorityClass.BATCH), estimate)
    arrived.add((), one, estimate)
    counted = arrived["short"]
    assert (counted.requests, counted.prefill_tokens) == (1, 40)
    assert counted.output_tokens == estimate.expected_output_tokens
    assert arrived["long"].requests == 0
