"""Configuration written for a planned fleet."""

from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from serve_app.cli.workload_arguments import fleet_of_file
from serve_app.lab.planning.plan import Candidate, PlanResult, SizedFleet, configuration
from serve_app.lab.planning.queueing import CostTable, FleetPlan, PoolPlan, paged_fleet, split_fleet
from serve_app.lab.simulation.run import EngineChanges
from serve_app.settings.application import IMPORT_PATH, load_settings
from serve_app.settings.checking import check_file
from tests.lab.planning.builders import demand

CHEAP, LARGE = "llama31-8b-rtx4090-tp1", "llama3-70b-h100-tp4"
COSTS = CostTable.load()
SPLIT = split_fleet(
    PoolPlan(profile=CHEAP, engine=EngineChanges(max_num_seqs=64)), PoolPlan(profile=LARGE), 2_048
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
    "fleet", [sized(SPLIT, short=5, long=2), sized(paged_fleet(PoolPlan(profile=LARGE)), all=3)]
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
    vllm = fleet_of_file(path, LARGE)
    assert [vllm.profile_of(pool) for pool in vllm.replicas] == [LARGE, LARGE]
    assert vllm.plans()[0].engine.max_num_seqs == 64


def test_the_cheapest_fleet_is_written_and_one_pool_where_several_cost_the_same() -> None:
    one, split = sized(paged_fleet(PoolPlan(profile=LARGE)), all=2), sized(SPLIT, short=1, long=1)

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
