import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.planning.model.closed_form import (
    ClosedForm,
    saving,
    two_pool_saving,
    work_share,
)

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


def test_terms_and_results_go_into_json() -> None:
    form = ClosedForm(short_request_ratio=0.9, short_work_ratio=0.5, rho_short=2.0, rho_long=0.5)
    document = form.as_json()
    assert (document["by_requests"], document["by_work"], document["by_both_pools"]) == (0.45, 0.25, -0.25)


@pytest.mark.parametrize(("share", "rho"), [(-0.1, 2.0), (1.1, 2.0), (0.5, 0.0)])
def test_invalid_shares_and_paces_are_refused(share: float, rho: float) -> None:
    with pytest.raises(ValueError, match="got"):
        saving(share, rho)


def test_work_that_exceeds_all_work_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot take"):
        work_share(0.9, short_service_s=2.0, mean_service_s=1.0)
