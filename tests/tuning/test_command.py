"""`tune`: its output and files."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Tuned:
    """Output and JSON file of one search."""

    text: str
    document: dict[str, Any]


def tuned(folder: Path, *arguments: str) -> Tuned:
    out, text = folder / "deep" / "r.json", io.StringIO()
    with redirect_stdout(text):
        assert tune(*arguments, "--json", str(out)) == 0
    return Tuned(text.getvalue(), json.loads(out.read_text()))


@pytest.fixture(scope="module")
def won(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    return tuned(tmp_path_factory.mktemp("won"), "--rate", "45", *BAD)


def test_bad_settings_are_replaced_by_better_ones_ready_to_paste(won: Tuned) -> None:
    found = won.document
    assert found["confident"]
    assert found["confirmation"]["low"] > 0
    assert found["rewards"]["best"] > found["rewards"]["incumbent"]
    assert found["incumbent"]["target_waiting"] == 16
    assert {"commit", "settings", "trace", "seeds"} <= set(found["provenance"])
    yaml_settings = yaml.safe_load(won.text.split("For the model's settings:")[1])
    assert yaml_settings == found["recommended"]
    pool = {"name": "only", "engine": {"emulated": {"profile": "laptop"}}}
    read = settings_of({"models": [{"name": "m", "pools": [pool], **yaml_settings}]}).models[0].scheduler
    assert read.backpressure.target_waiting == found["best"]["target_waiting"]
    assert read.ewsjf.weights.b_u == found["best"]["b_u"]
    for name in ("default short", "default long"):
        assert f"| {name} " in won.text
        for side in ("incumbent", "best"):
            assert found["classes"][side][name]["ttft_p50_s"] <= found["classes"][side][name]["ttft_p99_s"]


def test_settings_that_cannot_be_improved_stay(tmp_path: Path) -> None:
    # With hardly any load no request waits, so no wait can shrink.
    inconclusive = tuned(tmp_path, "--rate", "0.5", "--only", "b_u,alpha")
    assert not inconclusive.document["confident"]
    assert "The current settings remain." in inconclusive.text
    assert "For the model's settings" not in inconclusive.text


def test_the_objective_of_the_paper_and_two_pools_can_be_selected(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["tune", "--trace", "paper-mix", "--profile", "laptop", "--pools", "short:1,long:1"]
    arguments += ["--b-short", "2000", "--requests", "300", "--window", "60", "--jobs", "1", "--rate", "10"]
    assert main([*arguments, "--objective", "paper", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert set(found["terms"]["incumbent"]) == {"compactness", "balance", "proliferation", "latency"}
    assert found["incumbent"]["b_short_tokens"] == 2_000


def test_tpe_proposes_candidates_after_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--rate", "20", "--only", "b_u,target_waiting", "--search", "tpe", "--proposals", "9") == 0
    assert "13 candidates: " in capsys.readouterr().out


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
