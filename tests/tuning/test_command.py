import json
import re
from pathlib import Path

import pytest
import yaml

from serve_app.cli import main
from serve_app.settings.loading import settings_of

SMALL = ["--profile", "laptop", "--replicas", "1", "--requests", "400", "--window", "60", "--jobs", "1"]
BAD = [
    *("--set", "backpressure.target_waiting=16", "--set", "isolation.max_long_prefills=8"),
    *("--set", "ewsjf.weights.b_u=5"),
]


def tune(*arguments: str) -> int:
    return main(["tune", "--trace", "paper-mix", *SMALL, *arguments])


def test_bad_settings_are_replaced_by_better_ones_ready_to_paste(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out.json"
    assert tune("--rate", "45", *BAD, "--trials", "14", "--json", str(out)) == 0
    text = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["confident"]
    assert found["confirmation"]["low"] > 0
    assert found["rewards"]["best"] > found["rewards"]["incumbent"]
    assert found["incumbent"]["target_waiting"] == 16
    assert found["course"][-1]["gain"] > 0
    assert {"commit", "settings", "trace", "seeds"} <= set(found["provenance"])
    pasted = yaml.safe_load(text.split("To paste into the model's settings:")[1])
    assert pasted == found["recommended"]
    pool = {"name": "only", "engine": {"emulated": {"profile": "laptop"}}}
    read = settings_of({"models": [{"name": "m", "pools": [pool], **pasted}]}).models[0].scheduler
    assert read.backpressure.target_waiting == found["best"]["target_waiting"]
    assert read.ewsjf.weights is not None
    assert read.ewsjf.weights.b_u == found["best"]["b_u"]
    for name in ("default short", "default long"):
        assert f"| {name} " in text
        for side in ("incumbent", "best"):
            assert found["classes"][side][name]["ttft_p50_s"] <= found["classes"][side][name]["ttft_p99_s"]


@pytest.mark.slow
def test_the_same_command_finds_the_same(tmp_path: Path) -> None:
    found = []
    for name in ("first", "second"):
        out = tmp_path / f"{name}.json"
        assert tune("--rate", "30", "--trials", "6", "--seed", "3", "--json", str(out)) == 0
        document = json.loads(out.read_text())
        found.append([document[each] for each in ("best", "rewards", "classes", "simulated_requests")])
    assert found[0] == found[1]


def test_settings_that_cannot_be_bettered_stand(capsys: pytest.CaptureFixture[str]) -> None:
    # With hardly any load nothing can wait, so nothing can wait less.
    assert tune("--rate", "0.5", "--trials", "4", "--only", "b_u,alpha") == 0
    text = capsys.readouterr().out
    assert "The current settings stand." in text
    assert "To paste" not in text


def test_the_objective_of_the_paper_and_two_pools_can_be_asked_for(tmp_path: Path) -> None:
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
    # rich takes any output for a terminal then.
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
        (["--set", "b_u"], "--set takes PATH=VALUE"),
        (["--set", "isolation.speed=9"], "speed"),
        (["--only", "speed"], "cannot tune speed"),
        (["--seed", "-1"], "--seed must not be negative"),
        (["--policy", "direct"], "direct"),
    ],
)
def test_what_cannot_be_ends_with_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(*arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
