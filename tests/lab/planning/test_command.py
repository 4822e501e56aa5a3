"""`plan`: its output and files."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import main

SMALL = ["--profile", "laptop", "--requests", "120", "--seeds", "3", "--jobs", "1", "--candidates", "1"]


def plan(*arguments: str) -> int:
    limits = ["--slo-ttft-s", "1", "--slo-tpot-s", "0.05", "--b-short", "512,1024"]
    given = ["--trace", "paper-mix", "--rate", "30", "--profile-settings-only"]
    return main(["plan", *given, *SMALL, *limits, *arguments])


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
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
