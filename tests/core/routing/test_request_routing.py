"""Routing of requests: again after changes of the fleet, bound to a replica, and with an adapter."""

from collections.abc import Callable
from typing import Any

import pytest

from serve_app.core.commands import Command
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.events import (
    Cancelled,
    DispatchFailed,
    DispatchFailure,
    Finished,
    ReplicaJoined,
    ReplicaLost,
    Resumed,
    Woke,
)
from serve_app.core.isolation import IsolationSettings
from serve_app.core.routing.request_routing import RequestRouting
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Request
from tests.builders import (
    ManualDriver,
    concluded,
    dispatched,
    fill,
    one_replica,
    only_conclusion,
    request,
    spec,
    two_pools,
)

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


# -- requests bound to the replica that stores their data: they run there or are rejected -----------------

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


# -- LoRA adapter requests: placed on replicas that list the adapter, preferably where it ran last --------


def fleet(**adapters: tuple[str, ...]) -> ManualDriver:
    driver = ManualDriver()
    for replica_id, names in adapters.items():
        driver.join(replica_id, adapters=names)
    return driver


def test_it_is_sent_only_to_replicas_that_list_the_adapter() -> None:
    driver = fleet(s1=("a",), s2=())
    for number in range(3):
        assert dispatched(driver.arrive(f"a{number}", adapter="a")) == [(f"a{number}", "s1")]
    assert driver.arrive("waits", adapter="a") == []
    assert driver.wait_reasons("waits") == "short: no replica with the adapter a accepts requests now"
    assert dispatched(driver.arrive("base")) == [("base", "s2")]
    assert dispatched(driver.feed(Finished("a0", Outcome.COMPLETED))) == [("waits", "s1")]


def test_a_replica_that_recently_ran_the_adapter_is_preferred_unless_clearly_busier() -> None:
    driver = fleet(s1=("a", "b"), s2=("a", "b"))
    driver.feed(Finished("x", Outcome.COMPLETED))
    (first,) = dispatched(driver.arrive("a0", adapter="a"))
    assert dispatched(driver.arrive("a1", adapter="a")) == [("a1", first[1])]
    (other,) = dispatched(driver.arrive("b0", adapter="b"))
    assert other[1] != first[1]
    # The engine's queue is full there.
    assert dispatched(driver.arrive("a2", adapter="a")) == [("a2", first[1])]
    assert dispatched(driver.arrive("a3", adapter="a")) == [("a3", other[1])]


def test_a_pool_that_does_not_list_it_is_none_of_its_pools() -> None:
    driver = fleet(s1=())
    driver.join("l1", "long", adapters=("a",))
    assert dispatched(driver.arrive("r", adapter="a")) == [("r", "l1")]


def test_one_that_is_listed_nowhere_waits_for_the_grace_and_is_unknown_then() -> None:
    driver = fleet(s1=())
    assert driver.arrive("r", adapter="a") == []
    assert dispatched(driver.join("s2", adapters=("a",))) == [("r", "s2")]
    driver.arrive("gone", adapter="b")
    driver.report("s1", after_s=4.9)
    assert driver.scheduler.find("gone") is not None
    assert concluded(driver.feed(Woke(), after_s=0.1)) == [("gone", "rejected_unknown_model")]


def test_an_unloaded_adapter_receives_no_requests() -> None:
    driver = fleet(s1=("a",), s2=("a",))
    driver.join("s1")
    for number in range(3):
        assert dispatched(driver.arrive(f"r{number}", adapter="a")) == [(f"r{number}", "s2")]
