"""Decision log of a live scheduler: bounded, and never blocking."""

import json
from pathlib import Path

import pytest

from serve_app.core.decision_log import RunHeader, read_runs
from serve_app.core.events import Woke
from serve_app.errors import ServeAppError
from serve_app.serving.scheduler.journal import DecisionLogFile, DecisionLogSettings, Entry
from tests import builders
from tests.serving.scheduler.journals import pass_to

HEADER = RunHeader(settings=builders.settings())


def test_the_log_ends_at_its_limit_with_a_message(tmp_path: Path) -> None:
    log = DecisionLogFile(tmp_path / "new" / "log.jsonl", 2, HEADER)
    for n in range(5):
        pass_to(log, Entry(builders.ManualDriver().scheduler, float(n), Woke(), []))
    log.close()
    lines = (tmp_path / "new" / "log.jsonl").read_text().splitlines()
    (run,) = read_runs(lines)
    assert [decision.now for _, decision in run.decisions] == [0.0, 1.0]
    assert json.loads(lines[-1]) == {"ended": "max_events reached"}


def test_a_limit_below_one_is_rejected() -> None:
    with pytest.raises((ValueError, ServeAppError), match="max_events must be at least 1, got 0"):
        DecisionLogSettings(path="x", max_events=0)
