"""Promotion of classes, their floor shares, and engine priorities."""

import random
from dataclasses import replace
from typing import Any

import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.commands import Command, Dispatch
from serve_app.core.dispatch import promotion
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.dispatch.promotion import (
    BAND,
    ClassFloors,
    ClassFloorSettings,
    EnginePriorities,
    EnginePrioritySettings,
    Promotion,
    PromotionSettings,
)
from serve_app.core.events import Cancelled, DispatchFailed, DispatchFailure, Finished, Resumed
from serve_app.core.policies.protocol import OrderingPolicy
from serve_app.core.queueing.fairness import FairnessSettings
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Request
from tests.builders import ManualDriver, dispatched, request, scheduled_request

INTERACTIVE, DEFAULT, BATCH = PriorityClass


class Waiting:
    """Queued requests, and the promotions among them."""

    def __init__(self, **settings: float) -> None:
        self.queue = RequestQueue(OrderingPolicy(), FairnessSettings())
        self.promotion = Promotion(PromotionSettings(**settings), self.queue)
        self.number = 0

    def add(self, arrived_at: float, **changes: Any) -> ScheduledRequest:
        self.number += 1
        one = scheduled_request(f"r{self.number}", arrived_at=arrived_at, **changes)
        one.starved_at = self.promotion.starved_at(one)
        self.queue.add(one)
        return one


def test_the_oldest_request_of_each_tenant_beyond_its_starvation_bound_is_promoted() -> None:
    waiting = Waiting(default_s=10.0)
    heads = [waiting.add(at) for at in (95.0, 80.0, 70.0)]
    other = waiting.add(75.0, tenant="other")
    assert waiting.promotion.among([*heads, other], 100.0) == [heads[2], other]
    assert waiting.promotion.among(heads, 79.0) == []


def test_each_class_has_its_own_limit() -> None:
    waiting = Waiting(interactive_s=1.0, default_s=50.0)
    heads = [waiting.add(80.0), waiting.add(98.0, priority=INTERACTIVE)]
    assert waiting.promotion.among(heads, 100.0) == [heads[1]]


def test_under_overload_promotions_are_a_share_of_the_dispatches_of_a_tenant() -> None:
    waiting = Waiting(default_s=1.0, promoted_share=0.2)
    preferred, starved = waiting.add(0.5), waiting.add(0.0)
    idle = waiting.add(0.0, tenant="idle")
    promoted = 0
    for _ in range(1_000):
        first = (waiting.promotion.among([preferred, starved], 100.0) or [preferred])[0]
        promoted += first is starved
        waiting.promotion.on_dispatch(first, 100.0)
    # Both heads are beyond their starvation bound: whichever is first while a promotion is due uses it.
    assert 190 <= promoted <= 260
    assert waiting.promotion.among([idle], 100.0) == [idle]


# -- floor shares of classes ------------------------------------------------------------------------------


def test_a_waiting_lower_class_gets_its_floor_share() -> None:
    floors = ClassFloors(ClassFloorSettings(default_share=0.0, batch_share=0.05))
    got = {INTERACTIVE: 0, BATCH: 0}
    for _ in range(1_000):
        priority = (floors.owed() or [INTERACTIVE])[0]
        floors.on_dispatch(priority, [INTERACTIVE, BATCH])
        got[priority] += 1
    assert 45 <= got[BATCH] <= 50


def test_a_class_without_queued_requests_is_owed_no_dispatch() -> None:
    floors = ClassFloors(ClassFloorSettings())
    for _ in range(1_000):
        floors.on_dispatch(INTERACTIVE, [INTERACTIVE])
    assert floors.owed() == []


def test_a_class_with_a_request_beyond_its_bound_gets_the_share_of_promotions() -> None:
    floors = ClassFloors(ClassFloorSettings(default_share=0.0, batch_share=0.05), promoted_share=0.2)
    got = {INTERACTIVE: 0, BATCH: 0}
    for _ in range(1_000):
        priority = (floors.owed() or [INTERACTIVE])[0]
        floors.on_dispatch(priority, [INTERACTIVE, BATCH], {BATCH})
        got[priority] += 1
    assert 150 <= got[BATCH] <= 200


def test_credit_is_bounded() -> None:
    floors = ClassFloors(ClassFloorSettings(batch_share=0.5))
    for _ in range(1_000):
        floors.on_dispatch(INTERACTIVE, [BATCH])
    spent = 0
    while floors.owed():
        floors.on_dispatch(BATCH, [])
        spent += 1
    assert spent == 2


# -- engine priorities: the numbers, and the scheduler's counts of pending requests -----------------------
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
