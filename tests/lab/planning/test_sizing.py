import pytest

from serve_app.core.metrics.summary import Slo
from serve_app.lab.planning.queueing import PoolPlan, size, sized_pool, smallest_pool, split_fleet
from tests.lab.planning.builders import mix, pool_model

CHAT = mix(*[(200, 100)] * 3, (1_000, 50))
SLO = Slo(ttft_s=2.0, tpot_s=0.06)
LARGE = PoolPlan(profile="llama2-70b-h100-tp4")


@pytest.mark.parametrize("rate", [3.0, 40.0, 700.0])
def test_the_smallest_pool_meets_and_one_less_does_not(rate: float) -> None:
    model = pool_model(CHAT)
    found = smallest_pool(model, rate, SLO)
    assert found is not None
    assert found.meets(SLO)
    if found.replicas > 1:
        assert not model.performance(rate, found.replicas - 1).meets(SLO)


def test_limits_out_of_reach_are_known_and_the_cap_counts_alone() -> None:
    model = pool_model(CHAT)
    impossible = Slo(ttft_s=2.0, tpot_s=0.001)
    assert smallest_pool(model, 40.0, impossible) is None
    sized = sized_pool(model, 40.0, impossible)
    assert not sized.within_limits
    assert sized.performance.utilisation <= 0.85
    assert sized_pool(model, 40.0, SLO).within_limits


def test_pools_are_sized_for_their_own_share() -> None:
    lengths = mix(*[(200, 100)] * 9, (6_000, 100))
    pools = size(split_fleet(LARGE, LARGE, 4_096), lengths, 100.0, Slo(ttft_s=5.0, tpot_s=0.1))
    assert set(pools) == {"short", "long"}
    assert all(sized.replicas >= 1 for sized in pools.values())
