import pytest

from serve_app.metrics.slo import Slo
from serve_app.planning.sizing.costs import CostTable
from serve_app.planning.sizing.fleets import PoolPlan, paged_fleet, split_fleet
from serve_app.planning.sizing.modelled import (
    closed_form,
    size,
    sized_pool,
    smallest_pool,
    sustainable_rate_per_s,
)
from tests.planning.builders import mix, pool_model

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


def test_a_large_pool_sustains_per_replica_what_one_replica_can() -> None:
    model = pool_model(CHAT)
    rate = sustainable_rate_per_s(model, SLO)
    found = smallest_pool(model, 1_000.0, SLO)
    assert found is not None
    assert found.replicas == pytest.approx(1_000 / rate, rel=0.03)
    assert sustainable_rate_per_s(model, Slo(ttft_s=None, tpot_s=None)) == 0.85 * model.capacity_per_s


def test_pools_are_sized_for_their_own_share() -> None:
    lengths = mix(*[(200, 100)] * 9, (6_000, 100))
    pools = size(split_fleet(LARGE, LARGE, 4_096), lengths, 100.0, Slo(ttft_s=5.0, tpot_s=0.1))
    assert set(pools) == {"short", "long"}
    assert all(sized.replicas >= 1 for sized in pools.values())


def test_equal_engines_for_equal_requests_save_nothing() -> None:
    # Both sides of the border hold the same lengths but for one token of prompt.
    lengths = mix((1_000, 100), (1_001, 100))
    form = closed_form(paged_fleet(LARGE), split_fleet(LARGE, LARGE, 1_100), lengths, SLO, CostTable.load())
    assert form.short_request_ratio == 0.5
    assert form.short_work_ratio == pytest.approx(0.5)
    assert form.rho_short == pytest.approx(1.0, rel=0.01)
    assert form.rho_long == pytest.approx(1.0, rel=0.01)
    assert form.by_both_pools == pytest.approx(0.0, abs=0.01)


def test_the_form_for_both_pools_is_the_cost_of_sustainable_rates() -> None:
    lengths = mix(*[(200, 100)] * 9, (6_000, 100))
    slo, costs = Slo(ttft_s=5.0, tpot_s=0.1), CostTable.load()
    whole, parts = paged_fleet(LARGE), split_fleet(LARGE, LARGE, 4_096)
    form = closed_form(whole, parts, lengths, slo, costs)
    (undivided,) = whole.models(lengths).values()
    short, long = parts.models(lengths).values()
    divided = 0.9 / sustainable_rate_per_s(short, slo) + 0.1 / sustainable_rate_per_s(long, slo)
    assert form.by_both_pools == pytest.approx(1 - divided * sustainable_rate_per_s(undivided, slo))


def test_a_rate_is_needed() -> None:
    with pytest.raises(ValueError, match="positive rate"):
        smallest_pool(pool_model(CHAT), 0.0, SLO)
