import pytest

from serve_app.core.accounting.costs import OTHERS, TenantTotals
from tests.builders import request


@pytest.mark.parametrize("tenants", [3, 100])
def test_further_tenants_are_summed_together(tenants: int) -> None:
    totals = TenantTotals(most=2)
    for number in range(tenants):
        totals.add("short", request(f"r{number}", tenant=f"t{number}"), 1.0)

    found = {tenant: seconds for _, _, tenant, seconds in totals}
    assert found == {"t0": 1.0, "t1": 1.0, OTHERS: tenants - 2.0}
