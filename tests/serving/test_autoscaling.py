"""Scheduler targets as Ray Serve's controller applies them."""

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from serve_app.core.scaling import AutoscalingSettings
from serve_app.serving.autoscaling import (
    CPU_CORES,
    GatewayPolicy,
    GatewayScaling,
    PoolPolicy,
    SchedulerPolicy,
    gateway_config,
    pool_config,
    scheduler_config,
    statistics,
)


@dataclass
class Context:
    app_name: str | None = "app"
    target_num_replicas: int = 2
    running_replicas: Sequence[Any] = ()
    current_time: float | None = 1_000.0
    raw_metrics: Mapping[str, Mapping[Any, Sequence[Any]]] | None = field(default_factory=dict)


def recorded(at: float, *, least: bool = False, **replicas: int) -> Mapping[str, Mapping[Any, Sequence[Any]]]:
    return {
        name: {
            "replica": [
                SimpleNamespace(timestamp=at - 5, value=99),
                SimpleNamespace(timestamp=at, value=value),
            ]
        }
        for name, value in statistics(replicas, {} if not least else replicas).items()
    }


def wanted(pool: str, context: Context, scheduler: str = "scheduler-m") -> int:
    return PoolPolicy(scheduler=scheduler, pool=pool)(context)[0]


def test_a_pool_gets_its_schedulers_target_and_is_unchanged_without_one() -> None:
    scheduler = SchedulerPolicy(scheduler="scheduler-m")
    assert wanted("short", Context(app_name="fresh")) == 2
    assert scheduler(Context(app_name="fresh", raw_metrics=recorded(999.0, short=5, long=0))) == (1, {})
    assert wanted("short", Context(app_name="fresh")) == 5
    assert wanted("long", Context(app_name="fresh")) == 0
    assert wanted("short", Context(app_name="other")) == 2
    assert wanted("short", Context(app_name="fresh"), "scheduler-n") == 2


def test_a_new_scheduler_starts_replicas_and_stops_none_until_its_pools_have_reported() -> None:
    scheduler = SchedulerPolicy(scheduler="scheduler-m")
    # Two replicas were ordered at deployment, and their engines take minutes to start.
    scheduler(Context(app_name="new", raw_metrics=recorded(990.0, least=True, short=0, long=3)))
    assert wanted("short", Context(app_name="new")) == 2
    assert wanted("long", Context(app_name="new")) == 3
    both = {**recorded(990.0, least=True, short=0), **recorded(991.0, short=1)}
    scheduler(Context(app_name="new", raw_metrics=both))
    assert wanted("short", Context(app_name="new")) == 1


def test_numbers_that_are_too_old_change_nothing() -> None:
    scheduler = SchedulerPolicy(scheduler="scheduler-m")
    scheduler(Context(app_name="old", raw_metrics=recorded(900.0, short=5)))
    assert wanted("short", Context(app_name="old")) == 2
    scheduler(Context(app_name="old", raw_metrics={}))
    assert wanted("short", Context(app_name="old", current_time=910.0)) == 5


def test_serve_takes_the_settings_and_makes_the_policies() -> None:
    settings = AutoscalingSettings(min_replicas=0, max_replicas=4)
    config = AutoscalingConfig(**pool_config(settings, "scheduler-m", "short"))
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (0, 0, 4)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0, 0)
    policy = config.policy.get_policy()
    assert policy(**config.policy.policy_kwargs) == PoolPolicy(scheduler="scheduler-m", pool="short")
    of_scheduler = AutoscalingConfig(**scheduler_config("scheduler-m"))
    assert of_scheduler.policy.get_policy()(**of_scheduler.policy.policy_kwargs) == SchedulerPolicy(
        scheduler="scheduler-m"
    )


def ordered(policies: Sequence[AutoscalingPolicy]) -> int:
    """Return what a pool gets of its scheduler's number, by policies as Serve's controller unpickles them."""
    scheduler, pool = (policy.get_policy()(**policy.policy_kwargs) for policy in policies)
    scheduler(Context(raw_metrics=recorded(999.0, short=5)))
    found: int = pool(Context())[0]
    return found


def test_the_policies_share_numbers_in_another_process() -> None:
    """Serve pickles each of them by value, with a copy of the module's global variables."""
    configs = (
        scheduler_config("scheduler-m"),
        pool_config(AutoscalingSettings(max_replicas=9), "scheduler-m", "short"),
    )
    policies = [AutoscalingConfig(**config).policy for config in configs]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as controller:
        assert controller.submit(ordered, policies).result() == 5


def gateways(*cores: float | None, target: int = 1) -> int:
    """Return the target for gateways with this CPU use; None is a gateway that has not reported yet."""
    names = [f"g{number}" for number in range(len(cores))]
    reported = {
        name: [SimpleNamespace(timestamp=at, value=used + (at - 5) / 10) for at in range(11)]
        for name, used in zip(names, cores, strict=True)
        if used is not None
    }
    # Serve still has the metrics of a stopped gateway.
    gone = {"gone": [SimpleNamespace(timestamp=1.0, value=50.0)]}
    context = Context(
        running_replicas=names, target_num_replicas=target, raw_metrics={CPU_CORES: {**reported, **gone}}
    )
    return GatewayPolicy()(context)[0]


def test_gateways_follow_the_processor_time_that_they_use_in_the_mean() -> None:
    assert gateways(0.0) == 1
    assert gateways(0.59) == 1
    assert gateways(0.61) == 2
    assert gateways(0.6, 0.6, target=2) == 2
    assert gateways(0.9, 0.9, target=2) == 3
    assert gateways(0.1, 0.1, 0.1, target=3) == 1


def test_gateways_without_reports_are_no_reason_for_fewer() -> None:
    assert gateways(0.1, None, target=2) == 2
    assert gateways(target=2) == 2
    assert gateways(0.9, None, target=1) == 2


def test_serve_takes_the_bounds_of_gateways() -> None:
    config = AutoscalingConfig(**gateway_config(GatewayScaling(min_replicas=2, max_replicas=5)))
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (2, 2, 5)
    assert config.downscale_delay_s == 300.0
    assert config.policy.get_policy()(**config.policy.policy_kwargs) == GatewayPolicy()
    with pytest.raises(ValueError, match="min_replicas of 3 is above max_replicas of 2: raise the latter"):
        GatewayScaling(min_replicas=3, max_replicas=2)
