"""Autoscaling beside a live scheduler."""

import asyncio
import itertools
import logging

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serve_app.core import Scheduler
from serve_app.core.routing.snapshot import decoded
from serve_app.core.scaling import AutoscalingSettings, ScaledPool, ScalingSettings
from serve_app.serving.scheduler import live_scaling
from serve_app.serving.scheduler.live_scaling import LiveScaling, ScalingState
from tests.builders import ManualDriver, settings
from tests.serving.channel.harness import wait_until

BOUNDS = AutoscalingSettings(min_replicas=0, max_replicas=3)
POOLS = ScalingSettings(pools={"short": ScaledPool(autoscaling=BOUNDS), "long": ScaledPool()})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_scaling, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(live_scaling, "_SETTLING_S", 0.05)


def waiting(count: int) -> Scheduler:
    """Return a scheduler without replicas and with this many queued short requests."""
    driver = ManualDriver(on_demand_pools=("short", "long"))
    for number in range(count):
        driver.arrive(f"r{number}", prompt_tokens=100)
    return driver.scheduler


async def decided(scaling: LiveScaling) -> None:
    await wait_until(lambda: bool(scaling.status()["pools"]))


async def test_nothing_is_ordered_before_replicas_had_time_to_reconnect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_scaling, "_SETTLING_S", 0.5)
    scaling = LiveScaling("m", POOLS, CollectorRegistry())
    scaling.follow(waiting(1))
    await asyncio.sleep(0.03)
    assert scaling.statistics() == {}
    await decided(scaling)
    scaling.stop()


async def test_that_time_begins_with_the_first_scheduler_however_long_its_state_took_to_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_scaling, "_SETTLING_S", 0.5)
    scaling = LiveScaling("m", POOLS, CollectorRegistry())
    await asyncio.sleep(0.6)
    scaling.follow(waiting(1))
    await asyncio.sleep(0.03)
    assert scaling.statistics() == {}
    scaling.stop()


async def test_a_request_without_a_replica_orders_one_and_every_pool_is_described() -> None:
    registry = CollectorRegistry()
    scaling = LiveScaling("m", POOLS, registry)
    scaling.follow(waiting(1))
    await decided(scaling)
    # Serve receives the pools that it scales; other autoscalers read the metrics page.
    assert scaling.statistics() == {"least_replicas:short": 1.0}
    pools = scaling.status()["pools"]
    assert (pools["short"]["desired_replicas"], pools["short"]["scaled_by"]) == (1, "ewsjf")
    assert (pools["long"]["desired_replicas"], pools["long"]["scaled_by"]) == (0, "external")
    assert "no engine has started yet" in pools["short"]["reason"]
    page = generate_latest(registry).decode()
    assert 'ewsjf_desired_replicas{model="m",pool="short"} 1.0' in page
    assert 'ewsjf_desired_replicas{model="m",pool="long"} 0.0' in page
    scaling.stop()


async def test_another_live_scheduler_is_followed_and_a_change_is_logged_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="ray.serve")
    logging.getLogger("ray.serve").propagate = True
    scaling = LiveScaling("m", POOLS, CollectorRegistry())
    scaling.follow(Scheduler(settings()))
    await decided(scaling)
    assert scaling.statistics() == {"least_replicas:short": 0.0}
    scaling.follow(waiting(2))
    await wait_until(lambda: scaling.statistics() == {"least_replicas:short": 1.0})
    scaling.stop()
    # Ray may add a second handler that records here.
    records = {id(record): record.getMessage() for record in caplog.records}
    (line,) = [message for message in records.values() if "pool_scaled" in message]
    assert "pool=short replicas=1 before=0 ready=0" in line


async def test_a_fault_leaves_the_last_decision_and_is_counted_each_time_but_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="ray.serve")
    logging.getLogger("ray.serve").propagate = True
    registry = CollectorRegistry()
    scaling = LiveScaling("m", POOLS, registry)
    scaling.follow(waiting(1))
    await decided(scaling)
    assert failures(registry) == 0
    faults = itertools.count()

    def broken(*_: object) -> None:
        raise RuntimeError(f"broken at {next(faults)}")

    def broken_otherwise(*_: object) -> None:
        raise KeyError("short")

    with monkeypatch.context() as changed:
        changed.setattr(live_scaling, "observe", broken)
        await wait_until(lambda: failures(registry) >= 5)
        assert scaling.statistics() == {"least_replicas:short": 1.0}
        assert fault_events(caplog) == ["event=scaling_failed"]
        changed.setattr(live_scaling, "observe", broken_otherwise)
        seen = failures(registry)
        await wait_until(lambda: failures(registry) >= seen + 5)
    await wait_until(lambda: "event=scaling_recovered" in fault_events(caplog))
    assert fault_events(caplog) == ["event=scaling_failed", "event=scaling_failed", "event=scaling_recovered"]
    scaling.stop()


def failures(registry: CollectorRegistry) -> float:
    (value,) = (
        float(line.rpartition(" ")[2])
        for line in generate_latest(registry).decode().splitlines()
        if line.startswith('ewsjf_scaling_failures_total{model="m"}')
    )
    return value


def fault_events(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the events of scaling faults, each line once."""
    # Ray may add a second handler that records here.
    records = {id(record): record.getMessage().split()[0] for record in caplog.records}
    return [event for event in records.values() if event.startswith("event=scaling_")]


@pytest.mark.parametrize("document", [{}, {"start_s": 4.0}, {"start_s": {"short": 42.0, "long": -1.0}}])
def test_an_impossible_stored_start_time_is_rejected(document: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"learned state: .*start_s"):
        decoded(document, ScalingState)
