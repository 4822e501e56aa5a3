"""Leases: everybody gets a part of the fleet, nobody gets what another has, and all requests are served."""

import pytest

from experiments.common.experiment import Context
from experiments.several_schedulers.leases import scheduler_of, share_leases
from experiments.several_schedulers.run import Cell, SeveralSchedulersSettings, play


def test_slices_follow_the_demand_and_an_idle_scheduler_keeps_one() -> None:
    assert share_leases([{"a": 0.6}, {"b": 0.2}, {}], 18) == [12, 5, 1]
    assert share_leases([{}, {}], 8) == [4, 4]


def test_a_tenant_with_a_long_queue_gets_no_more_than_the_others_leave() -> None:
    # Three tenants share a full fleet: the small one is served, the two others have the same.
    assert share_leases([{"heavy": 5.0}, {"other": 0.9, "small": 0.1}], 100) == [45, 55]


def test_every_slice_is_leased_once() -> None:
    for slices in range(3, 40):
        counts = share_leases([{"a": 0.31}, {"b": 0.07, "c": 0.2}, {"d": 1.4}], slices)
        assert sum(counts) == slices
        assert min(counts) >= 1


def test_fewer_slices_than_schedulers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 schedulers need a slice each, got 2: cut replicas finer"):
        share_leases([{}, {}, {}], 2)


def test_only_the_tenants_of_a_new_scheduler_move() -> None:
    tenants = [f"t{number}" for number in range(300)]
    before = {tenant: scheduler_of(tenant, 4) for tenant in tenants}
    after = {tenant: scheduler_of(tenant, 5) for tenant in tenants}
    moved = [tenant for tenant in tenants if before[tenant] != after[tenant]]
    assert {after[tenant] for tenant in moved} == {4}
    assert 30 <= len(moved) <= 90


def test_two_schedulers_serve_all_requests_and_keep_to_their_leases() -> None:
    cell = Cell(replicas=2, per_replica_per_s=15, duration_s=3, schedulers=(2,))
    settings = SeveralSchedulersSettings(cells=(cell,), seeds=1, tenants=6)
    rows = list(play(settings, Context(jobs=1)))
    assert [row.key["slices"] for row in rows] == [1, 3]
    for row in rows:
        assert row.figures["completed"] == [90]
        assert row.figures["most_over"][0] <= 0
