"""Waiting requests that are routed again or rejected when a replica joins or leaves."""

from collections.abc import Callable
from typing import Any

import pytest

from serve_app.core.commands import Command
from serve_app.core.events import Cancelled, ReplicaJoined, ReplicaLost
from serve_app.core.routing.request_routing import RequestRouting
from serve_app.request import Request
from tests.builders import ManualDriver, concluded, fill, spec, two_pools

Routed = list[str]


@pytest.fixture
def driver() -> ManualDriver:
    """Return two full pools, where every arrival waits."""
    made = two_pools()
    fill(made, "s")
    fill(made, "l", prompt_tokens=2_000)
    return made


def routed_again(driver: ManualDriver, act: Callable[[], object]) -> Routed:
    """Return the waiting requests that are routed again during an action."""
    found, route = Routed(), RequestRouting.route

    def note(routing: RequestRouting, request: Request, *more: Any) -> Any:
        found.append(request.request_id)
        return route(routing, request, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestRouting, "route", note)
        act()
    return sorted(found)


def join(driver: ManualDriver, replica_id: str, pool: str, max_model_len: int) -> list[Command]:
    return driver.feed(ReplicaJoined(spec(replica_id, pool, max_model_len=max_model_len)))


def test_one_more_replica_like_the_others_reroutes_no_request(driver: ManualDriver) -> None:
    driver.arrive("a")
    # The outages of the start end, once.
    assert routed_again(driver, lambda: join(driver, "s2", "short", 1_000)) == ["a"]
    assert routed_again(driver, lambda: join(driver, "s3", "short", 1_000)) == []
    assert routed_again(driver, lambda: driver.feed(ReplicaLost("s3"))) == []


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
