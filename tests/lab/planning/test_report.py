"""Tables, JSON and verdict of a plan."""

from dataclasses import replace

import pytest

from serve_app.lab.planning.plan import Candidate, PlanResult, SizedFleet, plan_as_json, saving, verdict
from serve_app.lab.planning.queueing import (
    CostTable,
    FleetPlan,
    PoolPlan,
    ReplicaCounts,
    paged_fleet,
    split_fleet,
    worst_case_fleet,
)
from serve_app.lab.planning.verification import PoolFigures, RunFigures, Verification
from tests.lab.planning.builders import demand

LARGE = PoolPlan(profile="llama2-70b-h100-tp4")


def sized(plan: FleetPlan, counts: ReplicaCounts, *, share: float = 1.0) -> SizedFleet:
    figures = {pool: PoolFigures(0.5, 0.5, 0.9, 0.05) for pool in counts}
    runs = tuple(
        RunFigures(
            seed=seed,
            requests=1_000,
            lost=0,
            preemptions=seed,
            p99_ttft_s=1.0 + 0.1 * seed,
            p99_tpot_s=0.05,
            long_p99_ttft_s=3.0,
            by_pool=figures,
        )
        for seed in range(3)
    )
    costs = CostTable.load()
    candidate = Candidate(plan=plan, pools={}, usd_per_hour=plan.usd_per_hour(counts, costs))
    return SizedFleet(
        candidate=candidate,
        verification=Verification(plan, counts, demand(10.0), runs),
        share=share,
        headroom=1.0,
        counts=counts,
        usd_per_hour=candidate.usd_per_hour,
        gpus=plan.gpus(counts),
    )


def result(*, paged: int | None = 10, pools: tuple[int, int] | None = (5, 3)) -> PlanResult:
    worst_case = sized(worst_case_fleet(LARGE.profile, 16), {"all": 20})
    one = None if paged is None else sized(paged_fleet(LARGE), {"all": paged})
    split = split_fleet(LARGE, LARGE, 4_096)
    two = None if pools is None else sized(split, dict(zip(("short", "long"), pools, strict=True)))
    return PlanResult(
        worst_case=worst_case,
        paged=one,
        pools=two,
        modelled=(),
        simulated=tuple(fleet for fleet in (worst_case, one, two) if fleet is not None),
    )


def test_the_json_has_its_documented_fields() -> None:
    document = plan_as_json(result())
    fleets = {one["name"]: one for one in document["fleets"]}
    assert list(fleets) == ["worst-case-homogeneous", "paged-homogeneous", "pools"]
    for one in fleets.values():
        assert {"replicas", "per_pool", "p99_ttft_s", "p99_tpot_s", "preemptions"} <= set(one)
    pools = fleets["pools"]
    assert pools["replicas"] == 8
    assert {pool: one["replicas"] for pool, one in pools["per_pool"].items()} == {"short": 5, "long": 3}
    saved = pools["savings"]
    assert saved["paged-homogeneous"]["simulated"] == pytest.approx(0.2)
    assert saved["worst-case-homogeneous"]["simulated"] == pytest.approx(0.6)
    (of_paged,) = fleets["paged-homogeneous"]["savings"].values()
    assert of_paged["simulated"] == pytest.approx(0.5)
    assert pools["verification"]["p99_ttft_s"]["n"] == 3
    assert pools["preemptions"] == 3


@pytest.mark.parametrize(
    ("paged", "pools", "expected"),
    [
        (10, (5, 3), "Splitting pays: a short and a long pool with B_short = 4,096"),
        (10, (5, 5), "Splitting does not pay: a short and a long pool"),
        (10, (7, 4), "costs 10.0% more than one paged pool"),
        (10, (6, 3), "Splitting hardly pays"),
        (10, None, "Splitting does not pay: no simulated pair of pools"),
        (None, (5, 3), "No single pool with paged KV meets the limits"),
    ],
)
def test_the_verdict_states_whether_splitting_pays(
    paged: int | None, pools: tuple[int, int] | None, expected: str
) -> None:
    assert expected in verdict(result(paged=paged, pools=pools))


def test_a_stand_in_is_sized_to_a_quarter_of_its_replicas() -> None:
    whole = sized(paged_fleet(LARGE), {"all": 100})
    stand_in = replace(
        whole, verification=replace(whole.verification, counts={"all": 10}), counts={"all": 100}, share=0.1
    )
    assert saving(whole, whole).resolution == pytest.approx(0.01)
    assert saving(stand_in, stand_in).resolution == pytest.approx(0.025)
