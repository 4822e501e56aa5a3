import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.config import AutoscalingConfig

from serve_app.serving.pool.autoscaling import (
    KV_USAGE,
    ONGOING,
    AutoscalingSettings,
    PoolPolicy,
    ReplicaLoad,
)

POLICY = PoolPolicy(
    target_kv_ratio=0.8, saturated_waiting=1.0, downscale_margin_ratio=0.8, stale_after_s=30.0
)
NOW = 1_000.0


def replicas_wanted(loads: Sequence[ReplicaLoad], current_target: int) -> int:
    """Replicas for these loads, at ten requests per replica."""
    return POLICY.desired_replicas(loads, current_target, target_ongoing=10.0)


def loads(*ongoing: float | None, kv: float = 0.0) -> list[ReplicaLoad]:
    return [ReplicaLoad(ongoing=n, kv_usage_ratio=None if n is None else kv) for n in ongoing]


@pytest.mark.parametrize(
    ("ongoing", "target", "desired"),
    [
        ((10.0,), 1, 1),
        ((10.1,), 1, 2),
        ((35.0,), 1, 4),
        ((20.0, 20.0), 2, 4),
        ((0.0, 0.0), 2, 0),
    ],
)
def test_a_pool_gets_the_replicas_that_hold_its_load(
    ongoing: tuple[float, ...], target: int, desired: int
) -> None:
    assert replicas_wanted(loads(*ongoing), target) == desired


def test_a_full_kv_cache_scales_a_pool_up_though_it_holds_few_requests() -> None:
    assert replicas_wanted(loads(2.0, kv=0.95), 1) == 2


def test_engines_that_do_not_keep_up_get_one_more_than_run() -> None:
    """The engines' own limits keep them from reaching the targets."""
    saturated = [ReplicaLoad(ongoing=6.0, waiting=1.5, kv_usage_ratio=0.1)] * 2
    assert replicas_wanted(saturated, 2) == 3
    # While the third starts, a fourth is not needed.
    assert replicas_wanted(saturated, 3) == 3


def test_what_waits_in_the_scheduler_counts_as_if_it_ran() -> None:
    """Prefill isolation and the TPOT limit hold requests back from engines that look idle."""
    held_back = [ReplicaLoad(ongoing=3.0, waiting=0.0, queued=14.0, kv_usage_ratio=0.1)] * 2
    assert replicas_wanted(held_back, 2) == 4
    assert replicas_wanted(held_back, 4) == 4
    nearly_gone = [ReplicaLoad(ongoing=3.0, waiting=0.0, queued=1.0, kv_usage_ratio=0.1)] * 2
    assert replicas_wanted(nearly_gone, 2) == 1


def test_a_queue_in_one_engine_of_many_is_no_reason_to_grow() -> None:
    busy = ReplicaLoad(ongoing=6.0, waiting=2.0, kv_usage_ratio=0.1)
    calm = ReplicaLoad(ongoing=6.0, waiting=0.0, kv_usage_ratio=0.1)
    assert replicas_wanted([busy, calm, calm], 3) == 3


def test_a_load_near_a_target_does_not_scale_down() -> None:
    assert replicas_wanted(loads(5.0, 5.0), 2) == 2
    assert replicas_wanted(loads(4.0, 4.0), 2) == 1


def test_a_replica_without_figures_forbids_scaling_down() -> None:
    assert replicas_wanted(loads(0.0, None), 2) == 2


def test_a_replica_without_figures_does_not_hinder_scaling_up() -> None:
    assert replicas_wanted(loads(31.0, None), 2) == 4


def test_replicas_that_just_started_do_not_call_for_more() -> None:
    assert replicas_wanted(loads(12.0, None), 2) == 2


def test_a_pool_without_any_figures_stays_as_it_is() -> None:
    assert replicas_wanted([], 3) == 3
    assert replicas_wanted(loads(None, None), 3) == 3


@given(st.lists(st.floats(0, 500), min_size=1, max_size=8), st.floats(0, 1), st.integers(0, 20))
def test_scaling_settles_when_the_load_stays(values: list[float], kv: float, target: int) -> None:
    """Once the first decision is carried out and the load is spread, nothing more changes."""
    first = max(1, replicas_wanted(loads(*values, kv=kv), target))
    spread = ReplicaLoad(ongoing=sum(values) / first, kv_usage_ratio=kv * len(values) / first)
    assert max(1, replicas_wanted([spread] * first, first)) == first


@given(st.lists(st.one_of(st.none(), st.floats(0, 500)), max_size=8), st.integers(0, 20))
def test_missing_figures_never_scale_down(values: list[float | None], target: int) -> None:
    assert replicas_wanted([*loads(*values), ReplicaLoad()], target) >= target


@dataclass
class Context:
    """The part of Serve's context that the policy reads."""

    points: dict[str, dict[str, list[Any]]]
    target_num_replicas: int = 2
    running_replicas: Sequence[str] = ("a", "b")
    current_time: float | None = NOW
    config: Any = field(default_factory=lambda: AutoscalingConfig(target_ongoing_requests=10.0))

    @property
    def raw_metrics(self) -> Mapping[str, Mapping[str, Sequence[Any]]]:
        return self.points

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[str, float]]:
        return {
            name: {
                replica: sum(p.value for p in points) / len(points)
                for replica, points in by.items()
                if points
            }
            for name, by in self.points.items()
        }


def recorded(age_s: float, **ongoing: float) -> dict[str, dict[str, list[Any]]]:
    def point(value: float) -> Any:
        return SimpleNamespace(timestamp=NOW - age_s, value=value)

    return {
        ONGOING: {replica: [point(value)] for replica, value in ongoing.items()},
        KV_USAGE: {replica: [point(0.0)] for replica in ongoing},
    }


def test_the_policy_reads_what_replicas_recorded() -> None:
    assert POLICY(Context(recorded(1.0, a=25.0, b=25.0)))[0] == 5
    assert POLICY(Context(recorded(1.0, a=1.0, b=1.0)))[0] == 1


def test_stale_figures_never_collapse_a_pool() -> None:
    assert POLICY(Context(recorded(31.0, a=0.0, b=0.0)))[0] == 2


def test_missing_figures_never_collapse_a_pool() -> None:
    assert POLICY(Context({}))[0] == 2


def test_a_replica_that_has_left_no_longer_counts() -> None:
    context = Context(recorded(1.0, a=9.0, gone=500.0), target_num_replicas=1, running_replicas=("a",))
    assert POLICY(context)[0] == 1


def test_serve_takes_the_settings_and_finds_the_policy() -> None:
    settings = AutoscalingSettings(min_replicas=1, max_replicas=3, target_ongoing_requests=7.0)
    config = AutoscalingConfig(**settings.serve_config())
    # As the controller gets it: pickled by value, and constructed with the keyword arguments.
    made = config.policy.get_policy()(**config.policy.policy_kwargs)
    context = Context(recorded(1.0, a=8.0), target_num_replicas=1, running_replicas=("a",), config=config)
    assert made(context)[0] == math.ceil(8.0 / 7.0)
    assert config.initial_replicas is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("min_replicas", 0),
        ("saturated_waiting", 0),
        ("max_replicas", 0),
        ("initial_replicas", 5),
        ("target_ongoing_requests", 0),
        ("target_kv_ratio", 1.5),
        ("downscale_margin_ratio", 0),
        ("upscale_delay_s", -1),
    ],
)
def test_settings_out_of_range_are_refused_with_their_value(key: str, value: float) -> None:
    arguments: dict[str, Any] = {key: value}
    with pytest.raises(ValueError, match=str(value)):
        AutoscalingSettings(**arguments)
