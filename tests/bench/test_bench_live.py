"""The script's tables, from a file as a run leaves it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.metrics.builders import record

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_live.py"
REQUESTS = 20
# Repeat 1 is slower for everybody, by the same.
TTFT_S = {("fcfs", 0): 4.0, ("fcfs", 1): 5.0, ("ewsjf", 0): 1.0, ("ewsjf", 1): 2.0}


def table(path: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--table", "--out", str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
    )
    return done.stdout


def lines() -> Iterator[dict[str, Any]]:
    yield {"provenance": {}}
    yield {"saturated_per_s": {"fcfs": 2.0, "ewsjf": 2.0}}
    for (variant, repeat), ttft_s in TTFT_S.items():
        yield {
            "run": {
                "variant": variant,
                "repeat": repeat,
                "short_at_tokens": 512,
                "trace": {"requests": REQUESTS},
                "engine_cores": 0.5,
                "load_average": [1.5, 1.0, 1.0],
                "engine": {
                    "steps": 50,
                    "step_tokens": 1_000,
                    "started": 20,
                    "queue_wait_s": 10.0,
                    "preemptions": 0,
                },
            }
        }
        for number in range(REQUESTS):
            # The first tenth is the warm-up.
            first_token_at = number + (1_000 if number < 2 else ttft_s)
            one = record(
                arrived_at=float(number),
                dispatched_at=float(number),
                first_token_at=first_token_at,
                finished_at=first_token_at + 1,
                prompt_tokens=100 if number % 2 else 1_000,
            )
            yield {"variant": variant, "repeat": repeat, "record": asdict(one)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "live.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines()))
    return file


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_figures_are_means_over_repeats_without_the_warm_up(path: Path) -> None:
    head, _, fcfs, ewsjf = table(path).split("\n\n")[0].splitlines()
    assert cells(head)[:5] == ["policy", "n", "short TTFT mean s", "short TTFT p50 s", "short TTFT p99 s"]
    # Two values 1 apart: half the interval is 12.706 times half of it.
    assert cells(fcfs)[:3] == ["fcfs", "2", "4.50 ± 6.35"]
    assert cells(ewsjf)[:3] == ["ewsjf", "2", "1.50 ± 6.35"]


def test_differences_are_taken_repeat_by_repeat(path: Path) -> None:
    _, _, heading, differences = table(path).split("\n\n")
    assert heading == "less fcfs:"
    assert cells(differences.splitlines()[2])[:3] == ["ewsjf", "2", "-3.00 ± 0.00"]


def test_the_engine_tells_what_its_steps_computed(path: Path) -> None:
    engine = table(path).split("\n\n")[1].splitlines()
    row = dict(zip(cells(engine[0]), cells(engine[2]), strict=True))
    assert row["tokens per step"] == "20.0 ± 0.0"
    assert row["engine wait mean s"] == "0.50 ± 0.00"
    assert row["engine cores"] == "0.50 ± 0.00"
    assert row["load average"] == "1.5 ± 0.0"


def test_a_run_that_lost_a_request_is_named(path: Path) -> None:
    kept = path.read_text().splitlines()[:-1]
    path.write_text("\n".join(kept))
    printed = table(path)
    assert "not the same work: ewsjf, seed 1: only 19 of 20 requests completed" in printed
    assert "not the same work in repeat 1" in printed
