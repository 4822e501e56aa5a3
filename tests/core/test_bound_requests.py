"""Requests bound to the replica that stores their data: they run there or are rejected."""

from typing import Any

import pytest

from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.events import DispatchFailed, DispatchFailure, Finished, ReplicaLost, Resumed, Woke
from serve_app.core.isolation import IsolationSettings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from tests.builders import ManualDriver, concluded, dispatched, fill, one_replica, only_conclusion, request

GRACE_S = 5.0


def two_replicas() -> ManualDriver:
    driver = one_replica("s1")
    driver.join("s2", "only")
    return driver


def test_it_waits_for_its_replica_while_others_idle_and_blocks_no_request() -> None:
    driver = two_replicas()
    fill(driver, bound_to="s1")
    assert driver.arrive("waits", bound_to="s1") == []
    assert "it is bound to replica s1" in driver.wait_reasons("waits")
    assert dispatched(driver.arrive("other")) == [("other", "s2")]
    assert dispatched(driver.arrive("bound elsewhere", bound_to="s2")) == [("bound elsewhere", "s2")]
    assert dispatched(driver.feed(Finished("f0", Outcome.COMPLETED))) == [("waits", "s1")]


STRICT = BackpressureSettings(lag_factor=0.0, batch_prefill_s=0.0)


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        pytest.param({}, {"prompt_tokens": 900}, id="KV cache"),
        pytest.param(
            {
                "policy": "ewsjf",
                "isolation": IsolationSettings(max_long_prefills=1, prior_boundary_tokens=100),
            },
            {"prompt_tokens": 500},
            id="long prefills",
        ),
        pytest.param({"backpressure": STRICT}, {"priority": PriorityClass.BATCH}, id="batch work"),
    ],
)
def test_the_limits_of_its_replica_apply_to_it(settings: dict[str, Any], fields: dict[str, Any]) -> None:
    driver = one_replica("s1", limits={"kv_tokens": 1_500}, **settings)
    assert dispatched(driver.arrive("first", **{**fields, "priority": PriorityClass.DEFAULT})) == [
        ("first", "s1")
    ]
    assert driver.arrive("bound", bound_to="s1", **fields) == []
    assert dispatched(driver.feed(Finished("first", Outcome.COMPLETED))) == [("bound", "s1")]


def test_it_returns_to_its_replica_after_a_failure_there() -> None:
    driver = two_replicas()
    driver.arrive("r", bound_to="s1")
    again = driver.feed(DispatchFailed("r", "s1", DispatchFailure.ENGINE_ERROR, "it failed"))
    assert all(replica == "s1" for _, replica in dispatched(again))
    commands = [*again, *driver.feed(Woke(), after_s=1.0), *driver.report("s1")]
    assert dispatched(commands) == [("r", "s1")]


def test_a_lost_replica_may_return_within_the_grace() -> None:
    driver = two_replicas()
    fill(driver, bound_to="s1")
    driver.arrive("waits", bound_to="s1")
    assert driver.feed(ReplicaLost("s1")) == []
    driver.report("s2", after_s=GRACE_S - 1)
    assert driver.scheduler.find("waits") is not None
    driver.join("s1", "only")
    driver.feed(Finished("f0", Outcome.COMPLETED))
    assert driver.find("waits").replica_id == "s1"


def test_it_is_rejected_if_its_replica_does_not_return() -> None:
    driver = two_replicas()
    fill(driver, bound_to="s1")
    driver.arrive("waits", bound_to="s1")
    driver.feed(ReplicaLost("s1"))
    assert driver.scheduler.next_wakeup() is not None
    assert dispatched(driver.report("s2", after_s=GRACE_S - 0.5)) == []
    commands = driver.feed(Woke(), after_s=0.5)
    assert concluded(commands) == [("waits", "rejected_unknown_response")]
    rejection = only_conclusion(commands)
    assert "stored on replica s1, which is no longer available: send the" in rejection.message
    assert rejection.retry_after_s is None


@pytest.mark.parametrize(("returns_after_s", "rejected"), [(GRACE_S - 1.0, False), (GRACE_S, True)])
def test_the_grace_of_a_request_that_ran_there_begins_with_the_loss(
    returns_after_s: float, rejected: bool
) -> None:
    driver = two_replicas()
    driver.arrive("ran", bound_to="s1")
    driver.feed(ReplicaLost("s1"))
    driver.report("s2", after_s=returns_after_s)
    returned = driver.feed(DispatchFailed("ran", "s1", DispatchFailure.LOST, "the connection broke"))
    assert concluded(returned) == ([("ran", "rejected_unknown_response")] if rejected else [])
    if not rejected:
        driver.report("s2", after_s=0.9)
        assert concluded(driver.feed(Woke(), after_s=0.1)) == [("ran", "rejected_unknown_response")]


def test_a_new_scheduler_waits_for_the_replica_to_register() -> None:
    driver = one_replica("s2")
    assert driver.arrive("r", bound_to="s1") == []
    assert dispatched(driver.join("s1", "only")) == [("r", "s1")]


def test_a_replica_that_only_runs_what_an_earlier_scheduler_sent_it_is_waited_for() -> None:
    driver = one_replica("s2")
    driver.feed(Resumed(request("before"), "s1", started=True))
    assert driver.arrive("r", bound_to="s1") == []
    assert driver.find("r").pools == ("only",)
    assert dispatched(driver.join("s1", "only")) == [("r", "s1")]


def test_it_is_too_long_by_the_limit_of_its_own_replica() -> None:
    driver = one_replica("s1", limits={"max_model_len": 500})
    driver.join("s2", "only", max_model_len=4_000)
    rejection = only_conclusion(driver.arrive("r", prompt_tokens=900, bound_to="s1"))
    assert rejection.outcome is Outcome.REJECTED_TOO_LONG
    assert "maximum context length is 500 tokens" in rejection.message


def test_traffic_that_is_not_scheduled_is_bound_as_well() -> None:
    driver = one_replica("s1", active_share=0.0)
    driver.join("s2", "only")
    for number in range(4):
        assert dispatched(driver.arrive(f"r{number}", bound_to="s2")) == [(f"r{number}", "s2")]


def test_capacity_is_reserved_for_it_on_its_own_replica() -> None:
    driver = one_replica("s1", limits={"kv_tokens": 1_500}, policy="ewsjf")
    driver.join("s2", "only", kv_tokens=1_500)
    for number in range(2):
        driver.arrive(f"small{number}", prompt_tokens=300, bound_to="s1", tenant="busy")
    driver.arrive("large", prompt_tokens=900, bound_to="s1", tenant="new")
    kept = list(driver.scheduler.dispatcher.reservations)
    assert [each.replica.spec.replica_id for each in kept if each.scheduled.request.bound_to] in ([], ["s1"])
    driver.feed(Finished("small0", Outcome.COMPLETED))
    assert driver.find("large").replica_id == "s1"


def test_a_replica_of_a_pool_that_is_no_longer_configured_serves_no_bound_request() -> None:
    """Such a replica still drains after a deployment with other pools."""
    driver = two_replicas()
    driver.join("old", "removed", adapters=("sql",))
    end = only_conclusion(driver.arrive("r", bound_to="old"))
    assert end.outcome is Outcome.REJECTED_UNKNOWN_RESPONSE
    assert "which is no longer available" in end.message
    # Its adapters no longer belong to the application: the request waits as for an unlisted adapter.
    assert driver.arrive("adapted", adapter="sql") == []
    assert driver.scheduler.find("adapted") is not None
    assert dispatched(driver.arrive("other")) != []


def test_a_lost_replica_of_a_pool_that_is_no_longer_configured_is_not_waited_for() -> None:
    driver = two_replicas()
    driver.join("old", "removed")
    for name in ("put back", "running"):
        driver.feed(Resumed(request(name, bound_to="old"), "old", started=False))
    driver.feed(ReplicaLost("old"))
    assert concluded(driver.arrive("r", bound_to="old")) == [("r", "rejected_unknown_response")]
    commands = driver.feed(DispatchFailed("put back", "old", DispatchFailure.LOST))
    assert concluded(commands) == [("put back", "rejected_unknown_response")]
