import json
import math
from pathlib import Path

import pytest

from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.scheduling.commands import Conclude, Dispatch
from serve_app.scheduling.events import Arrived, Finished, ReplicaJoined, Woke
from serve_app.serving.scheduler.decision_log import (
    Decision,
    DecisionLog,
    DecisionLogSettings,
    read_decisions,
)
from tests import builders

DISPATCH = Dispatch(
    request_id="r1",
    gateway_id="g1",
    replica_id="s1",
    pool="short",
    length_queue="all",
    estimated_tokens=50,
    queue_wait_s=0.1,
)


def test_what_is_written_is_read_again_exactly(tmp_path: Path) -> None:
    steps = [
        Decision(0.1, ReplicaJoined(builders.spec()), []),
        Decision(1 / 3, Arrived(builders.request(expires_at=math.inf)), [DISPATCH]),
        Decision(
            2.5,
            Finished("r1", Outcome.COMPLETED, Usage(prompt_tokens=1, output_tokens=2)),
            [Conclude(request_id="r1", gateway_id="g1", outcome=Outcome.COMPLETED, dispatched=True)],
        ),
        Decision(3.0, Woke(), []),
    ]
    log = DecisionLog(tmp_path / "new" / "log.jsonl", 100, {"now": 0.0})
    for step in steps:
        log.add(step.now, step.event, step.commands)
    log.close()
    header, decisions = read_decisions(tmp_path / "new" / "log.jsonl")
    assert header == {"now": 0.0}
    assert list(decisions) == steps


def test_the_log_ends_at_its_limit_and_says_so(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log.jsonl", 2, {})
    for n in range(5):
        log.add(float(n), Woke(), [])
    log.close()
    _, decisions = read_decisions(tmp_path / "log.jsonl")
    assert [decision.now for decision in decisions] == [0.0, 1.0]
    last = (tmp_path / "log.jsonl").read_text().splitlines()[-1]
    assert json.loads(last) == {"ended": "max_events reached"}


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_events must be at least 1, got 0"):
        DecisionLogSettings(path="x", max_events=0)
