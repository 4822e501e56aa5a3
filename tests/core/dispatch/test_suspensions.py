"""Suspension of replicas: causes, duration, and the share of a fleet at once."""

import pytest

from serve_app.core.events import Cancelled, DispatchFailed, DispatchFailure, Finished, FirstToken
from serve_app.errors import Outcome
from tests.builders import ONE_POOL, ManualDriver, dispatched

LOST, BUSY, ENGINE_ERROR = DispatchFailure.LOST, DispatchFailure.BUSY, DispatchFailure.ENGINE_ERROR
UNREACHABLE = DispatchFailure.UNREACHABLE


def fleet(count: int) -> ManualDriver:
    driver = ManualDriver(routing=ONE_POOL)
    for number in range(count):
        driver.join(f"s{number}", "only")
    return driver


def suspended(driver: ManualDriver) -> set[str]:
    return {state.spec.replica_id for state in driver.scheduler.ledger if state.suspended}


def fail(driver: ManualDriver, request_id: str, failure: DispatchFailure) -> None:
    replica_id = driver.find(request_id).replica_id
    assert replica_id is not None
    driver.feed(DispatchFailed(request_id, replica_id, failure))


@pytest.mark.parametrize("failure", [UNREACHABLE, LOST])
def test_a_broken_connection_suspends_immediately_until_the_next_report(failure: DispatchFailure) -> None:
    driver = fleet(1)
    driver.arrive("r")
    fail(driver, "r", failure)
    assert suspended(driver) == {"s0"}
    assert dispatched(driver.report("s0", after_s=0.2)) == [("r", "s0")]


def test_each_further_suspension_lasts_longer_until_the_replica_serves_again() -> None:
    driver = fleet(1)
    lasted = []
    for number in range(8):
        driver.arrive(f"r{number}")
        fail(driver, f"r{number}", UNREACHABLE)
        driver.feed(Cancelled(f"r{number}"))
        began = driver.now
        while suspended(driver):
            driver.report("s0", after_s=0.1)
        lasted.append(driver.now - began)
    assert lasted == sorted(lasted)
    assert lasted[0] == pytest.approx(0.1)
    assert 5.0 < lasted[-1] <= 10.1
    driver.arrive("good")
    driver.feed(Finished("good", Outcome.COMPLETED))
    driver.arrive("last")
    fail(driver, "last", UNREACHABLE)
    driver.report("s0", after_s=0.1)
    assert not suspended(driver)


def test_at_most_half_of_a_pool_is_suspended() -> None:
    driver = fleet(4)
    for number in range(4):
        driver.arrive(f"r{number}")
        fail(driver, f"r{number}", UNREACHABLE)
        fail(driver, f"r{number}", UNREACHABLE)
    assert len(suspended(driver)) == 2


def test_a_busy_engine_is_suspended_when_it_rejects_three_in_a_row() -> None:
    driver = fleet(1)
    for number in range(3):
        assert not suspended(driver)
        driver.arrive(f"r{number}")
        fail(driver, f"r{number}", BUSY)
        driver.feed(Finished(f"r{number}", Outcome.CANCELLED))
    assert suspended(driver) == {"s0"}


def test_a_busy_engine_that_serves_in_between_is_not_suspended() -> None:
    driver = fleet(1)
    for number in range(9):
        driver.arrive(f"r{number}")
        fail(driver, f"r{number}", BUSY)
        driver.feed(FirstToken(f"r{number}"))
        driver.feed(Finished(f"r{number}", Outcome.COMPLETED))
    assert not suspended(driver)


def test_requests_that_fail_everywhere_suspend_no_replica() -> None:
    driver = fleet(4)
    for number in range(50):
        driver.arrive(f"r{number}")
        fail(driver, f"r{number}", ENGINE_ERROR)
        driver.feed(Finished(f"r{number}", Outcome.FAILED))
    assert not suspended(driver)


def test_a_replica_that_fails_requests_that_others_serve_is_suspended() -> None:
    driver = fleet(2)
    for number in range(3):
        assert not suspended(driver)
        driver.arrive(f"r{number}")
        assert driver.find(f"r{number}").replica_id == "s0"
        fail(driver, f"r{number}", ENGINE_ERROR)
        driver.feed(FirstToken(f"r{number}"))
        driver.feed(Finished(f"r{number}", Outcome.COMPLETED))
    assert suspended(driver) == {"s0"}


def test_a_replica_that_joins_again_has_no_suspensions() -> None:
    driver = fleet(1)
    for number in range(4):
        driver.arrive(f"r{number}")
        fail(driver, f"r{number}", UNREACHABLE)
        driver.feed(Cancelled(f"r{number}"))
        driver.report("s0", after_s=20.0)
    driver.join("s0", "only")
    state = driver.scheduler.ledger["s0"]
    assert (state.suspended, state.suspensions, state.faults) == (False, 0, 0)
