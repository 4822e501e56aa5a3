"""Decision log: an exact round trip, and a replay with equal commands."""

import json
import math
from pathlib import Path

import pytest

from serve_app import cli
from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.decision_log import (
    Decision,
    DecisionLogError,
    RunHeader,
    encode_decision,
    encode_end,
    encode_header,
    read_runs,
    replay,
)
from serve_app.core.events import Arrived, Cancelled, Event, Finished, ReplicaJoined, ReplicaReported, Woke
from serve_app.errors import Conclusion, Outcome
from serve_app.request import ProgramHint, RequestTimes, TurnEnd, Usage
from tests import builders
from tests.core.programs.builders import fleet

DISPATCH = Dispatch(
    request_id="r1",
    gateway_id="g1",
    replica_id="s1",
    pool="short",
    length_queue="all",
    estimated_tokens=50,
    queue_wait_s=0.1,
)
HEADER = RunHeader(settings=builders.settings(), now=0.5, learned={"a": 1.5}, run={"seed": 7})
TIMES = RequestTimes("/v1/completions", 0.1, 0.2, 0.3, 0.5)
STEPS = (
    Decision(0.1, ReplicaJoined(builders.spec()), ()),
    Decision(1 / 3, Arrived(builders.request(expires_at=math.inf)), (DISPATCH,)),
    Decision(
        2.5,
        Finished("r1", Outcome.COMPLETED, Usage(prompt_tokens=1, output_tokens=2)),
        (
            Conclude(
                request_id="r1",
                gateway_id="g1",
                conclusion=Conclusion(Outcome.COMPLETED),
                dispatched=True,
            ),
        ),
    ),
    Decision(3.0, Woke(), ()),
)


def played(driver: builders.ManualDriver, *events: Event) -> list[str]:
    """Return the log of a scheduler that is fed these events, one per second."""
    lines = [encode_header(RunHeader(settings=driver.scheduler.settings))]
    for event in events:
        commands = driver.feed(event, after_s=1.0)
        lines.append(encode_decision(Decision(driver.now, event, tuple(commands))))
    return lines


def test_a_log_is_read_exactly_as_written() -> None:
    lines = [encode_header(HEADER), *map(encode_decision, STEPS), encode_end("max_events reached")]
    (run,) = read_runs(lines)
    assert run.header == HEADER
    assert [decision for _, decision in run.decisions] == list(STEPS)
    assert [number for number, _ in run.decisions] == [2, 3, 4, 5]


def test_what_only_receipts_need_is_not_logged() -> None:
    arrival, named = builders.request(), builders.request()
    named.client_request_id, named.grants = "secret", 2
    end, timed = (Finished("r1", Outcome.COMPLETED, None, times) for times in (None, TIMES))
    for plain, event in ((Arrived(arrival), Arrived(named)), (end, timed)):
        assert encode_decision(Decision(1.0, event, ())) == encode_decision(Decision(1.0, plain, ()))


def test_a_replay_reports_the_first_line_that_differs() -> None:
    replica = ReplicaJoined(builders.spec()), ReplicaReported("s1", builders.report())
    lines = played(builders.ManualDriver(), *replica, Arrived(builders.request()))
    lines[3] = lines[3].replace('"pool":"short"', '"pool":"long"')
    (run,) = read_runs(lines)
    difference = replay(run)
    assert difference is not None
    assert difference.line == 4
    assert "pool='long'" in str(difference)
    assert "pool='short'" in str(difference)


def test_the_log_of_programs_replays_equally_and_mentions_them_only_at_their_turns() -> None:
    hint = ProgramHint(session="agent", parent="root")
    turns = [Arrived(builders.request(name, prompt_tokens=60_000, program=hint)) for name in "ab"]
    usage = Usage(prompt_tokens=60_000, output_tokens=10, ending=TurnEnd.TOOLS)
    ended = Finished("a", Outcome.COMPLETED, usage)
    plain = Finished("r1", Outcome.COMPLETED, Usage(prompt_tokens=40, output_tokens=10))
    events: list[Event] = [*turns, ended, Woke(), Woke(), Cancelled("b"), Arrived(builders.request()), plain]
    replica = builders.spec("s1", "only", max_model_len=90_000, kv_tokens=100_000)
    lines = played(fleet(), ReplicaJoined(replica), ReplicaReported("s1", builders.report()), *events)
    mentions = [place for place, line in enumerate(lines) if '"program"' in line or '"ending"' in line]
    assert mentions == [3, 4, 5]
    (run,) = read_runs(lines)
    assert replay(run) is None
    assert [decision.event for _, decision in run.decisions][2:] == events
    sent = [each for _, decision in run.decisions for each in decision.commands if isinstance(each, Dispatch)]
    assert [each.request_id for each in sent] == ["a", "b", "r1"]


def test_a_header_with_a_field_of_an_earlier_version_is_read() -> None:
    (run,) = read_runs([encode_header(HEADER).replace("{", '{"not_replayable":"",', 1)])
    assert run.header == HEADER


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["nonsense"], "line 1 is not JSON"),
        ([encode_decision(STEPS[3])], "line 1 is neither a header nor a decision of a run"),
        ([encode_header(HEADER), '[1.0,"Flew",{},[]]'], "line 2 is not a decision of this version"),
        ([encode_header(HEADER), '[1.0,"Arrived",{},[]]'], "line 2 is not a valid Arrived"),
        (['{"settings":{"modell":"m"}}'], "line 1 is not a valid RunHeader"),
    ],
)
def test_lines_of_another_format_are_rejected_by_number(lines: list[str], words: str) -> None:
    with pytest.raises(DecisionLogError, match=words):
        list(read_runs(lines))


@pytest.mark.application
@pytest.mark.parametrize("trace", ["lmsys", pytest.param("azure-code", marks=pytest.mark.slow)])
def test_a_simulated_log_replays_through_the_command(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "out" / "decisions.jsonl"
    run = ["simulate", "--trace", trace, "--policy", "direct,fcfs,ewsjf,hrrn", "--requests", "150"]
    more = ["--pools", "short:1,long:1", "--b-short", "4096", "--load", "1.1", "--tenants", "3"]
    assert cli.main([*run, *more, "--jobs", "1", "--log", str(log)]) == 0
    assert cli.main(["replay", str(log), "--json", str(tmp_path / "replay.json")]) == 0
    rows = json.loads((tmp_path / "replay.json").read_text())["runs"]
    assert [row["run"]["policy"] for row in rows] == ["fcfs", "ewsjf", "hrrn"]
    assert all(row["same"] and row["commands"] >= 300 for row in rows)

    log.write_text(log.read_text().replace('"pool":"short"', '"pool":"long"', 1))
    assert cli.main(["replay", str(log)]) == 1
    assert "the replay Dispatch" in capsys.readouterr().out


def test_a_missing_log_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["replay", str(tmp_path / "none")]) == 2
    assert "cannot read" in capsys.readouterr().err
    (tmp_path / "empty").touch()
    assert cli.main(["replay", str(tmp_path / "empty")]) == 2
    assert "has no run" in capsys.readouterr().err
