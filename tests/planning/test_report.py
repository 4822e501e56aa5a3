"""The report of `plan`: what it shows is what the JSON output has."""

import json
from pathlib import Path

import pytest

from serve_app.cli import main
from tests.reports.parsed import ParsedReport

PLAN = ["plan", "--trace", "paper-mix", "--rate", "30", "--profile", "laptop", "--profile-settings-only"]
SMALL = ["--requests", "300", "--seeds", "3", "--jobs", "1", "--candidates", "1", "--b-short", "512,1024"]


def test_its_fleets_are_those_of_the_json_output(tmp_path: Path) -> None:
    page_file, out = tmp_path / "r.html", tmp_path / "r.json"
    limits = ["--slo-ttft-s", "1", "--slo-tpot-s", "0.05"]
    assert main([*PLAN, *SMALL, *limits, "--report", str(page_file), "--json", str(out)]) == 0
    page, found = ParsedReport(page_file.read_text()), json.loads(out.read_text())
    assert found["verdict"] in page.text
    fleets = page.tables[0]
    for one in found["fleets"]:
        for heading, expected in (
            ("GPUs", one["gpus"]),
            ("$/hour", one["usd_per_hour"]),
            ("P99 TTFT s", one["p99_ttft_s"]),
            ("P99 TPOT ms", one["p99_tpot_s"]),
        ):
            assert fleets.column(heading)[one["name"]] == pytest.approx(expected)
        (row,) = [texts for texts in fleets.texts if texts[0] == one["name"]]
        half = one["verification"]["p99_ttft_s"]["high"] - one["p99_ttft_s"]
        assert row[fleets.texts[0].index("P99 TTFT s")] == f"{one['p99_ttft_s']:.2f} ± {half:.2f}"
    pools = next(one for one in found["fleets"] if one["name"] == "pools")
    assert fleets.column("saves")["pools"] == pytest.approx(
        pools["savings"]["paged-homogeneous"]["simulated"]
    )
    assert page.table("The two pools").column("replicas") == {
        name: pool["replicas"] for name, pool in pools["per_pool"].items()
    }


def test_limits_that_no_fleet_meets_are_said_so(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    assert main([*PLAN, *SMALL, "--slo-tpot-s", "0.001", "--report", str(path)]) == 0
    page = ParsedReport(path.read_text())
    assert "No single pool with paged KV meets the limits" in page.text
    assert "the worst-case fleet meets the limits at no size that was tried" in page.text
