"""Promotion of classes, their floor shares, and engine priorities."""

import random
from collections import Counter
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
from serve_app.core.events import (
    Arrived,
    Cancelled,
    DispatchFailed,
    DispatchFailure,
    Event,
    Finished,
    Resumed,
)
from serve_app.core.policies.protocol import OrderingPolicy
from serve_app.core.queueing.fairness import FairnessSettings
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Request
from tests.builders import ManualDriver, request, scheduled_request

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


@pytest.mark.parametrize(("starved", "fewest", "most"), [((), 45, 50), ((BATCH,), 150, 200)])
def test_a_waiting_lower_class_gets_its_floor_share_and_beyond_its_bound_that_of_promotions(
    starved: tuple[PriorityClass, ...], fewest: int, most: int
) -> None:
    floors = ClassFloors(ClassFloorSettings(default_share=0.0, batch_share=0.05), promoted_share=0.2)
    got = {INTERACTIVE: 0, BATCH: 0}
    for _ in range(1_000):
        priority = (floors.owed() or [INTERACTIVE])[0]
        floors.on_dispatch(priority, [INTERACTIVE, BATCH], starved)
        got[priority] += 1
    assert fewest <= got[BATCH] <= most


def test_a_class_without_queued_requests_is_owed_no_dispatch() -> None:
    floors = ClassFloors(ClassFloorSettings())
    for _ in range(1_000):
        floors.on_dispatch(INTERACTIVE, [INTERACTIVE])
    assert floors.owed() == []


def test_credit_is_bounded() -> None:
    floors = ClassFloors(ClassFloorSettings(batch_share=0.5))
    for _ in range(1_000):
        floors.on_dispatch(INTERACTIVE, [BATCH])
    spent = 0
    while floors.owed() and spent < 10:
        floors.on_dispatch(BATCH, [])
        spent += 1
    assert spent == 2


# -- engine priorities: the numbers, and the scheduler's counts of pending requests -----------------------
ON = EnginePrioritySettings(enabled=True, target_waiting=100)


def priorities(commands: list[Command]) -> list[int | None]:
    return [command.engine_priority for command in commands if isinstance(command, Dispatch)]


def test_the_last_of_a_class_precedes_the_first_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "BAND", 3)
    pending = EnginePriorities(ON)
    sent = [pending.on_dispatch(request(priority=priority)) for priority in PriorityClass for _ in range(4)]
    assert sent == [0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8]
    for priority in PriorityClass:
        for _ in range(4):
            pending.on_departure(request(priority=priority))
    assert repr(pending) == "<EnginePriorities 0 of 0 tenants and classes>"


def test_without_the_mode_no_priority_is_sent() -> None:
    driver = ManualDriver()
    driver.join()
    assert priorities(driver.arrive(priority=BATCH)) == [None]


def test_a_request_is_numbered_after_those_of_its_tenant_and_class_in_any_engine() -> None:
    rng, driver = random.Random(7), ManualDriver(engine_priority=ON)
    known: dict[str, Request] = {}
    running: list[Request] = []

    def feed(event: Event) -> None:
        for command in driver.feed(event):
            if isinstance(command, Dispatch):
                sent = known[command.request_id]
                before = sum((each.tenant, each.priority) == (sent.tenant, sent.priority) for each in running)
                assert command.engine_priority == sent.priority.rank * BAND + before
                running.append(sent)

    for replica_id in ("s1", "s2"):
        driver.join(replica_id)
    for number in range(500):
        one = request(f"r{number}", tenant=rng.choice("abc"), priority=rng.choice(list(PriorityClass)))
        known[one.request_id] = one
        step = rng.random()
        if step < 0.5 or not running:
            feed(Arrived(one))
        elif step < 0.55:
            running.append(one)
            feed(Resumed(one, "s1", started=True))
        else:
            left = running.pop(rng.randrange(len(running))).request_id
            replica_id = driver.find(left).replica_id or ""
            events: list[Event] = [
                Finished(left, Outcome.COMPLETED),
                Finished(left, Outcome.FAILED),
                Cancelled(left),
                DispatchFailed(left, replica_id, DispatchFailure.REVOKED),
            ]
            feed(rng.choice(events))
    assert max(Counter((one.tenant, one.priority) for one in running).values()) > 5


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
