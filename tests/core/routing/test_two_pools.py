"""Two pools under the rule for any number of pools: routed exactly as by the rule for two."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.routing.pools import PoolRouter, RoutingSettings, least_budget_tokens
from serve_app.request import Request
from tests.builders import request
from tests.core.routing.test_pools import estimate, estimated_request

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
