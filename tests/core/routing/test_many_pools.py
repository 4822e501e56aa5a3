"""Routing over any number of pools."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.routing.pools import PoolRouter, RoutingSettings, least_budget_tokens
from tests.builders import request
from tests.core.routing.test_pools import estimate, estimated_request

TIERS = {"small": 1_000, "middle": 4_000, "large": 16_000}


def router(known: dict[str, int], *pools: str, **changes: object) -> PoolRouter:
    settings = RoutingSettings(
        pools=pools or tuple(TIERS),
        b_short_tokens=600,
        **changes,  # type: ignore[arg-type]
    )
    return PoolRouter(settings, known.get)


def test_home_is_the_smallest_pool_and_spill_prefers_longer_contexts() -> None:
    route = router(TIERS).route
    assert route(estimated_request(), estimate(500)) == ("small", "middle", "large")
    assert route(estimated_request(), estimate(501)) == ("middle", "large", "small")
    assert route(estimated_request(), estimate(901)) == ("middle", "large")
    assert route(estimated_request(), estimate(3_900)) == ("middle", "large")
    assert route(estimated_request(), estimate(3_901)) == ("large",)


def test_a_boundary_may_be_below_what_the_pool_holds() -> None:
    route = router(TIERS, boundaries_tokens=(2_000,)).route
    assert route(estimated_request(), estimate(1_900)) == ("middle", "large")
    assert route(estimated_request(), estimate(1_901)) == ("large", "middle")


def test_a_pool_without_replicas_is_home_where_its_boundary_is_known() -> None:
    left = {"small": 1_000, "large": 16_000}
    stated = router(left, boundaries_tokens=(3_000,)).route
    assert stated(estimated_request(), estimate(2_000)) == ("middle", "large")
    assert router(left).route(estimated_request(), estimate(2_000)) == ("large",)
    assert router({"small": 1_000}).route(estimated_request(), estimate(2_000)) == ("large",)
    assert router({"small": 1_000}, spill=False).route(estimated_request(), estimate(700)) == ("large",)


def test_of_pools_with_the_same_context_the_cheapest_is_home_wherever_it_is_listed() -> None:
    known = {"fast": 4_000, "cheap": 4_000, "large": 16_000}
    route = router(known, *known, costs=(3.0, 1.0, 9.0)).route
    assert route(estimated_request(), estimate(100)) == ("cheap", "fast", "large")
    assert route(estimated_request(), estimate(3_000)) == ("fast", "large", "cheap")
    equal = router(known, *known, costs=(1.0, 1.0, 9.0)).route
    assert equal(estimated_request(), estimate(100)) == ("fast", "cheap", "large")
    other_contexts = router({**known, "fast": 2_000}, *known, costs=(3.0, 1.0, 9.0)).route
    assert other_contexts(estimated_request(), estimate(100)) == ("fast", "cheap", "large")
    not_known = router({"large": 16_000}, *known, costs=(3.0, 1.0, 9.0))
    assert not_known.order() == ("fast", "cheap", "large")


def test_a_rejected_request_goes_to_a_longer_pool() -> None:
    route = router(TIERS).route
    assert route(estimated_request(), estimate(100), above_tokens=1_000) == ("middle", "large")
    assert route(estimated_request(), estimate(100), above_tokens=4_000) == ("large",)
    # A pool before the rejecting one is not longer, even while it has no replica.
    left = router({"large": 16_000}, boundaries_tokens=(4_000,))
    assert left.route(estimated_request(), estimate(100), above_tokens=1_000) == ("large",)
    gone = router({"small": 1_000, "middle": 4_000})
    assert gone.route(estimated_request(), estimate(100), above_tokens=4_000) == ("large",)
    lost_middle = router({"small": 1_000, "large": 16_000}, boundaries_tokens=(4_000,))
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
