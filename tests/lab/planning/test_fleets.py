from pathlib import Path

import pytest

from serve_app.engines.model.roofline import load_profile, profile_names, save_profile
from serve_app.errors import SettingsError
from serve_app.lab.planning.queueing import (
    CostTable,
    PoolPlan,
    paged_fleet,
    split_fleet,
    worst_case_fleet,
    worst_case_slots,
)
from serve_app.lab.simulation.run import EngineChanges
from tests.lab.planning.builders import mix

LARGE = "llama2-70b-h100-tp4"
SMALL = "llama31-8b-rtx4090-tp1"


def test_the_worst_case_gives_every_sequence_the_longest_context() -> None:
    assert worst_case_slots(LARGE) == 427_000 // 16_384
    # A context of 131,072 tokens counts as the papers' 64K.
    assert worst_case_slots("llama3-70b-h100-tp4") == 488_000 // 65_536
    (plan,) = worst_case_fleet(LARGE, 6).settings({"all": 1}).plans(isolated=True)
    assert plan.engine.max_num_seqs == 6
    assert plan.engine.long_prefill_token_threshold == load_profile(LARGE).step_time.chunk_tokens()


def test_a_paged_fleet_is_the_profile_with_the_policys_chunk_limit() -> None:
    (plan,) = paged_fleet(PoolPlan(profile=LARGE)).settings({"all": 1}).plans()
    assert plan.engine == load_profile(LARGE).model_settings()


def test_two_pools_have_their_own_engines_models_and_costs() -> None:
    fleet = split_fleet(
        PoolPlan(profile=SMALL, engine=EngineChanges(max_num_seqs=32)), PoolPlan(profile=LARGE), 4_096
    )
    counts = {"short": 3, "long": 2}
    settings = fleet.settings(counts)
    assert dict(settings.replicas) == counts
    assert fleet.gpus(counts) == settings.gpus == 3 + 8
    costs = CostTable.load()
    expected = 3 * costs.usd_per_hour(SMALL) + 2 * costs.usd_per_hour(LARGE)
    assert fleet.usd_per_hour(counts, costs) == pytest.approx(expected)
    models = fleet.models(mix((100, 50), (200, 50), (6_000, 50)))
    assert [len(models[pool].mix) for pool in counts] == [2, 1]
    assert models["short"].engine.max_model_len == 4_096
    assert models["short"].engine.max_num_seqs == 32
    assert models["long"].engine.max_model_len == 16_384


def test_an_undivided_fleet_has_one_model_of_everything() -> None:
    (model,) = paged_fleet(PoolPlan(profile=LARGE)).models(mix((100, 50), (9_000, 50))).values()
    assert len(model.mix) == 2


def test_every_packaged_profile_has_a_cost() -> None:
    table = CostTable.load()
    for name in profile_names():
        assert table.usd_per_hour(name) >= 0.1, name
    assert table.usd_per_hour("llama2-70b-h100-tp4") == pytest.approx(4 * table.costs["h100"].usd_per_hour)


def test_a_table_of_ones_own_and_a_profile_of_ones_own(tmp_path: Path) -> None:
    costs = tmp_path / "costs.yaml"
    costs.write_text("h100: {usd_per_hour: 1.5, source: contract, date: '2026-01'}\n")
    table = CostTable.load(costs)
    profile = tmp_path / "mine-7b-h100-tp4.yaml"
    save_profile(load_profile("llama2-70b-h100-tp4"), profile, source="a test")
    assert table.usd_per_hour(str(profile)) == 6.0


def test_a_gpu_without_cost_is_named_with_the_remedy(tmp_path: Path) -> None:
    costs = tmp_path / "costs.yaml"
    costs.write_text("h100: {usd_per_hour: 1.5, source: contract, date: '2026-01'}\n")
    with pytest.raises(SettingsError, match=r"'llama31-8b-rtx4090-tp1'.*--costs"):
        CostTable.load(costs).usd_per_hour("llama31-8b-rtx4090-tp1")


@pytest.mark.parametrize("text", ["h100: 3", "h100: {usd_per_hour: 0, source: x, date: y}", "- 1"])
def test_an_invalid_table_is_rejected(tmp_path: Path, text: str) -> None:
    costs = tmp_path / "costs.yaml"
    costs.write_text(text)
    with pytest.raises(SettingsError, match="not a table of GPU costs"):
        CostTable.load(costs)
