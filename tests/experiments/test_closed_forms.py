import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.planning.closed_forms import (
    closed_form,
    saving,
    sustainable_rate_per_s,
    two_pool_saving,
    work_share,
)
from serve_app.core.metrics.summary import Slo
from serve_app.lab.planning.queueing import CostTable, PoolPlan, paged_fleet, smallest_pool, split_fleet
from tests.lab.planning.builders import mix, pool_model

CHAT = mix(*[(200, 100)] * 3, (1_000, 50))
SLO = Slo(ttft_s=2.0, tpot_s=0.06)
LARGE = PoolPlan(profile="llama2-70b-h100-tp4")


def test_a_large_pool_sustains_per_replica_what_one_replica_can() -> None:
    model = pool_model(CHAT)
    rate = sustainable_rate_per_s(model, SLO)
    found = smallest_pool(model, 1_000.0, SLO)
    assert found is not None
    assert found.replicas == pytest.approx(1_000 / rate, rel=0.03)
    assert sustainable_rate_per_s(model, Slo(ttft_s=None, tpot_s=None)) == 0.85 * model.capacity_per_s


def test_equal_engines_for_equal_requests_save_nothing() -> None:
    # Both sides of the border have the same lengths, except for one prompt token.
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


paces = st.floats(0.1, 50)
shares = st.floats(0, 1)


@pytest.mark.parametrize(("alpha", "predicted"), [(0.80, 0.600), (0.68, 0.510)])
def test_the_papers_closed_form_gives_their_predictions(alpha: float, predicted: float) -> None:
    # arXiv 2604.08075: instances of 11.2 against 2.8 requests/s; 60.0 % for Azure, 51.0 % for LMSYS.
    assert saving(alpha, 11.2 / 2.8) == pytest.approx(predicted, abs=5e-4)


def test_the_share_of_work_explains_what_the_share_of_requests_does_not() -> None:
    # Azure in arXiv 2604.09613: 92 % of requests are short, and 44 % of the work; simulated were 16.6 %.
    rho = 1.606
    assert saving(0.92, rho) == pytest.approx(0.347, abs=1e-3)
    assert saving(0.44, rho) == pytest.approx(0.166, abs=1e-3)


def test_the_work_share_of_short_requests_is_below_their_number() -> None:
    # Three short ones of a second for every long one of nine: 3 of 12 seconds.
    assert work_share(0.75, short_service_s=1.0, mean_service_s=3.0) == pytest.approx(0.25)
    assert work_share(0.75, short_service_s=3.0, mean_service_s=3.0) == pytest.approx(0.75)


@given(shares, paces, paces, st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_form_for_both_pools_counts_instances(
    alpha: float, rho_short: float, rho_long: float, short_s: float, long_s: float
) -> None:
    mean_s = alpha * short_s + (1 - alpha) * long_s
    undivided = mean_s
    divided = alpha * short_s / rho_short + (1 - alpha) * long_s / rho_long
    w_s = work_share(alpha, short_s, mean_s)
    assert two_pool_saving(w_s, rho_short, rho_long) == pytest.approx(1 - divided / undivided, abs=1e-9)


@given(shares, paces)
def test_nothing_is_saved_where_nothing_runs_faster(share: float, rho: float) -> None:
    assert saving(share, 1.0) == 0
    assert two_pool_saving(share, rho, 1.0) == saving(share, rho)
    assert saving(share, rho) < 1


@pytest.mark.parametrize(("share", "rho"), [(-0.1, 2.0), (1.1, 2.0), (0.5, 0.0)])
def test_invalid_shares_and_paces_are_rejected(share: float, rho: float) -> None:
    with pytest.raises(ValueError, match="got"):
        saving(share, rho)


def test_work_that_exceeds_all_work_is_rejected() -> None:
    with pytest.raises(ValueError, match="cannot take"):
        work_share(0.9, short_service_s=2.0, mean_service_s=1.0)
