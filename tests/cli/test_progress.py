"""Progress bars of long commands: work done, time left, and silence in a pipe."""

import json
import re
from pathlib import Path

import pytest

from serve_app.cli import main
from serve_app.cli.command import progress_bar

SIMULATE = ["simulate", "--trace", "paper-mix", "--profile", "laptop", "--replicas", "1", "--requests", "150"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    # rich then treats any output as a terminal.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")


def plain(shown: str) -> str:
    """Strip colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


def bars(shown: str) -> dict[str, tuple[int, int]]:
    """Return the last state of each bar: steps done and total."""
    found = re.findall(r"([a-z][a-z0-9. ]*?) [━╸╺ ]+ *(\d+)/(\d+) ", plain(shown))
    return {name: (int(done), int(total)) for name, done, total in found}


@pytest.mark.usefixtures("terminal")
def test_a_bar_shows_the_remaining_time(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("steps", 4) as advance:
        advance()
        advance(3)
    assert re.search(r"4/4 \d:\d\d:\d\d left \d:\d\d:\d\d", plain(capsys.readouterr().err))


@pytest.mark.usefixtures("terminal")
def test_a_single_run_counts_its_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATE, "--load", "0.8"]) == 0
    assert bars(capsys.readouterr().err) == {"rates at load 1.0": (1, 1), "requests": (150, 150)}


@pytest.mark.usefixtures("terminal")
def test_runs_one_after_the_other_count_all_their_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = ["--rate", "5", "--policy", "direct,fcfs", "--seeds", "2", "--jobs", "1", "--json", str(out)]
    assert main([*SIMULATE, *arguments]) == 0
    assert bars(capsys.readouterr().err) == {"rates at load 1.0": (2, 2), "requests": (600, 600)}
    assert [run["whole_run"]["completed"] for run in json.loads(out.read_text())["runs"]] == [150] * 4


@pytest.mark.usefixtures("terminal")
def test_a_replay_counts_decisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    assert main([*SIMULATE, "--policy", "fcfs,ewsjf", "--rate", "5", "--log", str(log)]) == 0
    decisions = len(log.read_text().splitlines()) - 2
    capsys.readouterr()
    assert main(["replay", str(log)]) == 0
    assert bars(capsys.readouterr().err) == {"decisions": (decisions, decisions)}


def test_a_pipe_sees_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATE, "--load", "0.8"]) == 0
    assert capsys.readouterr().err == ""
