from collections import Counter
from typing import Any

import pytest

from serve_app.core.dispatch.promotion import ClassFloorSettings
from serve_app.core.events import DispatchFailed, DispatchFailure, Finished
from serve_app.core.queueing.fairness import FairnessMode, FairnessSettings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from tests.builders import ManualDriver, fill, one_replica, two_pools
from tests.core.programs.builders import fleet

from .builders import ordered

INTERACTIVE, DEFAULT, BATCH = PriorityClass
NO_SHARES = FairnessSettings(mode=FairnessMode.OFF)
NO_FLOORS = ClassFloorSettings(default_share=0.0, batch_share=0.0)


def busy(**changes: Any) -> ManualDriver:
    """Return one pool without free capacity."""
    driver = one_replica(**changes)
    fill(driver)
    return driver


def test_under_fcfs_the_order_is_that_of_arrival() -> None:
    driver = busy(fairness=NO_SHARES)
    for number in range(5):
        driver.now += 0.1
        driver.arrive(f"r{number}", prompt_tokens=100 * (5 - number), tenant=f"t{number % 2}")
    assert ordered(driver.scheduler, driver.now) == ["r0", "r1", "r2", "r3", "r4"]


def test_under_a_score_the_most_urgent_request_of_a_tenant_is_first() -> None:
    driver = busy(policy="sjf")
    for number, tokens in enumerate((400, 20, 200)):
        driver.arrive(f"r{number}", prompt_tokens=tokens)
    assert ordered(driver.scheduler, driver.now) == ["r1", "r2", "r0"]


def test_no_request_passes_one_that_is_ahead_in_its_sub_queue() -> None:
    driver = busy(policy="ewsjf")
    for number in range(40):
        driver.now += 0.05
        driver.arrive(f"r{number}", prompt_tokens=200 + number % 7)
    scheduler = driver.scheduler
    place = {name: number for number, name in enumerate(ordered(scheduler, driver.now))}
    assert len(place) == 40
    for sub_queue in scheduler.queue.sub_queues():
        places = [place[scheduled.request.request_id] for scheduled in sub_queue]
        assert places == sorted(places)


def test_turns_that_wait_for_room_are_placed_as_if_they_had_it() -> None:
    driver = fleet("s1", fairness=NO_SHARES)
    driver.start_turn("running", "a")
    driver.start_turn("b1", "b")
    driver.arrive("between")
    driver.start_turn("c1", "c")
    assert driver.find("b1").parked
    assert ordered(driver.scheduler, driver.now) == ["b1", "between", "c1"]


def test_a_higher_class_is_first() -> None:
    driver = busy(class_floors=NO_FLOORS)
    for number, priority in enumerate((BATCH, DEFAULT, INTERACTIVE, BATCH, INTERACTIVE)):
        driver.arrive(f"r{number}", priority=priority)
    assert ordered(driver.scheduler, driver.now) == ["r2", "r4", "r1", "r0", "r3"]


def test_a_lower_class_has_its_floor() -> None:
    driver = busy(class_floors=ClassFloorSettings(default_share=0.1, batch_share=0.0))
    for number in range(40):
        driver.arrive(f"i{number}", priority=INTERACTIVE)
    for number in range(4):
        driver.arrive(f"d{number}")
    order = ordered(driver.scheduler, driver.now)
    among = Counter(name[0] for name in order[:25])
    assert among == {"i": 23, "d": 2}
    assert len(order) == 44


def test_tenants_take_turns_by_their_shares() -> None:
    driver = busy(fairness=FairnessSettings(mode=FairnessMode.REQUESTS, weights={"b": 2.0}))
    for number in range(12):
        driver.arrive(f"a{number}", tenant="a")
    for number in range(12):
        driver.arrive(f"b{number}", tenant="b")
    first = Counter(name[0] for name in ordered(driver.scheduler, driver.now)[:9])
    assert first["b"] == pytest.approx(2 * first["a"], abs=1)


def test_a_put_back_request_is_first() -> None:
    driver = busy()
    driver.arrive("waits", priority=INTERACTIVE)
    failure = DispatchFailure.UNREACHABLE
    driver.feed(DispatchFailed("f0", "r1", failure))
    returned = driver.find("f0")
    assert returned.queued
    assert ordered(driver.scheduler, driver.now) == ["f0", "waits"]


def test_each_home_pool_has_a_separate_order() -> None:
    driver = two_pools()
    for number in range(6):
        driver.arrive(f"short{number}")
        driver.arrive(f"long{number}", prompt_tokens=900)
    shorts, longs = (ordered(driver.scheduler, driver.now, home) for home in ("short", "long"))
    assert shorts
    assert longs
    assert all(name.startswith("short") for name in shorts)
    assert all(name.startswith("long") for name in longs)
    assert len(shorts) + len(longs) == len(driver.scheduler.queue)


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "ewsjf"])
def test_every_request_has_one_position(policy: str) -> None:
    driver = busy(policy=policy)
    for number in range(60):
        driver.now += 0.01
        driver.arrive(
            f"r{number}",
            prompt_tokens=10 + 37 * number % 700,
            tenant=f"t{number % 5}",
            priority=list(PriorityClass)[number % 3],
        )
    usage = Usage(prompt_tokens=40, output_tokens=10)
    driver.feed(Finished("f0", Outcome.COMPLETED, usage), after_s=1.0)
    order = ordered(driver.scheduler, driver.now)
    assert sorted(order) == sorted(each.request.request_id for each in driver.scheduler.queue)
