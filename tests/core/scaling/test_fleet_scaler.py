"""Scaling of all pools of a model together."""

from dataclasses import replace

import pytest

from serve_app.core.events import ReplicaJoined, Retuned
from serve_app.core.scaling import AutoscalingSettings, FleetScaler, ScaledPool, ScalingSettings, observe
from serve_app.core.scaling.pool_scaler import PoolView
from tests.builders import ManualDriver, spec

IDLE = PoolView(ready=1, slots=10.0, prefill_token_s=0.001, stated=(10, 0.01))


def busy(engine_s: int) -> PoolView:
    """Return a pool with this many seconds of engine work queued."""
    return replace(IDLE, waiting_requests=1, waiting_prefill_tokens=engine_s * 1_000, has_demand=True)


def scaler(gpu_budget: float | None = None) -> FleetScaler:
    bounds = AutoscalingSettings(min_replicas=1, max_replicas=8)
    pools = {"short": ScaledPool(autoscaling=bounds, gpus=1), "long": ScaledPool(autoscaling=bounds, gpus=4)}
    return FleetScaler(ScalingSettings(pools=pools, gpu_budget=gpu_budget))


def test_only_the_pool_that_needs_it_grows() -> None:
    fleet = scaler()
    fleet.decide({"short": IDLE, "long": IDLE}, 0.0)
    decisions = fleet.decide({"short": IDLE, "long": busy(180)}, 1.0)
    assert {name: each.replicas for name, each in decisions.items()} == {"short": 1, "long": 3}


def test_the_budget_leaves_a_pool_less_than_it_needs_with_the_reason() -> None:
    fleet = scaler(gpu_budget=8)
    fleet.decide({"short": IDLE, "long": IDLE}, 0.0)
    decisions = fleet.decide({"short": busy(240), "long": busy(180)}, 1.0)
    assert {name: each.replicas for name, each in decisions.items()} == {"short": 4, "long": 1}
    assert "limited by the GPU budget" in decisions["long"].reason
    # The short pool is idle: its GPUs move to the other pool after its delay.
    for second in range(2, 310):
        decisions = fleet.decide({"short": IDLE, "long": busy(180)}, float(second))
    assert {name: each.replicas for name, each in decisions.items()} == {"short": 1, "long": 1}
    fleet = scaler(gpu_budget=9)
    fleet.decide({"short": IDLE, "long": IDLE}, 0.0)
    decisions = fleet.decide({"short": IDLE, "long": busy(180)}, 1.0)
    assert {name: each.replicas for name, each in decisions.items()} == {"short": 1, "long": 2}


def test_a_pool_of_a_fixed_size_takes_its_share_of_the_budget_whatever_it_would_need() -> None:
    bounds = AutoscalingSettings(min_replicas=1, max_replicas=8)
    pools = {"short": ScaledPool(replicas=4, gpus=1), "long": ScaledPool(autoscaling=bounds, gpus=1)}
    settings = ScalingSettings(pools=pools, gpu_budget=6)
    for short in (replace(IDLE, ready=4), replace(busy(900), ready=4)):
        fleet = FleetScaler(settings)
        fleet.decide({"short": short, "long": IDLE}, 0.0)
        decisions = fleet.decide({"short": short, "long": busy(600)}, 1.0)
        assert decisions["long"].replicas == 2
        # The replicas that it would need are still reported.
        assert decisions["short"].replicas != 4 or short.waiting_requests == 0


def test_a_gate_that_a_tuner_lowers_makes_engines_slower_and_so_the_load_higher() -> None:
    driver = ManualDriver()
    # A full batch of 100 has a TPOT of 100 ms, a single sequence about 50 ms.
    limits = spec(kv_tokens=10**6, max_num_seqs=100)
    driver.feed(ReplicaJoined(replace(limits, tpot_s=0.1, prefill_token_s=0.001)))
    fleet = FleetScaler(ScalingSettings(pools={"short": ScaledPool(autoscaling=AutoscalingSettings())}))
    for second in range(60):
        driver.arrive(f"r{second}", prompt_tokens=100, max_output_tokens=100)
        driver.report(running=1, tpot_s=0.05, after_s=1.0)
        before = fleet.decide(observe(driver.scheduler, ("short",), driver.now), driver.now)["short"].load
    now = driver.scheduler.settings
    driver.feed(Retuned(replace(now, backpressure=replace(now.backpressure, tpot_gate_s=0.06))))
    for second in range(60, 120):
        driver.arrive(f"r{second}", prompt_tokens=100, max_output_tokens=100)
        driver.report(running=1, tpot_s=0.05, after_s=1.0)
        after = fleet.decide(observe(driver.scheduler, ("short",), driver.now), driver.now)["short"].load
    assert after > 1.2 * before > 0.0


def test_start_times_are_passed_to_the_next_scaler_for_existing_pools_only() -> None:
    fleet = scaler()
    assert fleet.state() == {"start_s": {}}
    fleet.restore({"start_s": {"short": 42.0, "gone": 7.0}})
    assert fleet.state() == {"start_s": {"short": 42.0}}
    decisions = fleet.decide({"short": IDLE, "long": IDLE}, 0.0)
    assert (decisions["short"].start_s, decisions["long"].start_s) == (42.0, 60.0)


def test_an_impossible_stored_start_time_is_ignored() -> None:
    fleet = scaler()
    for wrong in ({}, {"start_s": 4.0}, {"start_s": {"short": 42.0, "long": -1.0}}):
        with pytest.raises(ValueError, match="learned state: "):
            fleet.restore(wrong)
    assert fleet.state() == {"start_s": {}}
