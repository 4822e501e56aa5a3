"""Receipts of programs from a real scheduler on a manual clock."""

import asyncio
from typing import Any

import pytest

from serve_app.core import events as ev
from serve_app.request import ProgramHint, RequestTimes, TurnEnd, Usage
from serve_app.serving.scheduler import receipts
from serve_app.serving.scheduler.receipts import programs_named
from tests.builders import request
from tests.core.programs.builders import ProgramDriver, fleet
from tests.serving.scheduler.test_receipts import HistoryHarness


class ProgramHarness(HistoryHarness):
    """A scheduler with one replica that has room for one context of 60,000 tokens."""

    driver: ProgramDriver

    def __init__(self) -> None:
        super().__init__(fleet("s1"), most=100)

    def submit(self, request_id: str, session: str, *, blocks: int = 400, **fields: Any) -> None:
        arrival = request(
            request_id,
            prompt_tokens=60_000,
            arrived_at=self.driver.now,
            program=ProgramHint(session=session, program="job", **fields),
            prefix=tuple(hash((session, number)) for number in range(blocks)),
            messages=blocks,
            streamed=True,
        )
        self.arrive(arrival)

    def answer(self, request_id: str, usage: Usage, *, first_token_s: float, after_s: float) -> None:
        self.feed(ev.FirstToken(request_id), after_s=first_token_s)
        times = RequestTimes("/v1/chat/completions", 0.0, 0.0, first_token_s, first_token_s + after_s)
        self.end(request_id, times, usage, after_s=after_s)

    def document(self, name: str = "job") -> list[dict[str, Any]]:
        found = asyncio.run(programs_named(name, self.driver.scheduler, self.history, self.driver.now))
        programs: list[dict[str, Any]] = found["programs"]
        return programs


def usage(prompt: int, cached: int = 0, ending: TurnEnd = TurnEnd.TOOLS) -> Usage:
    return Usage(prompt_tokens=prompt, output_tokens=100, cached_tokens=cached, ending=ending)


def test_the_time_of_a_program_is_divided_by_what_it_was_spent_on() -> None:
    harness = ProgramHarness()
    harness.submit("a1", "root")
    harness.answer("a1", usage(60_000), first_token_s=6.0, after_s=2.0)
    harness.driver.now += 10.0
    harness.submit("a2", "root", blocks=410)
    # 60,100 tokens were in the context, and 40,000 of them were still cached.
    harness.answer("a2", usage(62_000, 40_000, TurnEnd.DONE), first_token_s=2.0, after_s=1.0)
    harness.driver.now += 100.0
    harness.submit("a3", "root", blocks=420)
    (found,) = harness.document()
    assert (found["program"], found["state"], found["turns"]) == ("job", "running", 2)
    assert (found["first_token_s"], found["generation_s"], found["engine_s"]) == (8.0, 3.0, 11.0)
    assert (found["tool_gap_s"], found["gap_s"]) == (10.0, 110.0)
    assert found["tokens"] == {"prompt": 122_000, "cached": 40_000, "again": 20_100, "output": 200}
    first, second, third = found["last_turns"]
    assert [each["request_id"] for each in (first, second, third)] == ["a1", "a2", "a3"]
    assert (first["gap_s"], second["gap_s"], third["gap_s"]) == (None, 10.0, 100.0)
    assert (second["first_token_s"], second["generation_s"], second["cached_tokens"]) == (2.0, 1.0, 40_000)
    # The gateway reports the times of a turn at its end.
    assert (third["state"], third["engine_s"], third["prompt_tokens"]) == ("open", None, None)


def test_sub_agents_and_their_waits_for_room_belong_to_the_program() -> None:
    harness = ProgramHarness()
    harness.submit("a1", "root")
    harness.submit("b1", "helper", parent="root")
    harness.driver.now += 5.0
    assert [(each["session"], each["is_sub_agent"]) for each in harness.document()[0]["last_turns"]] == [
        ("root", False),
        ("helper", True),
    ]
    waiting = harness.document()[0]["last_turns"][1]
    assert (waiting["queued_s"], waiting["waiting_s"]) == (5.0, None)
    harness.answer("a1", usage(60_000, ending=TurnEnd.DONE), first_token_s=1.0, after_s=1.0)
    harness.driver.wake()
    found = harness.document()[0]
    assert found["conversations"] == 2


def test_only_the_last_turns_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "_MOST_TURNS", 2)
    monkeypatch.setattr(receipts, "_LOOKED_AT", 1)
    harness = ProgramHarness()
    for number in range(3):
        harness.submit(f"a{number}", "root", blocks=400 + number)
        harness.answer(f"a{number}", usage(60_000), first_token_s=1.0, after_s=1.0)
    assert [each["request_id"] for each in harness.document()[0]["last_turns"]] == ["a1", "a2"]


def test_an_unknown_program_has_no_receipt() -> None:
    assert ProgramHarness().document("unknown") == []
