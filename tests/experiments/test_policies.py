"""The script around `simulation.experiment`: what it writes, what it prints, how it goes on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_policies.py"

EXPERIMENT = """
profiles: [laptop]
replicas: 1
seeds: 2
requests: 80
variants:
  fcfs: {}
  sjf: {}
  chunked: {policy: fcfs, engine: {long_prefill_token_threshold: 64}}
  lost: {policy: lost}
cases: [{trace: paper-mix, loads: [0.5, 1.0]}]
"""


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.slow
def test_an_interrupted_experiment_goes_on_where_it_was(tmp_path: Path) -> None:
    experiment, out = tmp_path / "experiment.yaml", tmp_path / "deep" / "out.jsonl"
    experiment.write_text(EXPERIMENT)
    plain = ["--experiment", str(experiment), "--out", str(out), "--jobs", "1"]
    done = bench(*plain)
    assert done.returncode == 0, done.stderr
    assert "no such policies, left out: lost" in done.stderr
    lines = out.read_text().splitlines()
    assert len(lines) == 1 + 3 * 2 * 2
    assert {"commit", "experiment", "hardware"} <= set(json.loads(lines[0])["provenance"])

    # The last line was being written when the machine went down.
    out.write_text("\n".join(lines[:-3]) + "\n" + lines[-3][:40])
    resumed = bench(*plain, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    again = out.read_text().splitlines()
    assert len(again) == len(lines) + 1
    assert figures(again) == figures(lines)
    table = bench("--out", str(out), "--table").stdout
    assert table == resumed.stdout
    assert table.count("| 0.5 ") == table.count("| 1.0 ") == 3


def key(line: str) -> tuple[object, ...]:
    row = json.loads(line)
    return (row["case"], row["profile"], row["load"], row["policy"], row["seed"])


def figures(lines: list[str]) -> dict[tuple[object, ...], object]:
    return {key(line): json.loads(line)["metrics"] for line in lines if "provenance" not in json.loads(line)}


def test_an_experiment_that_cannot_be_read_ends_with_one_line(tmp_path: Path) -> None:
    done = bench("--experiment", str(tmp_path / "none.yaml"), "--out", str(tmp_path / "out.jsonl"))
    assert done.returncode == 2
    assert "is not an experiment" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.jsonl").exists()
