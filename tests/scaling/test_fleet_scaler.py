"""All pools of a model together."""

from dataclasses import replace

from serve_app.scaling import AutoscalingSettings, FleetScaler, ScaledPool, ScalingSettings
from serve_app.scaling.observation import PoolView

IDLE = PoolView(ready=1, slots=10.0, prefill_token_s=0.001, stated=(10, 0.01))


def busy(engine_s: int) -> PoolView:
    """So many seconds of an engine wait."""
    return replace(IDLE, waiting_requests=1, waiting_prefill_tokens=engine_s * 1_000, is_wanted=True)


def scaler(gpu_budget: float | None = None) -> FleetScaler:
    bounds = AutoscalingSettings(min_replicas=1, max_replicas=8)
    pools = {"short": ScaledPool(autoscaling=bounds, gpus=1), "long": ScaledPool(autoscaling=bounds, gpus=4)}
    return FleetScaler(ScalingSettings(pools=pools, gpu_budget=gpu_budget))


def test_only_the_pool_that_needs_it_grows() -> None:
    fleet = scaler()
    fleet.decide({"short": IDLE, "long": IDLE}, 0.0)
    decisions = fleet.decide({"short": IDLE, "long": busy(180)}, 1.0)
    assert {name: each.replicas for name, each in decisions.items()} == {"short": 1, "long": 3}


def test_the_budget_leaves_a_pool_less_than_it_needs_and_says_so() -> None:
    fleet = scaler(gpu_budget=8)
    fleet.decide({"short": IDLE, "long": IDLE}, 0.0)
    decisions = fleet.decide({"short": busy(240), "long": busy(180)}, 1.0)
    assert {name: each.replicas for name, each in decisions.items()} == {"short": 4, "long": 1}
    assert "the GPU budget leaves no more" in decisions["long"].reason
    # The short pool's work is done: its GPUs go to the other once its delay has passed.
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
        # What it would need is still told.
        assert decisions["short"].replicas != 4 or short.waiting_requests == 0
