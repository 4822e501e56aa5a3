"""Plans: their candidates, the configuration written for one, its report, and the command."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import yaml

from serve_app.cli import main
from serve_app.cli.workload_arguments import fleet_of_file
from serve_app.errors import SettingsError
from serve_app.lab.planning.plan import (
    Candidate,
    FleetOptions,
    Planner,
    PlanResult,
    SizedFleet,
    configuration,
    plan_as_json,
    saving,
    verdict,
)
from serve_app.lab.planning.queueing import (
    CostTable,
    FleetPlan,
    LengthMix,
    PoolPlan,
    ReplicaCounts,
    paged_fleet,
    split_fleet,
    worst_case_fleet,
)
from serve_app.lab.planning.verification import PoolFigures, RunFigures, Verification, Verifier
from serve_app.lab.simulation.run import EngineChanges, choose_trace
from serve_app.settings.application import IMPORT_PATH, load_settings
from serve_app.settings.checking import check_file
from tests.lab.planning.builders import demand, mix

LARGE, SMALL = "llama2-70b-h100-tp4", "llama31-8b-rtx4090-tp1"
MIXED = mix(*[(200, 100)] * 40, *[(3_000, 200)] * 10)


def planner(options: FleetOptions, *, rate: float = 60.0, lengths: LengthMix = MIXED) -> Planner:
    return Planner(options, demand(rate, ttft_s=2.0, tpot_s=0.1), lengths, CostTable.load())


def test_every_b_short_with_requests_on_both_sides_gets_its_best_pools() -> None:
    found = planner(FleetOptions(profile=LARGE, b_short_tokens=(64, 512, 1_024, 16_000))).split()
    assert [one.plan.b_short_tokens for one in found] == [512, 1_024]
    assert all(set(one.counts) == {"short", "long"} for one in found)


def test_a_cheaper_profile_for_short_requests_is_taken_where_it_serves_them() -> None:
    options = FleetOptions(profile=LARGE, short_profiles=(SMALL,), b_short_tokens=(1_024,))
    (one,) = planner(options).split()
    assert one.plan.pools["short"].profile == SMALL
    assert one.plan.pools["long"].profile == LARGE


def test_the_undivided_fleet_may_use_every_profile_of_a_pool() -> None:
    undivided = planner(FleetOptions(profile=LARGE, short_profiles=(SMALL,))).paged
    assert {one.plan.pools["all"].profile for one in undivided} == {LARGE, SMALL}
    costs = [one.usd_per_hour for one in undivided]
    assert costs == sorted(costs)
    # A fleet that cannot hold the longest request is excluded.
    longest = LengthMix(np.append(MIXED.prompts, 16_000), np.append(MIXED.outputs, 300))
    able = planner(FleetOptions(profile=LARGE, short_profiles=("laptop",)), lengths=longest).paged
    assert {one.plan.pools["all"].profile for one in able} == {LARGE}


def test_the_worst_case_takes_the_given_number_of_sequences() -> None:
    (pool,) = planner(FleetOptions(profile=LARGE, worst_case_slots=16)).worst_case().plan.pools.values()
    assert pool.engine.max_num_seqs == 16
    (derived,) = planner(FleetOptions(profile=LARGE)).worst_case().plan.pools.values()
    assert derived.engine.max_num_seqs == 26


def test_a_search_ends_in_simulated_fleets() -> None:
    wanted = demand(40.0, requests=120)
    lengths = LengthMix.of(choose_trace(wanted.trace, 0))
    options = FleetOptions(profile="laptop", b_short_tokens=(512, 1_024), variants=False, candidates=1)
    steps: list[str] = []
    result = Planner(options, wanted, lengths, CostTable.load(), steps.append).search(
        Verifier(wanted), range(2)
    )
    assert steps == ["worst-case-homogeneous", "paged-homogeneous", "pools"]
    assert result.paged is not None
    assert result.worst_case is not None
    assert result.pools is not None
    for one in result.simulated:
        assert one.verification.meets
        assert len(one.verification.runs) == 2
    assert result.paged.usd_per_hour <= result.worst_case.usd_per_hour


def test_a_search_needs_values_of_b_short_and_candidates() -> None:
    with pytest.raises(SettingsError, match="values of B_short"):
        FleetOptions(profile=LARGE, b_short_tokens=())
    with pytest.raises(SettingsError, match="candidate"):
        FleetOptions(profile=LARGE, candidates=0)


# -- configuration written for a planned fleet ------------------------------------------------------------

CHEAP, COSTLY = "llama31-8b-rtx4090-tp1", "llama3-70b-h100-tp4"
COSTS = CostTable.load()
SPLIT = split_fleet(
    PoolPlan(profile=CHEAP, engine=EngineChanges(max_num_seqs=64)), PoolPlan(profile=COSTLY), 2_048
)


def sized(plan: FleetPlan, **counts: int) -> SizedFleet:
    return SizedFleet(
        candidate=Candidate(plan=plan, pools={}, usd_per_hour=0.0),
        verification=cast("Any", None),
        share=1.0,
        headroom=1.0,
        counts=counts,
        usd_per_hour=plan.usd_per_hour(counts, COSTS),
        gpus=plan.gpus(counts),
    )


@pytest.mark.parametrize(
    "fleet", [sized(SPLIT, short=5, long=2), sized(paged_fleet(PoolPlan(profile=COSTLY)), all=3)]
)
def test_the_written_file_passes_the_check_and_simulates_as_planned(
    fleet: SizedFleet, tmp_path: Path
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(configuration(fleet, demand(10.0, tpot_s=0.05), COSTS))
    assert check_file(path, on_this_machine=False).mistakes == []
    played = fleet_of_file(path, "laptop")
    assert played.plans() == fleet.plan.settings(fleet.counts).plans(isolated=True)
    assert played.routing.pools == tuple(fleet.counts)
    served = load_settings(path).models[0].scheduler.routing
    if len(fleet.counts) > 1:
        assert played.routing.b_short_tokens == served.b_short_tokens == 2_048
        assert played.routing.costs == served.costs == (0.45, 11.8)


def test_engines_of_vllm_have_the_limits_and_the_gpus_of_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        configuration(sized(SPLIT, short=5, long=2), demand(10.0, tpot_s=0.05), COSTS, "org/some-model")
    )
    assert check_file(path, on_this_machine=False).mistakes == []
    assert "$25.85 per hour, 13 GPUs" in path.read_text()
    model = load_settings(path).models[0]
    short, long = model.pools
    assert (model.name, short.replicas, long.replicas) == ("some-model", 5, 2)
    assert short.engine.vllm is not None
    assert long.engine.vllm is not None
    assert short.engine.vllm.args["max_num_seqs"] == 64
    assert short.engine.max_model_len == 2_048
    assert long.engine.vllm.args["tensor_parallel_size"] == long.resources.num_gpus == 4
    # Ray has no accelerator type for some cards.
    assert (short.resources.accelerator_type, long.resources.accelerator_type) == (None, "H100")
    vllm = fleet_of_file(path, COSTLY)
    assert [vllm.profile_of(pool) for pool in vllm.replicas] == [COSTLY, COSTLY]
    assert vllm.plans()[0].engine.max_num_seqs == 64


def test_the_cheapest_fleet_is_written_and_one_pool_where_several_cost_the_same() -> None:
    one, split = sized(paged_fleet(PoolPlan(profile=COSTLY)), all=2), sized(SPLIT, short=1, long=1)

    def result(**fleets: SizedFleet | None) -> PlanResult:
        others: dict[str, Any] = {"modelled": (), "simulated": ()}
        none = dict.fromkeys(("worst_case", "paged", "pools"))
        return PlanResult(**{**none, **others, **fleets})

    assert result(paged=one, pools=split).best is split
    assert result(paged=one, pools=one).best is one
    assert result().best is None


def test_pools_that_cannot_be_simulated_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("applications: []")
    with pytest.raises(ValueError, match="must have exactly one application"):
        fleet_of_file(path, CHEAP)
    remote = {"name": "m", "pools": [{"name": "all", "engine": {"remote": {"endpoints": ["http://a:1"]}}}]}
    path.write_text(
        yaml.safe_dump({"applications": [{"import_path": IMPORT_PATH, "args": {"models": [remote]}}]})
    )
    with pytest.raises(ValueError, match="pool all has remote engines"):
        fleet_of_file(path, CHEAP)


def test_the_packaged_configuration_can_be_simulated() -> None:
    fleet = fleet_of_file(Path("configs/local.yaml"), CHEAP)
    assert tuple(fleet.replicas) == ("short", "long")
    assert fleet.b_short_tokens == 2_048


# -- tables, JSON and verdict of a plan -------------------------------------------------------------------

LARGE_POOL = PoolPlan(profile="llama2-70b-h100-tp4")


def sized_with_runs(plan: FleetPlan, counts: ReplicaCounts, *, share: float = 1.0) -> SizedFleet:
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
    worst_case = sized_with_runs(worst_case_fleet(LARGE_POOL.profile, 16), {"all": 20})
    one = None if paged is None else sized_with_runs(paged_fleet(LARGE_POOL), {"all": paged})
    split = split_fleet(LARGE_POOL, LARGE_POOL, 4_096)
    two = None if pools is None else sized_with_runs(split, dict(zip(("short", "long"), pools, strict=True)))
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
    whole = sized_with_runs(paged_fleet(LARGE_POOL), {"all": 100})
    stand_in = replace(
        whole, verification=replace(whole.verification, counts={"all": 10}), counts={"all": 100}, share=0.1
    )
    assert saving(whole, whole).resolution == pytest.approx(0.01)
    assert saving(stand_in, stand_in).resolution == pytest.approx(0.025)


# -- output and files of `plan` ---------------------------------------------------------------------------

SMALL_PLAN = ["--profile", "laptop", "--requests", "120", "--seeds", "3", "--jobs", "1", "--candidates", "1"]


def plan(*arguments: str) -> int:
    limits = ["--slo-ttft-s", "1", "--slo-tpot-s", "0.05", "--b-short", "512,1024"]
    given = ["--trace", "paper-mix", "--rate", "30", "--profile-settings-only"]
    return main(["plan", *given, *SMALL_PLAN, *limits, *arguments])


@dataclass(frozen=True)
class Written:
    """Output and JSON file of one plan."""

    text: str
    document: dict[str, Any]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder, text = tmp_path_factory.mktemp("plan"), io.StringIO()
    with redirect_stdout(text):
        assert plan("--json", str(folder / "deep" / "r.json")) == 0
    return Written(text.getvalue(), json.loads((folder / "deep" / "r.json").read_text()))


def test_a_plan_is_printed_and_written(written: Written) -> None:
    assert "| > paged-homogeneous" in written.text
    assert "Splitting" in written.text.splitlines()[-1]
    document = written.document
    names = [one["name"] for one in document["fleets"]]
    assert names == ["worst-case-homogeneous", "paged-homogeneous", "pools"]
    for one in document["fleets"]:
        assert one["replicas"] == sum(pool["replicas"] for pool in one["per_pool"].values())
        assert 0 < one["p99_ttft_s"] <= 1
        assert 0 < one["p99_tpot_s"] <= 0.05
        assert one["preemptions"] >= 0
        assert one["verification"]["meets"]
    pools = document["fleets"][2]
    saved = pools["savings"]["paged-homogeneous"]
    assert isinstance(saved["simulated"], float)
    assert {"commit", "settings", "trace", "seeds"} <= set(document["provenance"])
    assert document["provenance"]["seeds"] == [0, 1, 2]


def test_the_fleets_of_the_table_are_those_of_the_json_output(written: Written) -> None:
    lines = written.text.splitlines()
    assert written.document["verdict"] in written.text
    for one in written.document["fleets"]:
        half = one["verification"]["p99_ttft_s"]["high"] - one["p99_ttft_s"]
        cells = (
            f" {one['name']} ",
            f" {one['gpus']} | ",
            f" {one['usd_per_hour']:,.2f} | ",
            f" {one['p99_ttft_s']:.2f} ± {half:.2f} | ",
        )
        assert [line for line in lines if all(cell in line for cell in cells)]
    cheapest = min(written.document["fleets"][1:], key=lambda one: one["usd_per_hour"])
    (marked,) = [line for line in lines if line.startswith("| > ")]
    assert marked.startswith(f"| > {cheapest['name']} ")
    assert f" {cheapest['usd_per_hour']:,.2f} | " in marked


@pytest.mark.slow
def test_a_large_fleet_is_simulated_as_a_stand_in_and_that_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert plan("--rate", "300", "--max-simulated-replicas", "4", "--seeds", "1", "--json", str(out)) == 0
    captured = capsys.readouterr()
    assert "of its size, results scaled up" in captured.out
    assert "fewer than three seeds" in captured.err
    document = json.loads(out.read_text())
    paged = next(one for one in document["fleets"] if one["name"] == "paged-homogeneous")
    assert paged["simulated_share"] < 1 <= paged["headroom"]
    small = paged["verification"]["replicas"]["all"]
    assert paged["replicas"] > small
    twice = document["fleets_at_double_scale"]["paged-homogeneous"]
    assert twice["replicas"]["all"] == 2 * small
    assert twice["rate_per_s"] == pytest.approx(2 * paged["verification"]["rate_per_s"])


def test_limits_out_of_reach_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--slo-tpot-s", "0.001") == 0
    captured = capsys.readouterr()
    assert "No single pool with paged KV meets the limits" in captured.out
    assert "the worst-case fleet meets the limits at none of the simulated sizes" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "abacus"], "no engine profile 'abacus'"),
        (["--costs", "nowhere.yaml"], "nowhere.yaml is not a table of GPU costs"),
        (["--set", "backpressure"], "--set must be PATH=VALUE"),
        (["--max-simulated-replicas", "2"], "max_simulated_replicas must be at least 4"),
        (["--arrivals", "tides"], "unknown arrivals 'tides'"),
    ],
)
def test_invalid_arguments_end_with_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
