"""Engine priorities: the numbers, and the scheduler's counts of pending requests."""

import random
from dataclasses import replace

import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.commands import Command, Dispatch
from serve_app.core.dispatch import promotion
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.dispatch.promotion import BAND, EnginePriorities, EnginePrioritySettings
from serve_app.core.events import Cancelled, DispatchFailed, DispatchFailure, Finished, Resumed
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Request
from tests.builders import ManualDriver, dispatched, request

INTERACTIVE, DEFAULT, BATCH = PriorityClass
ON = EnginePrioritySettings(enabled=True, target_waiting=100)


def priorities(commands: list[Command]) -> list[int | None]:
    return [command.engine_priority for command in commands if isinstance(command, Dispatch)]


def make_driver() -> ManualDriver:
    driver = ManualDriver(engine_priority=ON)
    driver.join()
    return driver


def test_the_last_of_a_class_precedes_the_first_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "BAND", 3)
    pending = EnginePriorities(ON)
    sent = [pending.on_dispatch(request(priority=priority)) for priority in PriorityClass for _ in range(4)]
    assert sent == [0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8]


def test_exactly_the_requests_in_engines_are_pending_in_any_order_of_events() -> None:
    rng = random.Random(7)
    pending = EnginePriorities(ON)
    driver: list[Request] = []
    for n in range(500):
        if driver and rng.random() < 0.45:
            pending.on_departure(driver.pop(rng.randrange(len(driver))))
        else:
            one = request(f"r{n}", tenant=rng.choice("abc"), priority=rng.choice(list(PriorityClass)))
            same = sum((other.tenant, other.priority) == (one.tenant, one.priority) for other in driver)
            assert pending.on_dispatch(one) == one.priority.rank * BAND + same
            driver.append(one)
    for one in driver:
        pending.on_departure(one)
    assert repr(pending) == "<EnginePriorities 0 of 0 tenants and classes>"


def test_without_the_mode_no_priority_is_sent() -> None:
    driver = ManualDriver()
    driver.join()
    assert priorities(driver.arrive(priority=BATCH)) == [None]


def test_a_dispatch_has_a_priority_by_class_and_pending_requests_of_the_tenant() -> None:
    driver = make_driver()
    first = [priorities(driver.arrive(f"a{n}", tenant="a")) for n in range(3)]
    assert first == [[BAND], [BAND + 1], [BAND + 2]]
    assert priorities(driver.arrive("b0", tenant="b")) == [BAND]
    assert priorities(driver.arrive("a3", tenant="a", priority=INTERACTIVE)) == [0]
    assert priorities(driver.arrive("a4", tenant="a", priority=BATCH)) == [2 * BAND]


@pytest.mark.parametrize(
    "end", [Finished("r1", Outcome.COMPLETED), Cancelled("r1"), Finished("r1", Outcome.FAILED)]
)
def test_an_ended_request_is_not_pending(end: Finished | Cancelled) -> None:
    driver = make_driver()
    driver.arrive("r1")
    driver.feed(end)
    assert priorities(driver.arrive("r2")) == [BAND]


def test_a_returned_request_is_numbered_again() -> None:
    driver = make_driver()
    driver.join("s2")
    [(_, where)] = dispatched(driver.arrive("r1"))
    driver.arrive("r2")
    again = driver.feed(DispatchFailed("r1", where, DispatchFailure.LOST))
    # One other request is pending; it itself is not counted.
    assert priorities(again) == [BAND + 1]


def test_a_new_scheduler_counts_running_requests() -> None:
    driver = make_driver()
    for n in range(2):
        driver.feed(Resumed(request(f"r{n}"), "s1", started=True))
    assert priorities(driver.arrive("r2")) == [BAND + 2]


def test_the_mode_sets_the_length_of_the_engines_queue() -> None:
    tight = {"backpressure": BackpressureSettings(target_waiting=2, lag_factor=0.0)}
    sent = {}
    for mode in (
        EnginePrioritySettings(target_waiting=6),
        EnginePrioritySettings(enabled=True, target_waiting=6),
    ):
        driver = ManualDriver(engine_priority=mode, **tight)
        driver.join(max_num_seqs=1)
        sent[mode.enabled] = sum(len(priorities(driver.arrive(f"r{n}"))) for n in range(20))
    assert sent == {False: 2, True: 6}


def test_the_modes_limits_replace_those_of_backpressure() -> None:
    mode = EnginePrioritySettings(enabled=True, target_waiting=20, max_prefill_backlog_s=9.0)
    usual = SchedulerSettings(model="m", engine_priority=replace(mode, enabled=False))
    assert usual.effective_backpressure is usual.backpressure
    in_force = replace(usual, engine_priority=mode).effective_backpressure
    assert in_force == replace(usual.backpressure, target_waiting=20, max_prefill_backlog_s=9.0)
