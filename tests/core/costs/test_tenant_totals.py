import pytest

from serve_app.core.accounting.costs import OTHERS, TenantTotals
from serve_app.request import PriorityClass
from tests.builders import request


def test_seconds_are_summed_by_place_class_and_tenant() -> None:
    totals = TenantTotals()
    mine = request("a", tenant="me", priority=PriorityClass.BATCH)
    totals.add("short", mine, 1.0)
    totals.add("short", mine, 0.5)
    totals.add("long", mine, 2.0)

    assert list(totals) == [
        ("short", PriorityClass.BATCH, "me", 1.5),
        ("long", PriorityClass.BATCH, "me", 2.0),
    ]


def test_no_time_opens_no_account() -> None:
    totals = TenantTotals()
    totals.add("short", request("a"), 0.0)

    assert not list(totals)


@pytest.mark.parametrize("tenants", [3, 100])
def test_further_tenants_are_summed_together(tenants: int) -> None:
    totals = TenantTotals(most=2)
    for number in range(tenants):
        totals.add("short", request(f"r{number}", tenant=f"t{number}"), 1.0)

    found = {tenant: seconds for _, _, tenant, seconds in totals}
    assert found == {"t0": 1.0, "t1": 1.0, OTHERS: tenants - 2.0}
