"""Floors of tenants and classes in the queue; tests/properties/test_floors.py has what they guarantee."""

import itertools
from typing import Any

import pytest

from serve_app.core import events as ev
from serve_app.core.commands import Revoke
from serve_app.core.dispatch.backfill import BackfillSettings
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.dispatch.promotion import ClassFloorSettings
from serve_app.core.queueing.fairness import FairnessMode, FairnessSettings
from serve_app.core.queueing.floors import Floors, FloorSettings
from serve_app.core.settings import SchedulerSettings
from serve_app.core.settings_base import plain, read
from serve_app.errors import Outcome
from serve_app.request import KeyTerms, PriorityClass, Usage
from tests.builders import ManualDriver, concluded, dispatched, one_replica, request

BATCH = PriorityClass.BATCH
FLOOR = FloorSettings(tenants={"team": 100.0})


def busy(**changes: Any) -> ManualDriver:
    """Return one replica that accepts one request at a time, and has one."""
    driver = one_replica(
        limits={"max_num_seqs": 64, "kv_tokens": 1_000_000},
        backpressure=BackpressureSettings(lag_factor=0.0, target_waiting=1),
        **changes,
    )
    driver.arrive("first", tenant="other")
    return driver


def end(
    driver: ManualDriver, request_id: str, *, after_s: float = 0.0, usage: Usage | None = None
) -> list[str]:
    """End a request. Return those that are dispatched then."""
    driver.now += after_s
    driver.report("r1")
    return [name for name, _ in dispatched(driver.feed(ev.Finished(request_id, Outcome.COMPLETED, usage)))]


def test_a_key_has_the_floor_of_its_tenant_which_replaces_the_configured_one() -> None:
    floors = Floors(FLOOR)
    for per_s in (30.0, 40.0):
        for tenant in ("team", "new"):
            floors.observe(tenant, per_s, 0.0)
            assert (floor := floors.of_tenant(tenant)) is not None
            assert floor.per_s == per_s
    assert floors.of_tenant("other") is None


def test_floors_of_idle_keys_are_forgotten_and_configured_ones_are_not() -> None:
    floors = Floors(FLOOR)
    for number in range(10_000):
        floors.observe(f"t{number}", 1.0, 0.0)
    assert len(list(floors)) <= 4_097
    assert floors.of_tenant("team") is not None


def test_a_request_in_turn_is_not_owed_again_after_idle_time() -> None:
    floors, one = Floors(FLOOR), request(tenant="team")
    floors.on_backlog(one, 0.0)
    assert [floor.tenant for floor in floors.due(0.0, others_wait=False)] == ["team"]
    floors.charge(one, 500.0, 0.0, by_floor=True, others_wait=False)
    floors.on_idle(one, tenant=True, priority=True)
    floors.on_backlog(one, 1.0)
    assert floors.due(1.0, others_wait=False) == []
    assert floors.next_due_at(1.0) == pytest.approx(5.0)
    assert len(floors.due(5.0, others_wait=False)) == 1


def test_service_beyond_the_floor_is_not_deducted_later() -> None:
    floors, one = Floors(FLOOR), request(tenant="team")
    floors.on_backlog(one, 0.0)
    for _ in range(3):
        floors.charge(one, 100.0, 0.0, by_floor=False, others_wait=True)
    assert floors.next_due_at(0.0) == pytest.approx(1.0)
    # Nor is idle time credited to the service that ends it.
    floors.on_idle(one, tenant=True, priority=True)
    floors.charge(one, 100.0, 50.0, by_floor=False, others_wait=True)
    floors.on_backlog(one, 50.0)
    assert floors.next_due_at(50.0) == pytest.approx(51.0)


def test_a_tenant_behind_its_floor_leaves_no_headroom(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(**changes: Any) -> list[str]:
        driver = busy(**changes)
        # As for a tenant that holds more than its share.
        monkeypatch.setattr(driver.scheduler.headroom, "tokens", lambda _head, _pool: 10_000_000)
        driver.arrive("late", tenant="team")
        # An idle replica would accept it in any case.
        return [name for name, _ in dispatched(driver.feed(ev.FirstToken("first")))]

    assert sent() == []
    assert sent(floors=FLOOR) == ["late"]


def test_a_tenant_whose_requests_fit_nowhere_does_not_stop_the_floors_of_others() -> None:
    floors = Floors(FloorSettings(tenants={"stuck": 100.0, "team": 100.0}))
    for tenant in ("stuck", "team"):
        floors.on_backlog(request(tenant=tenant), 0.0)
    for second in range(100):
        now = float(second)
        due = [floor.tenant for floor in floors.due(now, others_wait=False)]
        assert due == ["stuck", "team"]
        floors.charge(request(tenant="team"), 100.0, now, by_floor=True, others_wait=False)
    behind_s = {floor.tenant: floors.behind_s(floor, 99.0) for floor in floors}
    assert behind_s == {"stuck": 30.0, "team": 0.0}


def test_a_tenant_behind_its_floor_precedes_those_of_a_higher_class() -> None:
    driver = busy(floors=FLOOR)
    driver.arrive("user", tenant="user", priority=PriorityClass.INTERACTIVE)
    driver.arrive("night", tenant="team", priority=BATCH)
    assert end(driver, "first") == ["night"]
    assert end(driver, "night") == ["user"]


def test_a_floor_is_charged_what_the_engine_has_counted() -> None:
    driver = busy(floors=FLOOR)
    for name in ("a", "b"):
        driver.arrive(name, tenant="team", prompt_tokens=100, max_output_tokens=450)
    for name in ("x", "y"):
        driver.arrive(name, tenant="user")
    assert end(driver, "first") == ["a"]
    # 100 tokens are a second of the floor, and the answer was expected to be longer.
    (floor,) = driver.scheduler.queue.floors
    assert floor.mark > 2.0
    assert end(driver, "a", after_s=1.0, usage=Usage(prompt_tokens=98, output_tokens=1)) == ["b"]


def test_capacity_is_reserved_for_a_request_that_is_due_and_fits_nowhere() -> None:
    driver = one_replica(limits={"kv_tokens": 1_000, "max_model_len": 1_000}, floors=FLOOR, policy="ewsjf")
    for number in range(2):
        driver.arrive(f"s{number}", tenant="other", prompt_tokens=350, max_output_tokens=50)
        driver.feed(ev.FirstToken(f"s{number}"))
    driver.arrive("large", tenant="team", prompt_tokens=800, max_output_tokens=50)
    assert dispatched(driver.arrive("small", tenant="other", prompt_tokens=20, max_output_tokens=10)) == []
    assert end(driver, "s0") == []
    assert end(driver, "s1") == ["large", "small"]


def test_batch_work_of_a_tenant_behind_its_floor_revokes_that_of_others() -> None:
    def revoked(**changes: Any) -> int:
        driver = one_replica(
            limits={"kv_tokens": 12_000, "max_num_seqs": 1_000},
            backpressure=BackpressureSettings(lag_factor=0.0, target_waiting=1_000),
            class_floors=ClassFloorSettings(batch_share=0.0),
            **changes,
        )
        for number in range(20):
            driver.arrive(
                f"b{number}",
                tenant="other",
                priority=BATCH,
                prompt_tokens=500,
                max_output_tokens=500,
                revocable=True,
            )
            driver.feed(ev.FirstToken(f"b{number}"), after_s=0.02)
        commands = driver.arrive("night", tenant="team", priority=BATCH, prompt_tokens=900)
        return sum(isinstance(each, Revoke) for each in commands)

    assert revoked() == 0
    assert revoked(floors=FLOOR) >= 1


def test_the_floor_bounds_the_predicted_wait_of_its_tenant() -> None:
    """A flood of a higher class is no reason to reject a tenant that its floor serves in time."""

    def outcomes(own: int, **changes: Any) -> list[str]:
        driver, running, numbers = busy(**changes), "first", itertools.count()

        def flood(requests: int) -> None:
            for number in itertools.islice(numbers, requests):
                name = f"w{number}"
                driver.arrive(name, tenant="flood", prompt_tokens=100, priority=PriorityClass.INTERACTIVE)

        # A steady backlog, from which predictions are learned.
        flood(8)
        for _ in range(60):
            flood(1)
            (running,) = end(driver, running, after_s=1.0)
        flood(200)
        # The first request of a kind is always admitted, as a probe.
        driver.arrive("probe", tenant="user", expires_at=driver.now + 20.0, prompt_tokens=100)
        for number in range(own):
            driver.arrive(f"o{number}", tenant="team", prompt_tokens=100)
        commands = driver.arrive("late", tenant="team", expires_at=driver.now + 20.0, prompt_tokens=100)
        return [outcome for _, outcome in concluded(commands)]

    assert outcomes(0) == ["rejected_deadline_unmeetable"]
    assert outcomes(0, floors=FLOOR) == []
    assert outcomes(5, floors=FLOOR) == []
    # Its own work takes longer at the rate of its floor.
    assert outcomes(60, floors=FLOOR) == ["rejected_deadline_unmeetable"]


def test_a_floor_that_a_key_no_longer_has_is_that_of_the_settings() -> None:
    floors = Floors(FLOOR)
    for tenant in ("team", "new"):
        floors.observe(tenant, 30.0, 0.0)
        floors.on_backlog(request(tenant=tenant), 0.0)
        floors.observe(tenant, None, 1.0)
    (floor,) = floors
    assert (floor.tenant, floor.per_s) == ("team", 100.0)
    assert floors.due(2.0, others_wait=False) == [floor]


def test_a_floor_that_falls_due_dispatches_without_another_event() -> None:
    """Batch work waits for idle capacity until then."""
    driver = one_replica(
        limits={"kv_tokens": 500_000, "max_num_seqs": 1_000},
        backpressure=BackpressureSettings(lag_factor=0.0, target_waiting=1_000),
        class_floors=ClassFloorSettings(batch_share=0.0),
        backfill=BackfillSettings(max_slowdown=0.01),
        floors=FLOOR,
    )
    driver.arrive("i", priority=PriorityClass.INTERACTIVE)
    driver.feed(ev.FirstToken("i"))
    sent = [dispatched(driver.arrive(f"b{number}", tenant="team", priority=BATCH)) for number in range(3)]
    assert [bool(each) for each in sent] == [True, False, False]
    due_at = driver.scheduler.next_wakeup()
    assert due_at is not None
    driver.now = due_at
    assert dispatched(driver.feed(ev.Woke())) == [("b1", "r1")]


def test_floors_need_shares_in_tokens() -> None:
    fairness = FairnessSettings(mode=FairnessMode.REQUESTS)
    with pytest.raises(ValueError, match=r"floors are tokens per second, but fairness.mode is requests: set"):
        SchedulerSettings(model="m", fairness=fairness, floors=FLOOR)
    driver = busy(fairness=fairness)
    key = KeyTerms(key_id="k", floor_tokens_per_s=100.0)
    driver.arrive("user", tenant="user")
    driver.arrive("late", tenant="team", key=key)
    assert end(driver, "first") == ["user"]


def test_a_setting_out_of_range_is_an_error_with_its_value() -> None:
    for given, message in (
        ({"tenants": {"a": 0}}, r"floors.tenants of a must be from 0.001 to 1,000,000,000 .* second, got 0"),
        ({"tenants": {"a": 2e9}}, r"got 2e\+09"),
        ({"classes": {"batch": -1.0}}, r"floors.classes of batch must be"),
        ({"classes": {"night": 1.0}}, r"one of interactive, default, batch"),
    ):
        with pytest.raises(ValueError, match=message):
            read(FloorSettings, given, as_file=True)
    floors = FloorSettings(tenants={"a": 10.0}, classes={BATCH: 5.0})
    assert read(FloorSettings, plain(floors), as_file=True) == floors
