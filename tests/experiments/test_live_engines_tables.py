"""The tables of policies on real engines, from rows as a play leaves them."""

from collections.abc import Sequence

import pytest

from experiments.common.rows import Row
from experiments.live_engines.tables import TABLES
from tests.experiments.builders import row

# Repeat 1 is slower for everybody, by the same.
SHORT_TTFT_S = {"fcfs": [4.0, 5.0], "ewsjf": [1.0, 2.0]}


def engine_row(policy: str, completed: Sequence[int] = (20, 20)) -> Row:
    constant = {
        name: [1.0, 1.0]
        for name in (
            *(
                "short_ttft_p50_s",
                "short_ttft_p99_s",
                "long_ttft_mean_s",
                "long_ttft_p50_s",
                "long_ttft_p99_s",
            ),
            *("queue_wait_max_s", "tpot_mean_s", "goodput_per_s", "tokens_per_s", "gateway_wait_mean_s"),
            *("engine_wait_mean_s", "steps", "preemptions", "tokens_per_step", "engine_cores"),
        )
    }
    work = {
        "requests": [20, 20],
        "completed": list(completed),
        "prompt_tokens": [100 * done for done in completed],
        "output_tokens": [400, 400],
    }
    figures = {**constant, **work, "short_ttft_mean_s": SHORT_TTFT_S[policy]}
    return row({"policy": policy}, figures, experiment="live_engines", seeds=(0, 1))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture
def rows() -> list[Row]:
    return [engine_row(policy) for policy in SHORT_TTFT_S]


def test_figures_are_means_over_repeats(rows: list[Row]) -> None:
    head, _, fcfs, ewsjf = TABLES["headline"].written(rows).split("\n\n")[0].splitlines()
    assert cells(head) == ["policy", "short TTFT mean, s", "long mean, s"]
    # Two values 1 apart: half the interval is 12.706 times half of it.
    assert cells(fcfs)[:2] == ["fcfs", "4.50 ± 6.35"]
    assert cells(ewsjf)[:2] == ["ewsjf", "1.50 ± 6.35"]


def test_differences_are_taken_repeat_by_repeat(rows: list[Row]) -> None:
    head, _, differences = TABLES["differences"].written(rows).split("\n\n")[0].splitlines()
    assert cells(head)[0] == "less fcfs"
    assert cells(differences)[:2] == ["ewsjf", "-3.00 ± 0.00"]


def test_a_run_that_lost_a_request_is_named() -> None:
    written = TABLES["clients"].written([engine_row("fcfs"), engine_row("ewsjf", completed=(20, 19))])
    assert "Not the same work: ewsjf, repeat 1: 19 of 20 completed." in written
    assert "Not the same work in repeat 1: prompt tokens (2000, 1900)." in written
    assert "repeat 0" not in written
