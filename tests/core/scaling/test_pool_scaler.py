"""Replicas that one pool needs, from given views of a scheduler's state."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.scaling.pool_scaler import (
    AutoscalingSettings,
    PoolDecision,
    PoolScaler,
    PoolView,
    ScaledPool,
)

# A prompt token costs an engine 1 ms, an output token 10 ms / 10.
IDLE = PoolView(ready=1, slots=10.0, prefill_token_s=0.001, stated=(10, 0.01))


class Pool:
    """A pool that is observed once per second."""

    def __init__(self, **settings: float) -> None:
        bounds = {"min_replicas": 1, "max_replicas": 8, "downscale_delay_s": 60.0} | settings
        autoscaling = AutoscalingSettings(**bounds)  # type: ignore[arg-type]
        self.scaler = PoolScaler(ScaledPool(autoscaling=autoscaling), load_time_constant_s=1.0)
        self.now = 0.0
        self.view = IDLE

    def look(self, seconds: int = 1, **changes: object) -> PoolDecision:
        """Observe the same state this many seconds, with this much work arriving per second."""
        arriving = changes.pop("prefill_tokens_per_s", 0)
        assert isinstance(arriving, int)
        self.view = replace(self.view, **changes)  # type: ignore[arg-type]
        for _ in range(seconds):
            self.now += 1.0
            self.view = replace(
                self.view,
                arrived_requests=self.view.arrived_requests + bool(arriving),
                arrived_prefill_tokens=self.view.arrived_prefill_tokens + arriving,
            )
            decision = self.scaler.decide(self.view, self.now)
            self.scaler.settle(decision.replicas, self.now)
        return decision


def test_arrivals_are_served_at_the_target_utilisation() -> None:
    pool = Pool()
    pool.look()
    # Work for 2.1 engines: at 70 % of each that is three.
    decision = pool.look(40, prefill_tokens_per_s=2_100)
    assert decision.load == pytest.approx(2.1, rel=0.01)
    assert decision.replicas == 3
    assert "arrivals fill 2.10 engines" in decision.reason


def test_a_burst_counts_by_its_queued_work_and_not_as_a_rate_that_would_last() -> None:
    # 16 requests to one slow engine, each with 25 s of work.
    scaler = PoolScaler(ScaledPool())
    waiting = replace(IDLE, waiting_requests=15, waiting_prefill_tokens=375_000, has_demand=True)
    found = []
    for now in range(120):
        arrived = 400_000 if now else 0
        found.append(
            scaler.decide(replace(waiting if now else IDLE, arrived_prefill_tokens=arrived), float(now))
        )
    # Six engines would serve the queue within the minute that an engine takes to start.
    assert 375 / 60 <= max(decision.replicas for decision in found) <= 375 / 60 + 3
    # A rate that lasts is followed within two minutes, ten times the engines.
    scaler = PoolScaler(ScaledPool())
    for now in range(120):
        arriving = replace(IDLE, arrived_requests=now, arrived_prefill_tokens=10_000 * now)
        decision = scaler.decide(arriving, float(now))
    assert decision.replicas == 15


def test_a_backlog_adds_replicas_that_drain_it_within_the_time_of_a_start() -> None:
    pool = Pool()
    pool.look()
    # 120 s of engine work are queued, and an engine starts in a minute.
    decision = pool.look(waiting_requests=10, waiting_prefill_tokens=120_000, has_demand=True)
    assert decision.backlog_s == pytest.approx(120.0)
    assert decision.replicas == 2


def test_a_request_that_waits_too_long_adds_one_replica_and_no_more_until_that_is_ready() -> None:
    pool = Pool()
    pool.look()
    late: dict[str, Any] = {"waiting_requests": 1, "has_demand": True, "oldest_wait_s": 9.0}
    assert pool.look(**late).replicas == 2
    assert pool.look(5, **late).replicas == 2
    assert pool.look(ready=2, slots=20.0, **late).replicas == 3


def test_a_new_scaler_stops_no_replica_for_briefly_late_reports() -> None:
    pool = Pool()
    assert pool.look(ready=4).replicas == 4
    # All reports are late at once, as after a pause of the scheduler's machine.
    late = pool.look(ready=0, slots=0.0, stated=None)
    assert (late.replicas, late.may_shrink) == (4, False)
    assert pool.look(58, ready=4, slots=40.0).replicas == 4
    settled = pool.look(2)
    assert (settled.replicas, settled.may_shrink) == (1, True)


def test_a_pool_shrinks_to_its_recent_maximum_need() -> None:
    pool = Pool()
    pool.look(61)
    assert pool.look(20, prefill_tokens_per_s=2_000, ready=3).replicas == 3
    assert pool.look(59).replicas == 3
    assert pool.look(10).replicas == 1


def test_running_requests_retain_replicas_without_arrivals() -> None:
    pool = Pool()
    pool.look(61)
    pool.look(1, ready=4, slots=40.0, full_ratio=0.7, in_flight=28, has_demand=True)
    assert pool.look(90).replicas == 3


def test_only_a_pool_whose_minimum_is_zero_is_stopped_and_only_after_the_delay() -> None:
    pool = Pool(min_replicas=0)
    assert pool.look(prefill_tokens_per_s=10).replicas == 1
    assert pool.look(59).replicas == 1
    assert pool.look(5).replicas == 0
    assert Pool(min_replicas=1).look(200).replicas == 1


@pytest.mark.parametrize("sign", [{"has_demand": True}, {"prefill_tokens_per_s": 1}])
def test_any_queued_or_arriving_request_starts_a_stopped_pool(sign: dict[str, Any]) -> None:
    pool = Pool(min_replicas=0)
    pool.look(ready=0, slots=0.0, prefill_token_s=None, stated=None)
    assert pool.look(200).replicas == 0
    assert pool.look(**sign).replicas == 1


def test_a_speed_that_is_not_known_yet_is_replaced_by_the_slots() -> None:
    pool = Pool()
    unknown: dict[str, Any] = {"prefill_token_s": None, "stated": None}
    decision = pool.look(in_flight=9, waiting_requests=12, has_demand=True, full_ratio=0.9, **unknown)
    assert decision.replicas == 3
    assert "engine speed unknown" in decision.reason


def test_the_speed_of_a_pool_that_has_stopped_is_remembered() -> None:
    pool = Pool(min_replicas=0)
    pool.look(62)
    pool.look(10, ready=0, slots=0.0, prefill_token_s=None, stated=None)
    decision = pool.look(waiting_prefill_tokens=150_000, waiting_requests=3, has_demand=True)
    assert decision.replicas == 3


def test_restarted_counters_are_no_negative_work() -> None:
    pool = Pool()
    pool.look(5, prefill_tokens_per_s=500)
    decision = pool.look(arrived_prefill_tokens=0, arrived_requests=0)
    assert decision.load >= 0.0


def test_a_pool_that_others_scale_has_no_bounds() -> None:
    scaler = PoolScaler(ScaledPool())
    scaler.decide(IDLE, 0.0)
    busy = replace(IDLE, waiting_prefill_tokens=6_000_000, waiting_requests=100, has_demand=True)
    assert scaler.decide(busy, 1.0).replicas == 100


views = st.builds(
    PoolView,
    ready=st.integers(0, 12),
    arrived_requests=st.integers(0, 1_000),
    arrived_prefill_tokens=st.integers(0, 1_000_000),
    arrived_output_tokens=st.integers(0, 1_000_000),
    waiting_requests=st.integers(0, 100),
    waiting_prefill_tokens=st.integers(0, 1_000_000),
    waiting_output_tokens=st.integers(0, 1_000_000),
    has_demand=st.booleans(),
    oldest_wait_s=st.floats(0, 100),
    in_flight=st.integers(0, 300),
    slots=st.floats(0, 3_000),
    full_ratio=st.floats(0, 2),
    prefill_token_s=st.none() | st.floats(1e-6, 1e-2),
    stated=st.none() | st.tuples(st.integers(1, 256), st.floats(1e-3, 1.0)),
    reports=st.lists(st.tuples(st.integers(0, 256), st.floats(1e-4, 5.0)), max_size=4).map(tuple),
    tpot_limit_s=st.none() | st.floats(0.01, 1.0),
)


@given(
    st.lists(views, min_size=1, max_size=30),
    st.integers(0, 3),
    st.integers(0, 6),
)
def test_a_decision_is_always_within_its_bounds_and_work_always_has_an_engine(
    seen: list[PoolView], least: int, more: int
) -> None:
    most = max(1, least + more)
    settings = AutoscalingSettings(min_replicas=least, max_replicas=most, downscale_delay_s=5.0)
    scaler = PoolScaler(ScaledPool(autoscaling=settings))
    for second, view in enumerate(seen):
        decision = scaler.decide(view, float(second))
        scaler.settle(decision.replicas, float(second))
        assert least <= decision.replicas <= most
        assert decision.replicas >= (1 if view.has_demand else 0)
