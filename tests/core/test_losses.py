"""Cancelled requests, lost replicas and gateways, and the state given to a new scheduler."""

import random
from dataclasses import replace

import pytest

from serve_app.core.events import (
    Arrived,
    Cancelled,
    DispatchFailed,
    DispatchFailure,
    Finished,
    FirstToken,
    GatewayLost,
    ReplicaLost,
    Resumed,
    Woke,
)
from serve_app.core.routing.replica_state import PrefillClass
from serve_app.errors import Outcome
from tests.builders import (
    ONE_POOL,
    ManualDriver,
    concluded,
    dispatched,
    fill,
    one_replica,
    request,
    requests_in_memory,
    two_pools,
)


@pytest.fixture
def driver() -> ManualDriver:
    return two_pools()


def test_a_cancelled_request_returns_its_tokens(driver: ManualDriver) -> None:
    fill(driver)
    assert concluded(driver.feed(Cancelled("f0"))) == [("f0", "cancelled")]
    assert driver.scheduler.ledger["s1"].in_flight == 2
    assert driver.feed(Cancelled("f0")) == []


def test_requests_that_have_left_the_queue_use_no_memory() -> None:
    rng, driver, present = random.Random(5), one_replica(), list[str]()
    fill(driver)
    before = requests_in_memory()
    for number in range(2_000):
        if present and rng.random() < 0.48:
            driver.feed(Cancelled(present.pop(rng.randrange(len(present)))))
        else:
            present.append(f"r{number}")
            driver.arrive(present[-1], tenant=f"t{rng.randrange(3)}", prompt_tokens=rng.randrange(1, 900))
    assert requests_in_memory() - before < len(present) + 100
    for name in present[1:]:
        driver.feed(Cancelled(name))
    assert requests_in_memory() - before < 100


def test_requests_of_a_lost_replica_return_to_the_front(driver: ManualDriver) -> None:
    fill(driver)
    fill(driver, "long", prompt_tokens=2_000)
    driver.arrive("waiting")
    driver.feed(ReplicaLost("s1"))
    assert driver.feed(DispatchFailed("f1", "s1", DispatchFailure.UNREACHABLE)) == []
    driver.feed(DispatchFailed("f2", "s1", DispatchFailure.UNREACHABLE))
    for number, following in enumerate(["f1", "f2", "waiting"]):
        assert dispatched(driver.feed(FirstToken(f"long{number}"))) == [(following, "l1")]


def test_a_lost_gateway_releases_queued_requests_and_running_ones_retain_holds(driver: ManualDriver) -> None:
    for number in range(40):
        driver.arrive(f"r{number}", prompt_tokens=2_000, gateway_id="g2")
    running = {
        r.request.request_id for r in driver.scheduler.requests.of_gateway("g2") if r.replica_id is not None
    }
    assert 0 < len(running) < 40
    commands = driver.feed(GatewayLost("g2"))
    assert {request_id for request_id, _ in concluded(commands)} == {f"r{n}" for n in range(40)} - running
    assert {outcome for _, outcome in concluded(commands)} == {"cancelled"}
    assert driver.scheduler.ledger["l1"].in_flight == len(running)
    for request_id in running:
        driver.feed(Cancelled(request_id))
    assert driver.scheduler.ledger["l1"].in_flight == len(driver.scheduler) == 0


def test_a_new_scheduler_receives_running_requests_before_their_replica_joins() -> None:
    driver = ManualDriver()
    driver.feed(Resumed(request("r"), "s1", started=True))
    assert driver.scheduler.ledger["s1"].held_tokens > 0
    driver.join("s1", "short")
    assert driver.scheduler.ledger["s1"].in_flight == 1
    assert concluded(driver.feed(Finished("r", Outcome.COMPLETED))) == [("r", "completed")]
    assert driver.scheduler.ledger["s1"].held_tokens == 0


@pytest.mark.parametrize("lost", [False, True])
def test_a_running_request_retains_its_deadline_and_put_backs_in_a_new_scheduler(lost: bool) -> None:
    driver = ManualDriver(routing=ONE_POOL)
    running = request("r", expires_at=1.0, attempts=7)
    driver.feed(Resumed(replace(running, lost=lost), "s1", started=False))
    commands = driver.feed(DispatchFailed("r", "s1", DispatchFailure.LOST))
    if lost:
        assert concluded(commands) == [("r", "failed")]
        return
    scheduled = driver.find("r")
    assert (scheduled.put_backs, scheduled.losses) == (8, 1)
    driver.join("s2", "only")
    assert concluded(driver.feed(Woke(), after_s=1.0)) == [("r", "expired")]


def test_a_running_request_is_classified_by_a_new_scheduler() -> None:
    driver = ManualDriver(routing=ONE_POOL, policy="ewsjf")
    driver.feed(Resumed(request("r", prompt_tokens=50_000), "s1", started=False))
    assert driver.find("r").prefill_class is PrefillClass.LONGEST


def test_a_request_that_an_earlier_scheduler_had_dispatched_is_queued_at_the_front() -> None:
    driver = ManualDriver(routing=ONE_POOL)
    driver.arrive("new")
    driver.feed(Arrived(request("back", attempts=1, arrived_at=1.0)), after_s=1.0)
    assert dispatched(driver.join("s1", "only")) == [("back", "s1"), ("new", "s1")]


def test_a_request_submitted_twice_is_admitted_once(driver: ManualDriver) -> None:
    assert len(driver.arrive("r")) == 1
    assert driver.arrive("r") == []
    assert len(driver.scheduler) == 1


def test_the_gateway_is_authoritative_about_where_a_request_runs(driver: ManualDriver) -> None:
    driver.arrive("r")
    driver.feed(Resumed(request("r"), "l1", started=False))
    assert driver.scheduler.ledger["s1"].in_flight == 0
    assert driver.scheduler.ledger["l1"].in_flight == 1


def test_events_about_ended_requests_are_ignored(driver: ManualDriver) -> None:
    assert driver.feed(FirstToken("x")) == []
    assert driver.feed(Finished("x", Outcome.COMPLETED)) == []
    assert driver.feed(DispatchFailed("x", "s1", DispatchFailure.LOST)) == []
    driver.arrive("r")
    assert driver.feed(DispatchFailed("r", "l1", DispatchFailure.LOST)) == []


def lose_all(driver: ManualDriver, *names: str) -> list[str]:
    """Lose these replicas and the requests on them, and return the requests that failed."""
    failed = []
    for name in names:
        driver.feed(ReplicaLost(name))
    for running in list(driver.scheduler.requests):
        if running.replica_id in names:
            lost = DispatchFailed(running.request.request_id, running.replica_id, DispatchFailure.LOST)
            failed += [request_id for request_id, _ in concluded(driver.feed(lost))]
    return failed


@pytest.mark.parametrize("at_once", [True, False])
def test_a_request_survives_its_second_loss_if_many_replicas_are_lost_at_once(at_once: bool) -> None:
    driver = ManualDriver(routing=ONE_POOL)
    names = [f"s{number}" for number in range(8)]
    for name in names:
        driver.join(name, "only")
        driver.report(name)
    for name in names:
        driver.arrive(f"r-{name}")
    first = [driver.find(f"r-s{number}").replica_id for number in range(3)]
    dead = [name for name in first if name is not None][: 3 if at_once else 1]
    assert lose_all(driver, *dead) == []
    if not at_once:
        driver.now += 60.0
        for name in names:
            driver.report(name)
    second = driver.find("r-s0").replica_id
    assert second is not None
    # A request that was lost twice is the cause, unless replicas are lost for another reason.
    assert lose_all(driver, second) == ([] if at_once else ["r-s0"])
