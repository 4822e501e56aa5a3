import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.planning.model.erlang import erlang_b, erlang_c, wait_quantile_s


def erlang_b_by_definition(servers: int, offered: float) -> float:
    terms = [offered**count / math.factorial(count) for count in range(servers + 1)]
    return terms[-1] / math.fsum(terms)


@given(st.integers(1, 60), st.floats(0.01, 80))
def test_the_recursion_is_erlangs_formula(servers: int, offered: float) -> None:
    assert erlang_b(servers, offered) == pytest.approx(erlang_b_by_definition(servers, offered), rel=1e-9)


def test_one_server_waits_as_often_as_it_is_busy() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    # Any table of the formula: 10 servers, 8 Erlangs.
    assert erlang_c(10, 8.0) == pytest.approx(0.4092, abs=1e-4)


def test_thousands_of_servers_are_no_trouble() -> None:
    assert 0 < erlang_c(20_000, 19_900) < 1
    assert erlang_c(20_000, 10_000) == pytest.approx(0.0, abs=1e-12)
    assert erlang_c(5, 5.0) == 1.0


def test_the_wait_of_one_server_is_that_of_textbooks() -> None:
    # M/M/1: P(W > t) = u exp(-(1 - u) t / E[S]).
    wait_s = wait_quantile_s(servers=1, rate_per_s=0.8, mean_service_s=1.0, service_cv2=1.0)
    assert 0.8 * math.exp(-0.2 * wait_s) == pytest.approx(0.01)


@given(st.integers(1, 50), st.floats(0.05, 0.95), st.floats(0, 5))
def test_steady_service_waits_half_as_long(servers: int, utilisation: float, cv2: float) -> None:
    def wait_s(variation: float) -> float:
        return wait_quantile_s(
            servers=servers, rate_per_s=utilisation * servers, mean_service_s=1.0, service_cv2=variation
        )

    assert wait_s(0.0) == pytest.approx(wait_s(1.0) / 2)
    assert wait_s(cv2) == pytest.approx(wait_s(1.0) * (1 + cv2) / 2)


def test_saturated_servers_wait_for_ever_and_idle_ones_not_at_all() -> None:
    assert wait_quantile_s(servers=2, rate_per_s=2.0, mean_service_s=1.0, service_cv2=1.0) == math.inf
    assert wait_quantile_s(servers=50, rate_per_s=2.0, mean_service_s=1.0, service_cv2=1.0) == 0.0


@pytest.mark.parametrize("quantile", [0.0, 1.0])
def test_only_shares_are_quantiles(quantile: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        wait_quantile_s(servers=1, rate_per_s=0.5, mean_service_s=1.0, service_cv2=1.0, quantile=quantile)


def test_a_pool_needs_servers() -> None:
    with pytest.raises(ValueError, match="at least 1 server"):
        erlang_b(0, 1.0)
