import json
from pathlib import Path

import pytest

from serve_app.cli import main

SMALL = ["--profile", "laptop", "--requests", "300", "--seeds", "3", "--jobs", "1", "--candidates", "1"]


def plan(*arguments: str) -> int:
    limits = ["--slo-ttft-s", "1", "--slo-tpot-s", "0.05", "--b-short", "512,1024"]
    given = ["--trace", "paper-mix", "--rate", "30", "--profile-settings-only"]
    return main(["plan", *given, *SMALL, *limits, *arguments])


def test_a_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "plan.json"
    assert plan("--json", str(out)) == 0
    text = capsys.readouterr().out
    assert "| > paged-homogeneous" in text
    assert "Splitting" in text.splitlines()[-1]
    document = json.loads(out.read_text())
    names = [one["name"] for one in document["fleets"]]
    assert names == ["worst-case-homogeneous", "paged-homogeneous", "pools"]
    for one in document["fleets"]:
        assert one["replicas"] == sum(pool["replicas"] for pool in one["per_pool"].values())
        assert 0 < one["p99_ttft_s"] <= 1
        assert 0 < one["p99_tpot_s"] <= 0.05
        assert one["preemptions"] >= 0
        assert one["verification"]["meets"]
    pools = document["fleets"][2]
    assert isinstance(pools["closed_form_saving"], float)
    assert isinstance(pools["simulated_saving"], float)
    assert {"commit", "settings", "trace", "seeds"} <= set(document["provenance"])
    assert document["provenance"]["seeds"] == [0, 1, 2]


def test_a_large_fleet_is_simulated_as_a_stand_in_and_that_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert plan("--rate", "300", "--stand-in", "4", "--seeds", "1", "--json", str(out)) == 0
    captured = capsys.readouterr()
    assert "of its size, numbers scaled up" in captured.out
    assert "fewer than three seeds" in captured.err
    document = json.loads(out.read_text())
    paged = next(one for one in document["fleets"] if one["name"] == "paged-homogeneous")
    assert paged["simulated_share"] < 1 <= paged["headroom"]
    small = paged["verification"]["replicas"]["all"]
    assert paged["replicas"] > small
    twice = document["stand_ins_at_twice_the_size"]["paged-homogeneous"]
    assert twice["replicas"]["all"] == 2 * small
    assert twice["rate_per_s"] == pytest.approx(2 * paged["verification"]["rate_per_s"])


def test_limits_out_of_reach_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--slo-tpot-s", "0.001") == 0
    captured = capsys.readouterr()
    assert "No single pool with paged KV meets the limits" in captured.out
    assert "the worst-case fleet meets the limits at no size" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "abacus"], "no engine profile 'abacus'"),
        (["--costs", "nowhere.yaml"], "nowhere.yaml is not a table of GPU costs"),
        (["--set", "backpressure"], "--set takes PATH=VALUE"),
        (["--stand-in", "2"], "a stand-in needs at least 4"),
        (["--arrivals", "tides"], "no arrivals 'tides'"),
    ],
)
def test_invalid_arguments_end_with_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
