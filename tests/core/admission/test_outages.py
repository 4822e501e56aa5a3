"""Requests during an outage of all replicas that could serve them."""

import pytest

from serve_app.core.admission.admission import RETRY_AFTER_CAP_S
from serve_app.core.commands import Conclude
from serve_app.core.events import DispatchFailed, DispatchFailure, ReplicaLost, Woke
from serve_app.core.routing.pools import RoutingSettings
from serve_app.errors import Outcome
from tests.builders import (
    ManualDriver,
    concluded,
    dispatched,
    fill,
    one_replica,
    retry_after_s,
    two_pools,
)

GRACE_S = 5.0


def waiting_when_the_last_replica_dies() -> ManualDriver:
    driver = one_replica()
    fill(driver)
    driver.arrive("waits", expires_at=driver.now + 300.0)
    driver.feed(ReplicaLost("r1"))
    return driver


def test_a_replica_that_joins_within_the_grace_period_serves_the_request() -> None:
    driver = waiting_when_the_last_replica_dies()
    driver.now += GRACE_S - 0.1
    assert dispatched(driver.join("r2", "only")) == [("waits", "r2")]


def test_a_request_that_a_dead_replica_returns_late_is_rejected_too() -> None:
    driver = waiting_when_the_last_replica_dies()
    driver.feed(Woke(), after_s=GRACE_S)
    commands = driver.feed(DispatchFailed("f0", "r1", DispatchFailure.LOST), after_s=1.0)
    assert concluded(commands) == [("f0", "rejected_no_replica")]


def test_a_request_whose_timeout_ends_within_the_grace_reports_the_outage() -> None:
    driver = one_replica()
    driver.feed(ReplicaLost("r1"))
    driver.arrive("r", expires_at=driver.now + 1.0)
    commands = driver.feed(Woke(), after_s=1.0)
    assert concluded(commands) == [("r", "rejected_no_replica")]


def test_a_no_wait_request_is_rejected_immediately() -> None:
    driver = one_replica()
    driver.feed(ReplicaLost("r1"))
    assert concluded(driver.arrive("r", no_wait=True)) == [("r", "rejected_no_replica")]


def test_a_request_that_fits_only_the_dead_pool_is_rejected_and_others_are_served() -> None:
    driver = two_pools()
    driver.feed(ReplicaLost("l1"))
    driver.arrive("long", prompt_tokens=2_000)
    commands = [command for _ in range(12) for command in driver.report("s1", after_s=0.5)]
    rejection = next(command for command in commands if isinstance(command, Conclude))
    assert (rejection.request_id, rejection.conclusion.outcome) == ("long", Outcome.REJECTED_NO_REPLICA)
    assert "m has had no live replica that can serve this request" in rejection.conclusion.message
    assert dispatched(driver.arrive("short", prompt_tokens=20)) == [("short", "s1")]


@pytest.mark.parametrize("spill", [True, False])
def test_a_request_at_home_in_the_dead_pool_spills_or_is_rejected(spill: bool) -> None:
    driver = two_pools(routing=RoutingSettings(b_short_tokens=500, spill=spill))
    driver.feed(ReplicaLost("s1"))
    for _ in range(12):
        driver.report("l1", after_s=0.5)
    commands = driver.arrive("short", prompt_tokens=20)
    assert dispatched(commands) == ([("short", "l1")] if spill else [])
    assert concluded(commands) == ([] if spill else [("short", "rejected_no_replica")])


def test_retry_after_is_what_earlier_starts_took_less_the_age_of_the_outage() -> None:
    driver = ManualDriver()
    driver.now = 40.0
    driver.join("s1", "short")
    driver.feed(ReplicaLost("s1"))
    driver.now += 10.0
    assert retry_after_s(driver.arrive("r")) == pytest.approx(30.0, abs=1.0)


def test_retry_after_of_the_first_start_grows_with_its_age_up_to_the_cap() -> None:
    driver = ManualDriver()
    driver.now = 12.0
    assert retry_after_s(driver.arrive("r1")) == pytest.approx(12.0, abs=1.0)
    driver.now = 400.0
    assert retry_after_s(driver.arrive("r2")) == RETRY_AFTER_CAP_S


def test_a_reconnection_is_not_counted_as_an_engine_start() -> None:
    driver = ManualDriver()
    driver.now = 40.0
    driver.join("s1", "short")
    for _ in range(5):
        driver.feed(ReplicaLost("s1"))
        driver.now += 0.5
        driver.join("s1", "short")
    driver.feed(ReplicaLost("s1"))
    driver.now += 10.0
    assert retry_after_s(driver.arrive("r")) == pytest.approx(30.0, abs=1.0)
