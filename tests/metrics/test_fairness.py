import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import Outcome
from serve_app.metrics.fairness import jain_index, jain_of_tenants, max_min_shares, tokens_served
from serve_app.metrics.record import RequestRecord
from tests.metrics.builders import record


def served_late(tenant: str) -> RequestRecord:
    return record(tenant=tenant, arrived_at=0.0, dispatched_at=90, first_token_at=100.0, finished_at=110.0)


def served_at_once(tenant: str) -> RequestRecord:
    return record(tenant=tenant, arrived_at=0.0, dispatched_at=0.0, first_token_at=0.5, finished_at=1.0)


def last_arrival(tenant: str) -> RequestRecord:
    """Ends the counted span, and asks for nothing itself."""
    return record(tenant=tenant, arrived_at=50.0, prompt_tokens=0, output_tokens=0, finished_at=50.0)


def test_jain_is_one_when_all_are_equal_and_one_nth_when_one_has_all() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([0.0]) is None
    assert jain_index([]) is None


@given(st.lists(st.floats(min_value=0.001, max_value=1e6), min_size=1))
def test_jain_lies_between_one_nth_and_one(values: list[float]) -> None:
    index = jain_index(values)
    assert index is not None
    assert 1 / len(values) - 1e-9 <= index <= 1 + 1e-9


@given(
    st.dictionaries(st.text(max_size=3), st.floats(min_value=0, max_value=1e6), min_size=1),
    st.floats(min_value=0, max_value=1e6),
)
def test_shares_never_exceed_the_demand_and_use_up_what_can_be_used(
    asked: dict[str, float], capacity: float
) -> None:
    shares = max_min_shares(asked, capacity, {})
    assert all(shares[tenant] <= asked[tenant] + 1e-6 for tenant in asked)
    assert sum(shares.values()) == pytest.approx(min(capacity, sum(asked.values())), abs=1e-6)


def test_what_a_modest_tenant_leaves_goes_to_the_others_by_weight() -> None:
    shares = max_min_shares({"small": 10.0, "a": 100.0, "b": 100.0}, 100.0, {"b": 2.0})
    assert shares == pytest.approx({"small": 10.0, "a": 30.0, "b": 60.0})


def test_tenants_that_asked_for_different_amounts_and_got_them_are_equally_served() -> None:
    records = [served_at_once("heavy") for _ in range(9)] + [served_at_once("light"), last_arrival("light")]
    assert jain_of_tenants(records) == pytest.approx(1.0)


def test_a_tenant_kept_waiting_while_another_is_served_lowers_the_index() -> None:
    records = [served_at_once("favoured") for _ in range(4)] + [served_late("starved") for _ in range(4)]
    index = jain_of_tenants([*records, last_arrival("favoured")])
    assert index == pytest.approx(0.5)


def test_one_tenant_alone_is_fairly_served() -> None:
    assert jain_of_tenants([served_at_once("only"), last_arrival("only")]) == pytest.approx(1.0)


def test_nothing_served_gives_no_index() -> None:
    assert jain_of_tenants([]) is None
    assert jain_of_tenants([record(outcome=Outcome.FAILED, first_token_at=None, output_tokens=0)]) is None


def test_service_is_counted_as_the_engine_processes_it() -> None:
    streamed = record(first_token_at=10.0, finished_at=20.0, prompt_tokens=100, output_tokens=10)
    assert tokens_served(streamed, until=9.9) == 0
    assert tokens_served(streamed, until=10.0) == 100
    assert tokens_served(streamed, until=15.0) == pytest.approx(105)
    assert tokens_served(streamed, until=20.0) == 110
    whole = record(first_token_at=None, finished_at=20.0)
    assert tokens_served(whole, until=19.9) == 0
    assert tokens_served(whole, until=20.0) == 111
