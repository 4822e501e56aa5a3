"""The script that measures the scheduler's own cost: it measures whole requests of full fleets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_dispatch.py"


@pytest.mark.slow
def test_every_request_of_a_window_is_counted_from_arrival_to_end(tmp_path: Path) -> None:
    out = tmp_path / "dispatch.json"
    size = ["--replicas", "2", "4", "--places", "8", "--requests", "400", "--repeats", "2"]
    command = [sys.executable, str(SCRIPT), *size, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {(row["decider"], row["replicas"]) for row in rows} == {
        (decider, replicas)
        for decider in (
            *("ewsjf, affinity", "ewsjf, by load", "fcfs, affinity", "fcfs, by load"),
            *("round robin", "power of two", "scan"),
        )
        for replicas in (2, 4)
    }
    for row in rows:
        assert row["submitted"] == 800
        # Who waits at one end of a window leaves in another one; the fleets hold 16 and 32 requests.
        assert abs(row["dispatched"] - row["submitted"]) <= 32
        assert 0.6 < row["taken"] <= 1.1, row["decider"]
        parts = [row["events_us"][kind]["p50"] for kind in ("submit", "dispatch", "first token", "finish")]
        assert sum(parts) == pytest.approx(row["request_us"]["mean"], rel=0.5)
        assert (row["of_smallest"]["mean"] == 1) is (row["replicas"] == 2)


def test_it_refuses_a_decider_that_there_is_not() -> None:
    command = [sys.executable, str(SCRIPT), "--deciders", "lottery"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "lottery" in done.stderr
    assert "Traceback" not in done.stderr
