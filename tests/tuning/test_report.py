"""The report of `tune`: what it shows is what the JSON output has, won or not."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.cli import main
from tests.lab.reports.parsed import ParsedReport

TUNE = ["tune", "--trace", "paper-mix", "--profile", "laptop", "--replicas", "1", "--requests", "400"]
BAD = [
    *("--set", "backpressure.target_waiting=16", "--set", "isolation.max_long_prefills=8"),
    *("--set", "ewsjf.weights.b_u=5"),
]


def tuned(tmp_path: Path, *arguments: str) -> tuple[ParsedReport, dict[str, Any]]:
    page, out = tmp_path / "r.html", tmp_path / "r.json"
    given = ["--window", "60", "--jobs", "1", *arguments, "--report", str(page), "--json", str(out)]
    assert main([*TUNE, *given]) == 0
    return ParsedReport(page.read_text()), json.loads(out.read_text())


def test_a_win_is_shown_with_its_interval_and_settings_to_paste(tmp_path: Path) -> None:
    page, found = tuned(tmp_path, "--rate", "45", *BAD, "--trials", "14")
    assert found["confident"]
    rewards = page.table("The best candidate against")
    fresh = found["confirmation"]
    assert rewards.column("difference")["reward on fresh windows"] == pytest.approx(fresh["mean"])
    assert rewards.texts[1][1] == "better"
    assert f"{fresh['low']:+.4f} to {fresh['high']:+.4f}" in rewards.texts[1]
    sides = {"in force": "incumbent", "best candidate": "best"}
    for heading, side in sides.items():
        shown = rewards.column(heading)["reward on fresh windows"]
        assert shown == pytest.approx(found["rewards"][side])
    changed = page.table("Values that differ")
    for heading, side in sides.items():
        assert (
            changed.column(heading)["scheduler.backpressure.target_waiting"] == found[side]["target_waiting"]
        )
    assert any(yaml.safe_load(text) == found["recommended"] for text in page.inside("code") if ":" in text)
    classes = page.table("Classes of requests")
    for texts, values in zip(classes.texts[1:], classes.values[1:], strict=True):
        expected = found["classes"][sides[texts[1]]][texts[0]]
        assert values[2:] == [
            pytest.approx(expected[name])
            for name in ("requests", "ttft_p50_s", "ttft_p99_s", "attainment_ratio")
        ]


def test_without_a_win_the_current_settings_stand(tmp_path: Path) -> None:
    page, found = tuned(tmp_path, "--rate", "0.5", "--trials", "4", "--only", "b_u,alpha")
    assert not found["confident"]
    assert "The current settings stand." in page.text
    assert "recommended" not in page.text
    assert "To paste" not in page.text
