import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.scaling.pool_scaler import PoolNeed, share_gpus


def need(replicas: int, *, least: int = 0, gpus: float = 1.0, needed: float | None = None) -> PoolNeed:
    return PoolNeed(replicas=replicas, needed=replicas if needed is None else needed, least=least, gpus=gpus)


@pytest.mark.parametrize(
    ("short", "long", "budget", "shares"),
    [
        pytest.param(need(7), need(3, gpus=4), None, (7, 3), id="without a budget all get what they request"),
        pytest.param(need(2), need(1, gpus=4), 6, (2, 1), id="a sufficient budget changes nothing"),
        pytest.param(need(8), need(4), 6, (4, 2), id="a shortage is shared evenly"),
        pytest.param(need(9, needed=8.5), need(1, needed=0.1), 4, (3, 1), id="one without replicas is first"),
        pytest.param(need(5), need(2, gpus=4), 7, (3, 1), id="a pool too large for the rest leaves it"),
        pytest.param(need(9, least=1), need(2, least=2, gpus=4), 10, (2, 2), id="minimums are given"),
    ],
)
def test_pools_share_a_budget(
    short: PoolNeed, long: PoolNeed, budget: float | None, shares: tuple[int, int]
) -> None:
    assert tuple(share_gpus({"short": short, "long": long}, budget).values()) == shares


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
