"""The snapshot of programs for operators."""

from typing import Any

import pytest

from serve_app.core.programs import program_scheduler
from serve_app.core.programs.program_scheduler import programs_document
from tests.core.programs.builders import ProgramDriver, fleet


def rows_of(driver: ProgramDriver) -> dict[str, dict[str, Any]]:
    document = programs_document(driver.programs, driver.now, 10)
    return {row["program"]: row for row in document["rows"]}


def test_a_program_is_running_waiting_or_in_a_gap() -> None:
    driver = fleet("s1")
    driver.start_turn("a1", "a")
    driver.start_turn("b1", "b", tenant="t2")
    driver.now = 5.0
    rows = rows_of(driver)
    assert (rows["a"]["state"], rows["a"]["replicas"], rows["a"]["turns"]) == ("running", ("s1",), 0)
    assert (rows["b"]["state"], rows["b"]["replicas"], rows["b"]["tenant"]) == ("waiting", (), "t2")
    driver.end_turn("a1", after_s=5.0)
    ended = rows_of(driver)["a"]
    assert (ended["state"], ended["turns"], ended["context_tokens"]) == ("in a gap", 1, 60_000)
    assert (ended["queued_s"], ended["engine_s"], ended["age_s"]) == (0.0, 10.0, 10.0)


def test_the_document_counts_recent_programs_and_shows_the_last_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = fleet("s1")
    for number in range(4):
        driver.start_turn(f"r{number}", f"p{number}", prompt_tokens=1_000)
        driver.end_turn(f"r{number}", context=1_000, after_s=1.0)
    driver.start_turn("again", "p2", prompt_tokens=1_500)
    driver.end_turn("again", context=1_500, after_s=3.0)
    document = programs_document(driver.programs, driver.now, 2)
    assert (document["known"], document["recent_by_state"], document["turns"]) == (4, {"in a gap": 4}, 5)
    assert [row["program"] for row in document["rows"]] == ["p2", "p3"]
    assert document["rows"][0]["gap_s"] == 1.0
    monkeypatch.setattr(program_scheduler, "_EXAMINED", 3)
    document = programs_document(driver.programs, driver.now, 2)
    assert (document["known"], document["recent_by_state"]) == (4, {"in a gap": 3})
