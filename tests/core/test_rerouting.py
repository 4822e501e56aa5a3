"""Waiting requests that are routed again or rejected when a replica joins or leaves."""

from collections.abc import Callable

import pytest

from serve_app.core.commands import Command
from serve_app.core.events import Cancelled, ReplicaJoined, ReplicaLost
from serve_app.core.request import ScheduledRequest
from tests.builders import ManualDriver, concluded, fill, spec, two_pools

Routed = list[str]


@pytest.fixture
def driver() -> ManualDriver:
    """Return two full pools, where every arrival waits."""
    made = two_pools(no_replica_grace_s=1.0)
    fill(made, "s")
    fill(made, "l", prompt_tokens=2_000)
    return made


def routed_again(driver: ManualDriver, act: Callable[[], object]) -> Routed:
    """Return the waiting requests that are routed again during an action."""
    routing, found = driver.scheduler._routing, Routed()
    route_again = routing.route_again

    def note(scheduled: ScheduledRequest, now: float) -> object:
        found.append(scheduled.request.request_id)
        return route_again(scheduled, now)

    routing.route_again = note  # type: ignore[method-assign, assignment]
    act()
    routing.route_again = route_again  # type: ignore[method-assign]
    return sorted(found)


def join(driver: ManualDriver, replica_id: str, pool: str, max_model_len: int) -> list[Command]:
    return driver.feed(ReplicaJoined(spec(replica_id, pool, max_model_len=max_model_len)))


def test_one_more_replica_like_the_others_reroutes_no_request(driver: ManualDriver) -> None:
    driver.arrive("a")
    # The outages of the start end, once.
    assert routed_again(driver, lambda: join(driver, "s2", "short", 1_000)) == ["a"]
    assert routed_again(driver, lambda: join(driver, "s3", "short", 1_000)) == []
    assert routed_again(driver, lambda: driver.feed(ReplicaLost("s3"))) == []


def test_all_are_routed_again_when_a_context_limit_changes(driver: ManualDriver) -> None:
    driver.arrive("a")
    driver.arrive("b", prompt_tokens=900)
    assert driver.find("b").pools == ("long", "short")
    assert routed_again(driver, lambda: join(driver, "s2", "short", 500)) == ["a", "b"]
    assert driver.find("b").pools == ("long",)
    assert driver.find("a").pools == ("short", "long")


def test_a_request_that_no_longer_fits_any_pool_is_rejected_and_others_remain_queued(
    driver: ManualDriver,
) -> None:
    driver.arrive("a")
    driver.arrive("b", prompt_tokens=3_000)
    assert concluded(join(driver, "l2", "long", 2_000)) == [("b", "rejected_too_long")]
    assert driver.find("a").queued


def test_while_a_request_is_particular_each_change_of_the_fleet_routes_again(driver: ManualDriver) -> None:
    join(driver, "s2", "short", 1_000)
    driver.arrive("a")
    driver.arrive("bound", bound_to="s2")
    assert routed_again(driver, lambda: driver.feed(ReplicaLost("s2"))) == ["a", "bound"]
    driver.feed(Cancelled("bound"))
    assert routed_again(driver, lambda: join(driver, "s3", "short", 1_000)) == []


def test_requests_without_a_live_pool_are_rejected_when_the_grace_ends(driver: ManualDriver) -> None:
    driver.arrive("long", prompt_tokens=2_000)
    driver.arrive("a")
    assert not concluded(driver.feed(ReplicaLost("l1")))
    driver.report("s1", after_s=0.9)
    assert driver.find("long").queued
    assert concluded(driver.report("s1", after_s=0.2)) == [("long", "rejected_no_replica")]
    assert driver.find("a").queued
