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


def let_hang(driver: ManualDriver) -> list[Command]:
    """Dispatch two requests without progress for longer than the limit."""
    for name in ("a", "b"):
        assert dispatched(driver.arrive(name)) == [(name, "e")]
    return report(driver, 62)


def test_an_engine_with_requests_and_no_progress_gets_nothing_more_and_is_reported_once() -> None:
    driver = watched()
    silent = [each for each in let_hang(driver) if isinstance(each, EngineSilent)]
    assert [each.replica_id for each in silent] == ["e"]
    assert silent[0].silent_s == pytest.approx(61.0)
    assert dispatched(driver.arrive("c")) == []


def test_no_request_is_rejected_for_it_since_it_may_only_be_slow() -> None:
    driver = watched()
    let_hang(driver)
    driver.arrive("c")
    report(driver, 60)
    assert driver.find("c").queued


@pytest.mark.parametrize("sign", ["first token", "end", "progress"])
def test_a_sign_of_life_opens_it_again(sign: str) -> None:
    driver = watched()
    let_hang(driver)
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


def test_signs_in_time_keep_it_open_however_long_one_answer_takes() -> None:
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


def test_one_that_owes_nothing_may_be_silent_for_ever() -> None:
    driver = watched()
    driver.arrive("whole", streamed=False)
    driver.arrive("begun")
    driver.feed(FirstToken("begun"))
    report(driver, 100)
    assert dispatched(driver.arrive("c")) == [("c", "e")]


@pytest.mark.parametrize("end", ["cancelled", "put back"])
def test_time_is_counted_from_the_first_dispatch_to_an_engine_that_owes_nothing(end: str) -> None:
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


def test_when_its_requests_have_gone_it_is_sent_one_at_a_time_until_one_is_answered() -> None:
    driver = watched()
    let_hang(driver)
    driver.feed(Cancelled("a"))
    driver.arrive("c")
    assert driver.find("c").queued
    assert dispatched(driver.feed(Cancelled("b"))) == [("c", "e")]
    assert dispatched(driver.arrive("d")) == []
    assert dispatched(driver.feed(FirstToken("c"))) == [("d", "e")]


def test_a_replica_that_joins_again_does_not_count_as_hanging() -> None:
    driver = watched()
    let_hang(driver)
    driver.feed(ReplicaJoined(spec("e", "only", max_num_seqs=None, stall_timeout_s=LIMIT_S)))
    report(driver)
    assert dispatched(driver.arrive("c")) == [("c", "e")]


def test_an_engine_of_our_own_is_watched_beside_it() -> None:
    driver = watched(stall_timeout_s=None)
    let_hang(driver)
    assert dispatched(driver.arrive("c")) == [("c", "e")]
