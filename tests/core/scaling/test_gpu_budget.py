import math

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.scaling.scaler import PoolNeed, share_gpus


def need(replicas: int, *, least: int = 0, gpus: float = 1.0, needed: float | None = None) -> PoolNeed:
    return PoolNeed(replicas=replicas, needed=replicas if needed is None else needed, least=least, gpus=gpus)


def test_without_a_budget_every_pool_gets_what_it_requests() -> None:
    assert share_gpus({"short": need(7), "long": need(3, gpus=4)}, None) == {"short": 7, "long": 3}


def test_a_sufficient_budget_changes_no_request() -> None:
    assert share_gpus({"short": need(2), "long": need(1, gpus=4)}, 6) == {"short": 2, "long": 1}


def test_a_shortage_is_shared_evenly() -> None:
    assert share_gpus({"short": need(8), "long": need(4)}, 6) == {"short": 4, "long": 2}


def test_a_pool_without_replicas_precedes_one_that_has_some() -> None:
    assert share_gpus({"short": need(9, needed=8.5), "long": need(1, needed=0.1)}, 4) == {
        "short": 3,
        "long": 1,
    }


def test_a_pool_too_large_for_the_rest_leaves_it_to_others() -> None:
    assert share_gpus({"short": need(5), "long": need(2, gpus=4)}, 7) == {"short": 3, "long": 1}


def test_the_minimum_is_given_in_any_case() -> None:
    assert share_gpus({"short": need(9, least=1), "long": need(2, least=2, gpus=4)}, 10) == {
        "short": 2,
        "long": 2,
    }


needs = st.builds(
    lambda replicas, least, gpus, part: PoolNeed(
        replicas=max(replicas, least), needed=max(0.0, max(replicas, least) - part), least=least, gpus=gpus
    ),
    st.integers(0, 20),
    st.integers(0, 2),
    st.sampled_from((0.0, 0.5, 1.0, 2.0, 4.0)),
    st.floats(0, 0.99),
)


@given(st.lists(needs, min_size=1, max_size=4), st.floats(0, 60))
def test_a_budget_is_never_exceeded_but_by_minimums_and_never_left_idle(
    asked: list[PoolNeed], budget: float
) -> None:
    named = {f"p{number}": each for number, each in enumerate(asked)}
    given_ = share_gpus(named, budget)
    least = sum(each.least * each.gpus for each in asked)
    used = sum(named[pool].gpus * count for pool, count in given_.items())
    assert used <= max(budget, least) + 1e-6
    for pool, count in given_.items():
        assert named[pool].least <= count <= named[pool].replicas
        if count < named[pool].replicas:
            assert named[pool].gpus > budget - used - 1e-6 or math.isclose(named[pool].gpus, budget - used)
