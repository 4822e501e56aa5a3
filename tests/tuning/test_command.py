"""`tune`: its output and files, and agreement of report and JSON."""

import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.cli import main
from serve_app.settings.loading import settings_of
from tests.lab.reports.parsed import ParsedReport

SMALL = ["--profile", "laptop", "--replicas", "1", "--requests", "400", "--window", "60", "--jobs", "1"]
BAD = [
    *("--set", "backpressure.target_waiting=16", "--set", "isolation.max_long_prefills=8"),
    *("--set", "ewsjf.weights.b_u=5"),
]


def tune(*arguments: str) -> int:
    return main(["tune", "--trace", "paper-mix", *SMALL, *arguments])


@dataclass(frozen=True)
class Tuned:
    """Output and files of one search."""

    text: str
    document: dict[str, Any]
    page: ParsedReport


def tuned(folder: Path, *arguments: str) -> Tuned:
    page, out, text = folder / "r.html", folder / "deep" / "r.json", io.StringIO()
    with redirect_stdout(text):
        assert tune(*arguments, "--report", str(page), "--json", str(out)) == 0
    return Tuned(text.getvalue(), json.loads(out.read_text()), ParsedReport(page.read_text()))


@pytest.fixture(scope="module")
def won(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    return tuned(tmp_path_factory.mktemp("won"), "--rate", "45", *BAD, "--trials", "14")


def test_bad_settings_are_replaced_by_better_ones_ready_to_paste(won: Tuned) -> None:
    found = won.document
    assert found["confident"]
    assert found["confirmation"]["low"] > 0
    assert found["rewards"]["best"] > found["rewards"]["incumbent"]
    assert found["incumbent"]["target_waiting"] == 16
    assert found["course"][-1]["gain"] > 0
    assert {"commit", "settings", "trace", "seeds"} <= set(found["provenance"])
    yaml_settings = yaml.safe_load(won.text.split("For the model's settings:")[1])
    assert yaml_settings == found["recommended"]
    pool = {"name": "only", "engine": {"emulated": {"profile": "laptop"}}}
    read = settings_of({"models": [{"name": "m", "pools": [pool], **yaml_settings}]}).models[0].scheduler
    assert read.backpressure.target_waiting == found["best"]["target_waiting"]
    assert read.ewsjf.weights is not None
    assert read.ewsjf.weights.b_u == found["best"]["b_u"]
    for name in ("default short", "default long"):
        assert f"| {name} " in won.text
        for side in ("incumbent", "best"):
            assert found["classes"][side][name]["ttft_p50_s"] <= found["classes"][side][name]["ttft_p99_s"]


def test_a_win_is_shown_with_its_interval_and_settings_to_paste(won: Tuned) -> None:
    page, found = won.page, won.document
    rewards = page.table("Best candidate against")
    fresh = found["confirmation"]
    assert rewards.column("difference")["reward on fresh windows"] == pytest.approx(fresh["mean"])
    assert rewards.texts[1][1] == "better"
    assert f"{fresh['low']:+.4f} to {fresh['high']:+.4f}" in rewards.texts[1]
    sides = {"current": "incumbent", "best candidate": "best"}
    for heading, side in sides.items():
        shown = rewards.column(heading)["reward on fresh windows"]
        assert shown == pytest.approx(found["rewards"][side])
    changed = page.table("Changed values")
    for heading, side in sides.items():
        assert (
            changed.column(heading)["scheduler.backpressure.target_waiting"] == found[side]["target_waiting"]
        )
    assert any(yaml.safe_load(text) == found["recommended"] for text in page.inside("code") if ":" in text)
    classes = page.table("Priority classes")
    for texts, values in zip(classes.texts[1:], classes.values[1:], strict=True):
        expected = found["classes"][sides[texts[1]]][texts[0]]
        assert values[2:] == [
            pytest.approx(expected[name])
            for name in ("requests", "ttft_p50_s", "ttft_p99_s", "attainment_ratio")
        ]


def test_settings_that_cannot_be_improved_stay(tmp_path: Path) -> None:
    # With hardly any load no request waits, so no wait can shrink.
    inconclusive = tuned(tmp_path, "--rate", "0.5", "--trials", "4", "--only", "b_u,alpha")
    assert not inconclusive.document["confident"]
    for text in (inconclusive.text, inconclusive.page.text):
        assert "The current settings remain." in text
        assert "To paste" not in text
    assert "recommended" not in inconclusive.page.text


def test_the_objective_of_the_paper_and_two_pools_can_be_selected(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["tune", "--trace", "paper-mix", "--profile", "laptop", "--pools", "short:1,long:1"]
    arguments += ["--b-short", "2000", "--requests", "300", "--window", "60", "--jobs", "1", "--rate", "10"]
    assert main([*arguments, "--objective", "paper", "--trials", "3", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert set(found["terms"]["incumbent"]) == {"compactness", "balance", "proliferation", "latency"}
    assert found["incumbent"]["b_short_tokens"] == 2_000


def test_the_progress_bar_ends_with_the_candidates_that_were_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # rich then treats any output as a terminal.
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert tune("--rate", "20", "--trials", "9") == 0
    shown = capsys.readouterr()
    last = re.findall(r"(\d+)/(\d+)", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.err))[-1]
    assert last == ("9", "9")
    assert "9 candidates: " in shown.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "lifo"], "lifo"),
        (["--set", "b_u"], "--set must be PATH=VALUE"),
        (["--set", "isolation.speed=9"], "speed"),
        (["--only", "speed"], "cannot tune speed"),
        (["--seed", "-1"], "--seed must not be negative"),
        (["--policy", "direct"], "direct"),
    ],
)
def test_impossible_arguments_end_with_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(*arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
