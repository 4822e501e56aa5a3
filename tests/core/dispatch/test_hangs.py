"""Hang detection: engines that received requests and show no progress."""

from typing import Any

import pytest

from serve_app.core.commands import Command, EngineSilent
from serve_app.core.events import (
    Cancelled,
    DispatchFailed,
    DispatchFailure,
    Finished,
    FirstToken,
    ReplicaJoined,
)
from serve_app.errors import Outcome
from tests.builders import ManualDriver, dispatched, one_replica, spec

LIMIT_S = 60.0


def watched(**limits: Any) -> ManualDriver:
    return one_replica("e", limits={"stall_timeout_s": LIMIT_S, "max_num_seqs": None, **limits})


def report(driver: ManualDriver, seconds: int = 1, *, computes: bool | None = None) -> list[Command]:
    """Report no requests every second, as an engine does that hung while idle."""
    every = [driver.report("e", after_s=1.0, received=None, computes=computes) for _ in range(seconds)]
    return [command for commands in every for command in commands]


def hang(driver: ManualDriver) -> list[Command]:
    """Dispatch two requests without progress for longer than the limit."""
    for name in ("a", "b"):
        assert dispatched(driver.arrive(name)) == [(name, "e")]
    return report(driver, 62)


def test_an_engine_without_progress_receives_no_requests_and_is_reported_once() -> None:
    driver = watched()
    silent = [each for each in hang(driver) if isinstance(each, EngineSilent)]
    assert [each.replica_id for each in silent] == ["e"]
    assert silent[0].silent_s == pytest.approx(61.0)
    assert dispatched(driver.arrive("c")) == []


def test_a_hang_rejects_no_request() -> None:
    driver = watched()
    hang(driver)
    driver.arrive("c")
    report(driver, 60)
    assert driver.find("c").queued


@pytest.mark.parametrize("sign", ["first token", "end", "progress"])
def test_progress_opens_it_again(sign: str) -> None:
    driver = watched()
    hang(driver)
    driver.arrive("c")
    match sign:
        case "first token":
            commands = driver.feed(FirstToken("a"))
        case "end":
            commands = driver.feed(Finished("a", Outcome.COMPLETED))
        case _:
            commands = report(driver, computes=True)
    assert dispatched(commands) == [("c", "e")]
    later = commands + report(driver)
    assert [each.silent_s for each in later if isinstance(each, EngineSilent)] == [0.0]


def test_regular_progress_keeps_it_open_during_a_long_answer() -> None:
    driver = watched()
    driver.arrive("a")
    for _ in range(10):
        report(driver, 50)
        report(driver, computes=True)
    assert dispatched(driver.arrive("b")) == [("b", "e")]
    report(driver, 50)
    driver.feed(FirstToken("b"))
    report(driver, 50)
    assert dispatched(driver.arrive("c")) == [("c", "e")]


def test_an_engine_without_outstanding_answers_does_not_hang() -> None:
    driver = watched()
    driver.arrive("whole", streamed=False)
    driver.arrive("begun")
    driver.feed(FirstToken("begun"))
    report(driver, 100)
    assert dispatched(driver.arrive("c")) == [("c", "e")]


@pytest.mark.parametrize("end", ["cancelled", "put back"])
def test_time_counts_from_the_first_dispatch_to_an_idle_engine(end: str) -> None:
    driver = watched()
    driver.arrive("a")
    report(driver, 50)
    if end == "put back":
        # It is dispatched again at once, and put back.
        driver.feed(DispatchFailed("a", "e", DispatchFailure.BUSY))
    driver.feed(Cancelled("a"))
    report(driver, 20)
    assert dispatched(driver.arrive("b")) == [("b", "e")]
    report(driver, 50)
    assert dispatched(driver.arrive("c")) == [("c", "e")]
    report(driver, 12)
    assert dispatched(driver.arrive("d")) == []


def test_after_its_requests_end_it_receives_one_at_a_time_until_an_answer() -> None:
    driver = watched()
    hang(driver)
    driver.feed(Cancelled("a"))
    driver.arrive("c")
    assert driver.find("c").queued
    assert dispatched(driver.feed(Cancelled("b"))) == [("c", "e")]
    assert dispatched(driver.arrive("d")) == []
    assert dispatched(driver.feed(FirstToken("c"))) == [("d", "e")]


def test_a_replica_that_joins_again_does_not_count_as_hanging() -> None:
    driver = watched()
    hang(driver)
    driver.feed(ReplicaJoined(spec("e", "only", max_num_seqs=None, stall_timeout_s=LIMIT_S)))
    report(driver)
    assert dispatched(driver.arrive("c")) == [("c", "e")]


def test_a_hosted_engine_is_watched_too() -> None:
    driver = watched(stall_timeout_s=None)
    hang(driver)
    assert dispatched(driver.arrive("c")) == [("c", "e")]
