from pathlib import Path

import pytest

from serve_app.engine_model.profiles import load_profile, profile_names, save_profile
from serve_app.errors import SettingsError
from serve_app.planning.sizing.costs import CostTable


def test_every_profile_that_comes_along_has_a_cost() -> None:
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
def test_an_invalid_table_is_refused(tmp_path: Path, text: str) -> None:
    costs = tmp_path / "costs.yaml"
    costs.write_text(text)
    with pytest.raises(SettingsError, match="not a table of GPU costs"):
        CostTable.load(costs)
