"""`experiments/run` with an experiment that flips coins."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from pydantic import TypeAdapter

from experiments.common.catalogue import Catalogue
from experiments.common.experiment import (
    Cell,
    Context,
    Experiment,
    Measurement,
    experiment_of_parts,
    play_cells,
)
from experiments.common.rows import read_rows
from experiments.common.run_command import main, partial_of
from serve_app.core.settings_base import settings
from serve_app.errors import SettingsError
from tests.experiments.conftest import PACKAGE

# An experiment that waits while it serves an application, which a shell script stands for.
SERVING_RUN = '''"""Does it end?"""

import asyncio, os, sys, time

import uvloop

from experiments.common.application import Application, serve_config, served_application
from experiments.common.experiment import Experiment
from serve_app.lab.simulation.run import parallel
from {package}.coin.settings import CoinSettings


def wait(pid):
    os.write(1, b"%d\\n" % pid)
    time.sleep(60)


async def wait_in_loop(pid):
    os.write(1, b"%d\\n" % pid)
    await asyncio.sleep(60)


def play(settings, context):
    python, sys.executable = sys.executable, {server!r}
    Application.fetched = lambda *_: ""
    with served_application(serve_config("test", {{}})) as served:
        sys.executable = python
        {wait}
    yield


EXPERIMENT = Experiment(settings=CoinSettings, play=play)
'''
SERVER = """#!/bin/sh
trap "exit 0" TERM
echo "Ready after 0 s"
while :; do sleep 0.1; done
"""
RUN = """
from experiments.common.run_command import *
unwind_on_signals()
sys.exit(main(['coin'], Catalogue(sys.argv[1])))
"""


def played(catalogue: Catalogue) -> list[str]:
    """Return the measured biases, in order."""
    return (catalogue.root.parent / "log").read_text().split()


def test_a_row_of_a_run_per_seed_is_played_unless_it_was_kept() -> None:
    cells = [Cell(key={"load": load}, runs=(load, 2 * load), seeds=(0, 1), traces=()) for load in (1, 2)]
    (one,) = play_cells("coin", cells, lambda run: {"figure": run}, Context(jobs=1, kept=[{"load": 1}]))
    assert (one.key, one.figures, one.seeds) == ({"load": 2}, {"figure": [2, 4]}, (0, 1))


@settings
class Toss:
    biases: Mapping[str, float]


def toss(one: Toss, context: Context) -> Iterator[Measurement]:
    for coin, bias in one.biases.items():
        if not context.has({"coin": coin}):
            yield Measurement(key={"coin": coin}, figures={"bias": bias})


def test_a_part_plays_with_its_own_settings_and_keys() -> None:
    part = Experiment(settings=Toss, play=toss)
    experiment = experiment_of_parts({"fair": part, "biased": part})
    fair, biased = {"biases": {"a": 0.5}}, {"biases": {"a": 0.7, "b": 0.8}}
    made = TypeAdapter(experiment.settings).validate_python(
        {"play": ["biased", "fair"], "fair": fair, "biased": biased}
    )
    first, second = experiment.play(made, Context(jobs=1, kept=[{"part": "biased", "coin": "a"}]))
    assert (first.key, first.settings) == ({"part": "biased", "coin": "b"}, biased)
    assert (second.key, second.settings) == ({"part": "fair", "coin": "a"}, fair)
    with pytest.raises(SettingsError, match="no part heads: there are fair, biased"):
        next(experiment.play(replace(made, play=("heads",)), Context(jobs=1)))


def test_rows_hold_what_is_needed_to_judge_and_repeat_them(catalogue: Catalogue) -> None:
    assert main(["coin"], catalogue) == 0
    first, second = (json.loads(line) for line in catalogue.results("coin").read_text().splitlines())
    assert (first["experiment"], first["key"], second["key"]) == ("coin", {"bias": 0.5}, {"bias": 0.75})
    assert first["seeds"] == [0, 1, 2]
    assert len(first["figures"]["share"]) == 3
    # Resolved settings: the default that config.yaml leaves out is included.
    assert (first["settings"]["flips"], first["settings"]["seeds"]) == (100, 3)
    assert {"commit", "machine", "measured_at", "traces"} <= set(first)
    assert len(first["machine"]["load_average"]) == 3


def test_a_quick_play_is_small_and_leaves_the_rows_alone(
    catalogue: Catalogue, capsys: pytest.CaptureFixture[str]
) -> None:
    catalogue.results("coin").write_text("")
    assert main(["--all", "--quick"], catalogue) == 0
    assert catalogue.results("coin").read_text() == ""
    assert "| 0.75 |" in capsys.readouterr().out


def test_a_quick_play_can_be_inspected(catalogue: Catalogue, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "rows.jsonl"
    assert main(["coin", "--quick", "--set", "seeds=2", "--out", str(out)], catalogue) == 0
    assert [(row.settings["flips"], row.seeds) for row in read_rows(out)] == [(10, (0, 1))] * 2


def test_an_interrupted_play_resumes(catalogue: Catalogue) -> None:
    assert main(["coin"], catalogue) == 0
    results = catalogue.results("coin")
    first, second = results.read_text().splitlines(keepends=True)
    # The machine failed while the last line was written.
    partial_of(results).write_text(first + second[:40])
    results.unlink()
    assert main(["coin", "--resume"], catalogue) == 0
    assert [row.key for row in read_rows(results)] == [{"bias": 0.5}, {"bias": 0.75}]
    assert played(catalogue) == ["0.5", "0.75", "0.75"]
    assert not partial_of(results).exists()


def as_in_the_background() -> None:
    """Ignore SIGINT, as a shell does for such commands, but not SIGHUP, as `nohup` does for these tests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize(
    "wait",
    ["wait(served.pid)", "uvloop.run(wait_in_loop(served.pid))", "list(parallel(wait, [served.pid] * 2, 2))"],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_play_ends_its_application(
    number: signal.Signals, wait: str, catalogue: Catalogue, tmp_path: Path
) -> None:
    server = tmp_path / "server"
    server.write_text(SERVER)
    server.chmod(0o755)
    run = catalogue.folder("coin") / "run.py"
    run.rename(run.with_name("settings.py"))
    run.write_text(SERVING_RUN.format(package=PACKAGE, server=str(server), wait=wait))
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", RUN, PACKAGE],
        env={**os.environ, "PYTHONPATH": f"{root}:{tmp_path}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_the_background,  # noqa: PLW1509 - one thread
    ) as outer:
        assert outer.stdout is not None
        application = psutil.Process(int(outer.stdout.readline()))
        try:
            outer.send_signal(number)
            _, errors = outer.communicate(timeout=30)
            assert not application.is_running()
            assert (outer.returncode, errors) == (130, "experiments/run: interrupted\n")
        finally:
            if application.is_running():
                application.kill()


def test_what_was_added_to_the_configuration_is_played_beside_the_rows_that_are_there(
    catalogue: Catalogue,
) -> None:
    assert main(["coin"], catalogue) == 0
    config = catalogue.config("coin")
    config.write_text(config.read_text().replace("0.75]", "0.75, 0.9]"))
    assert main(["coin", "--resume"], catalogue) == 0
    assert [row.key["bias"] for row in read_rows(catalogue.results("coin"))] == [0.5, 0.75, 0.9]
    assert played(catalogue) == ["0.5", "0.75", "0.9"]


def test_a_play_that_fails_leaves_the_old_rows(
    catalogue: Catalogue, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["coin"], catalogue) == 0
    before = catalogue.results("coin").read_text()
    config = catalogue.config("coin")
    config.write_text(config.read_text().replace("0.75]", "1.5]"))
    assert main(["coin"], catalogue) == 1
    assert "a bias is at most 1, got 1.5" in capsys.readouterr().err
    assert catalogue.results("coin").read_text() == before


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        ([], 2, "--list shows the names"),
        (["coin", "--all"], 2, "--list shows the names"),
        (["coin", "--set", "seeds=1"], 2, "results.jsonl holds what config.yaml says"),
        (["--all", "--out", "rows.jsonl"], 2, "name only one"),
        (["dice"], 1, "no experiment 'dice': there are coin"),
        (["coin", "--quick", "--set", "flops=1"], 1, "flops"),
        (["coin", "--quick", "--set", "flips"], 1, "path.to.key=VALUE"),
    ],
)
def test_an_experiment_that_cannot_run_ends_with_a_line_with_the_reason(
    argv: list[str], status: int, message: str, catalogue: Catalogue, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv, catalogue) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("unavailable=lambda: 'no coins here'", "no coins here"),
        ("only_by_name='coins are slow'", "coins are slow"),
    ],
)
def test_what_this_machine_cannot_play_or_only_plays_by_name_is_left_out_of_all(
    more: str, reason: str, catalogue: Catalogue, capsys: pytest.CaptureFixture[str]
) -> None:
    run = catalogue.folder("coin") / "run.py"
    run.write_text(run.read_text().replace("play=play)", f"play=play, {more})"))
    assert main(["--all"], catalogue) == 0
    assert f"coin: left out: {reason}" in capsys.readouterr().err
    assert not catalogue.results("coin").exists()
    assert main(["coin"], catalogue) == 0
    assert catalogue.results("coin").exists()


def test_the_list_has_the_question_of_each(catalogue: Catalogue, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"], catalogue) == 0
    assert capsys.readouterr().out.split(maxsplit=1) == ["coin", "How often does a coin fall on its face?\n"]
