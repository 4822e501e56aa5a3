"""Fair shares of tenants, and the work ahead of a request."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.queueing.fairness import (
    FairnessMode,
    FairnessSettings,
    FairShares,
    FairWork,
    TenantWeights,
)
from serve_app.core.queueing.request_queue import TenantQueues
from serve_app.request import Usage
from tests.builders import scheduled_request


def fair_shares(**changes: object) -> FairShares:
    return FairShares(FairnessSettings(**changes))  # type: ignore[arg-type]


def serve(shares: FairShares, cost: float = 1.0) -> str:
    """Serve the first tenant, which stays backlogged."""
    name = next(shares.order())[0]
    shares.charge(name, cost)
    return name


def test_a_new_tenant_is_served_before_any_tenant_is_served_twice() -> None:
    shares = fair_shares(mode="requests")
    shares.on_backlog("heavy")
    for _ in range(50):
        serve(shares)
    shares.on_backlog("light")
    shares.on_backlog("lighter")
    assert sorted(next(shares.order())) == ["light", "lighter"]
    assert [serve(shares), serve(shares)] == ["light", "lighter"]


def test_shares_follow_the_weights() -> None:
    shares = fair_shares(mode="tokens", weights={"b": 2.0, "c": 4.0})
    for name in ("a", "b", "c"):
        shares.on_backlog(name)
    cost = {"a": 300.0, "b": 50.0, "c": 1_000.0}
    got = dict.fromkeys(cost, 0.0)
    for _ in range(5_000):
        name = next(shares.order())[0]
        shares.charge(name, cost[name])
        got[name] += cost[name]
    assert got["b"] / got["a"] == pytest.approx(2.0, rel=0.02)
    assert got["c"] / got["a"] == pytest.approx(4.0, rel=0.02)


def test_a_charge_is_corrected() -> None:
    shares = fair_shares()
    shares.on_backlog("a")
    shares.charge("a", 100.0)
    shares.correct("a", -60.0)
    assert shares.counters() == {"a": 40.0}


def test_idle_time_earns_no_credit() -> None:
    shares = fair_shares(mode="requests", quantum_requests=0.0)
    shares.on_backlog("busy")
    for _ in range(10):
        serve(shares)
    shares.on_backlog("back")
    # Once for the lift, then alternately.
    assert [serve(shares) for _ in range(6)].count("back") == 3


@given(
    costs=st.lists(st.sampled_from([10.0, 100.0, 700.0]), min_size=4, max_size=4),
    weights=st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=4, max_size=4),
)
def test_service_by_weight_stays_within_a_quantum_and_a_request(
    costs: list[float], weights: list[float]
) -> None:
    names = [f"t{number}" for number in range(4)]
    shares = fair_shares(weights=dict(zip(names, weights, strict=True)))
    for name in names:
        shares.on_backlog(name)
    for _ in range(300):
        name = next(shares.order())[-1]
        shares.charge(name, costs[names.index(name)])
    counters = shares.counters().values()
    # The quantum is a mean cost, which never exceeds the largest.
    assert max(counters) - min(counters) <= 2 * max(costs)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["backlog", "idle", "charge", "correct"])), max_size=80
    )
)
def test_every_backlogged_tenant_is_listed_exactly_once(steps: list[tuple[int, str]]) -> None:
    shares, waiting = fair_shares(), set[str]()
    for number, step in steps:
        name = f"t{number}"
        if step == "backlog" and name not in waiting:
            shares.on_backlog(name)
            waiting.add(name)
        elif step == "idle" and name in waiting:
            shares.on_idle(name)
            waiting.remove(name)
        elif step == "charge":
            shares.charge(name, 7.0)
        elif step == "correct":
            shares.correct(name, -3.0)
        listed = [name for group in shares.order() for name in group]
        assert sorted(listed) == sorted(waiting)


def test_idle_tenants_are_dropped() -> None:
    shares = fair_shares(mode="requests")
    for number in range(20_000):
        shares.on_backlog(f"t{number}")
        shares.charge(f"t{number}", 1.0)
        shares.on_idle(f"t{number}")
    assert len(shares.counters()) < 5_000


def test_service_is_counted_in_the_unit_of_the_mode() -> None:
    estimate = scheduled_request(prompt_tokens=100, max_output_tokens=50).estimate
    tokens = FairnessSettings()
    output = estimate.expected_tokens - estimate.expected_prompt_tokens
    assert tokens.expected_service(estimate) == estimate.expected_prompt_tokens + 2.0 * output
    assert tokens.actual_service(Usage(prompt_tokens=100, output_tokens=10, cached_tokens=64)) == 36 + 20
    requests = FairnessSettings(mode=FairnessMode.REQUESTS)
    usage = Usage(prompt_tokens=9, output_tokens=9)
    assert requests.expected_service(estimate) == requests.actual_service(usage) == 1


def test_service_without_a_backlog_is_not_charged() -> None:
    shares = fair_shares(mode="requests", quantum_requests=0.0)
    for _ in range(500):
        shares.on_backlog("early")
        shares.charge("early", 1.0)
        shares.on_idle("early")
    shares.on_backlog("early")
    shares.on_backlog("late")
    assert [serve(shares) for _ in range(10)].count("early") == 5


def test_a_lead_over_a_tenant_whose_requests_do_not_fit_is_bounded() -> None:
    shares = fair_shares(mode="requests", quantum_requests=0.0, max_lead_requests=10.0)
    shares.on_backlog("stuck")
    shares.on_backlog("fits")
    for _ in range(200):
        shares.charge("fits", 1.0)
    assert shares.owed_requests()["stuck"] == pytest.approx(10.0)
    assert "fits" not in shares.owed_requests()
    served = [serve(shares) for _ in range(14)]
    assert served.count("fits") == 2


def test_a_tenant_that_waits_alone_is_not_behind() -> None:
    shares = fair_shares()
    shares.on_backlog("a")
    shares.charge("a", 5.0)
    assert "a" not in shares.owed_requests()
    assert "nobody" not in shares.owed_requests()


# -- work ahead of a request from running sums, compared with the formula ---------------------------------

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
    change = tokens - tenant.tokens
    tenant.tokens, tenant.waiting = tokens, requests
    work.update(name, change)
    if not requests:
        del queues[name]


def test_tenants_that_have_left_are_forgotten_without_a_query() -> None:
    work, queues = of_weights({})
    set_backlog(work, queues, "stays", 100, 1)
    for number in range(1_000):
        set_backlog(work, queues, f"end-user-{number}", 100, 1)
        set_backlog(work, queues, f"end-user-{number}", 0, 0)
    assert len(pickle.dumps(work)) < 2_000
    assert work.ahead("new") == 100


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
