"""The work ahead of a request, from sums, beside the formula itself."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.scheduling.queueing.fair_work import FairWork

Tenant = tuple[int, int, float]

tenants = st.dictionaries(
    st.sampled_from([f"t{number}" for number in range(12)]),
    st.lists(st.integers(1, 60_000), min_size=0, max_size=6).map(lambda sizes: (sum(sizes), len(sizes))),
)
weights = st.fixed_dictionaries(
    {f"t{number}": st.sampled_from([0.1, 0.5, 1.0, 1.0, 2.0, 7.3]) for number in range(12)}
)


@settings(max_examples=300, deadline=None)
@given(
    histories=st.lists(tenants, min_size=1, max_size=4), weight_of=weights, name=st.sampled_from(["t0", "t5"])
)
def test_sums_say_what_the_formula_says(
    histories: list[dict[str, tuple[int, int]]], weight_of: dict[str, float], name: str
) -> None:
    work = FairWork()
    waiting: dict[str, tuple[int, int]] = {}
    for changes in histories:
        for tenant, (tokens, requests) in changes.items():
            work.put(tenant, tokens, requests, weight_of[tenant])
            waiting[tenant] = (tokens, requests)
    waiting = {tenant: each for tenant, each in waiting.items() if each[1]}
    own, weight = waiting.get(name, (0, 0))[0], weight_of[name]
    others = sum(
        min(tokens, own * weight_of[tenant] / weight + tokens / requests)
        for tenant, (tokens, requests) in waiting.items()
        if tenant != name
    )
    # Where the sum ends on one half, the last bit of a float decides how it is rounded.
    assert abs(work.ahead(name, weight) - own - others) <= 0.5 + 1e-6 * max(1.0, others)
    assert work.tokens == sum(tokens for tokens, _ in waiting.values())


def test_a_tenant_that_has_nothing_left_leaves_no_trace() -> None:
    work = FairWork()
    work.put("a", 900, 3, 1.0)
    work.put("b", 100, 1, 0.1)
    assert work.ahead("c", 1.0) == 300 + 100
    work.put("a", 0, 0, 1.0)
    work.put("b", 0, 0, 0.1)
    assert work.ahead("c", 1.0) == work.tokens == 0
    assert work._buckets == {}
