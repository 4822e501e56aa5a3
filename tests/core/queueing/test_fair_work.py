"""Work ahead of a request from running sums, compared with the formula."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.queueing.fairness import FairnessSettings, FairWork, TenantWeights
from serve_app.core.queueing.request_queue import TenantQueues

tenants = st.dictionaries(
    st.sampled_from([f"t{number}" for number in range(12)]),
    st.lists(st.integers(1, 60_000), min_size=0, max_size=6).map(lambda sizes: (sum(sizes), len(sizes))),
)
weights = st.fixed_dictionaries(
    {f"t{number}": st.sampled_from([0.1, 0.5, 1.0, 1.0, 2.0, 7.3]) for number in range(12)}
)


def of_weights(weights: dict[str, float]) -> tuple[FairWork, dict[str, TenantQueues]]:
    queues: dict[str, TenantQueues] = {}
    return FairWork(queues, TenantWeights(FairnessSettings(weights=weights))), queues


def set_backlog(
    work: FairWork, queues: dict[str, TenantQueues], name: str, tokens: int, requests: int
) -> None:
    """Set the work that a tenant has queued."""
    tenant = queues.setdefault(name, TenantQueues())
    work.update(name, tokens - tenant.tokens)
    tenant.tokens, tenant.waiting = tokens, requests
    if not requests:
        del queues[name]


@settings(max_examples=300, deadline=None)
@given(
    histories=st.lists(tenants, min_size=1, max_size=4), weight_of=weights, name=st.sampled_from(["t0", "t5"])
)
def test_sums_agree_with_the_formula(
    histories: list[dict[str, tuple[int, int]]], weight_of: dict[str, float], name: str
) -> None:
    work, queues = of_weights(weight_of)
    waiting: dict[str, tuple[int, int]] = {}
    for changes in histories:
        for tenant, (tokens, requests) in changes.items():
            set_backlog(work, queues, tenant, tokens, requests)
            waiting[tenant] = (tokens, requests)
        work.ahead(name)
    waiting = {tenant: each for tenant, each in waiting.items() if each[1]}
    own, weight = waiting.get(name, (0, 0))[0], weight_of[name]
    others = sum(
        min(tokens, own * weight_of[tenant] / weight + tokens / requests)
        for tenant, (tokens, requests) in waiting.items()
        if tenant != name
    )
    # Where the sum ends on one half, the last bit of a float decides the rounding.
    assert abs(work.ahead(name) - own - others) <= 0.5 + 1e-6 * max(1.0, others)
    assert work.tokens == sum(tokens for tokens, _ in waiting.values())


def test_a_tenant_without_queued_requests_is_removed() -> None:
    work, queues = of_weights({"b": 0.1})
    set_backlog(work, queues, "a", 900, 3)
    set_backlog(work, queues, "b", 100, 1)
    set_backlog(work, queues, "d", 50, 1)
    assert work.ahead("c") == 300 + 100 + 50
    set_backlog(work, queues, "a", 0, 0)
    set_backlog(work, queues, "b", 0, 0)
    assert work.ahead("c") == work.tokens == 50
    assert repr(work) == "<FairWork of 1 tenants, 50 tokens>"
