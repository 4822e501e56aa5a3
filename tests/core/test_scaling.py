"""Scaling: the replicas that pools need, from views of a scheduler's state."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.events import Finished, FirstToken, ReplicaJoined, ReplicaLost, Retuned
from serve_app.core.queueing.floors import FloorSettings
from serve_app.core.scaling import AutoscalingSettings, FleetScaler, ScaledPool, ScalingSettings, observe
from serve_app.core.scaling.pool_scaler import (
    DecodeLine,
    EngineSpeed,
    PoolDecision,
    PoolNeed,
    PoolScaler,
    PoolSpeed,
    PoolView,
    StartTime,
    share_gpus,
)
from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from tests.builders import ManualDriver, dispatched, fill, key, spec, two_pools

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


# -- all pools of a model together ------------------------------------------------------------------------


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
    assert fleet.start_times() == {}
    fleet.restore({"short": 42.0, "gone": 7.0})
    assert fleet.start_times() == {"short": 42.0}
    decisions = fleet.decide({"short": IDLE, "long": IDLE}, 0.0)
    assert (decisions["short"].start_s, decisions["long"].start_s) == (42.0, 60.0)


# -- GPU budget -------------------------------------------------------------------------------------------


def need(replicas: int, *, least: int = 0, gpus: float = 1.0, needed: float | None = None) -> PoolNeed:
    return PoolNeed(replicas=replicas, needed=replicas if needed is None else needed, least=least, gpus=gpus)


@pytest.mark.parametrize(
    ("short", "long", "budget", "shares"),
    [
        pytest.param(need(7), need(3, gpus=4), None, (7, 3), id="without a budget all get what they request"),
        pytest.param(need(2), need(1, gpus=4), 6, (2, 1), id="a sufficient budget changes nothing"),
        pytest.param(need(8), need(4), 6, (4, 2), id="a shortage is shared evenly"),
        pytest.param(need(9, needed=8.5), need(1, needed=0.1), 4, (3, 1), id="one without replicas is first"),
        pytest.param(need(5), need(2, gpus=4), 7, (3, 1), id="a pool too large for the rest leaves it"),
        pytest.param(need(9, least=1), need(2, least=2, gpus=4), 10, (2, 2), id="minimums are given"),
    ],
)
def test_pools_share_a_budget(
    short: PoolNeed, long: PoolNeed, budget: float | None, shares: tuple[int, int]
) -> None:
    assert tuple(share_gpus({"short": short, "long": long}, budget).values()) == shares


needs = st.builds(
    lambda replicas, least, gpus, part: PoolNeed(
        replicas=max(replicas, least), needed=max(0.0, max(replicas, least) - part), least=least, gpus=gpus
    ),
    st.integers(0, 20),
    st.integers(0, 2),
    st.sampled_from((0.0, 0.5, 1.0, 2.0, 4.0)),
    st.floats(0, 0.99),
)


@given(st.lists(needs, min_size=1, max_size=4), st.floats(0, 60))
def test_a_budget_is_never_exceeded_but_by_minimums_and_never_left_idle(
    asked: list[PoolNeed], budget: float
) -> None:
    named = {f"p{number}": each for number, each in enumerate(asked)}
    given_ = share_gpus(named, budget)
    least = sum(each.least * each.gpus for each in asked)
    used = sum(named[pool].gpus * count for pool, count in given_.items())
    assert used <= max(budget, least) + 1e-6
    for pool, count in given_.items():
        assert named[pool].least <= count <= named[pool].replicas
        if count < named[pool].replicas:
            assert named[pool].gpus > budget - used - 1e-6 or math.isclose(named[pool].gpus, budget - used)


# -- pool views observed from a real scheduler ------------------------------------------------------------

POOLS = ("short", "long")


def test_an_idle_pool_shows_its_capacity() -> None:
    view = observe(two_pools().scheduler, POOLS, 0.0)["short"]
    assert (view.ready, view.slots, view.in_flight, view.has_demand) == (1, 8.0, 0, False)
    assert view.full_ratio == 0.0


def test_work_is_counted_where_it_is_at_home_whether_it_waits_runs_or_was_rejected() -> None:
    driver = two_pools(max_waiting=3)
    for number in range(20):
        driver.arrive(f"r{number}", prompt_tokens=100)
    driver.arrive("long", prompt_tokens=900)
    seen = observe(driver.scheduler, POOLS, driver.now)
    assert seen["short"].arrived_requests == 20
    assert seen["short"].arrived_prefill_tokens == 2_000
    assert seen["long"].arrived_requests == 1
    assert 0 < seen["short"].waiting_requests <= 3
    assert seen["short"].waiting_prefill_tokens == 100 * seen["short"].waiting_requests
    assert seen["short"].has_demand


def test_batch_work_starts_a_pool_and_adds_no_further_replica() -> None:
    driver = ManualDriver(on_demand_pools=("short", "long"))
    driver.arrive("r1", prompt_tokens=100, priority=PriorityClass.BATCH)
    view = observe(driver.scheduler, POOLS, driver.now)["short"]
    assert view.has_demand
    assert (view.arrived_requests, view.waiting_requests, view.oldest_wait_s) == (0, 0, 0.0)


def test_batch_work_counts_as_far_as_its_floor() -> None:
    """Requests that the floor has dispatched have arrived, and one that it should have waits."""
    driver = ManualDriver(
        floors=FloorSettings(tenants={"night": 50.0}),
        backpressure=BackpressureSettings(lag_factor=0.0, target_waiting=1),
    )
    driver.join("s1", "short", max_model_len=1_000)
    driver.arrive("other", prompt_tokens=100)
    for number in range(3):
        driver.arrive(f"b{number}", prompt_tokens=100, tenant="night", priority=PriorityClass.BATCH)
    view = observe(driver.scheduler, POOLS, driver.now)["short"]
    assert (view.arrived_requests, view.oldest_wait_s) == (1, 0.0)
    driver.report("s1", after_s=6.0)
    assert observe(driver.scheduler, POOLS, driver.now)["short"].oldest_wait_s == 6.0
    assert len(dispatched(driver.feed(Finished("other", Outcome.COMPLETED)))) == 1
    view = observe(driver.scheduler, POOLS, driver.now)["short"]
    assert (view.arrived_requests, view.arrived_prefill_tokens) == (2, 200)
    driver.report("s1", after_s=20.0)
    assert observe(driver.scheduler, POOLS, driver.now)["short"].oldest_wait_s == 10.0


def test_the_longest_wait_is_that_of_the_oldest_head() -> None:
    driver = ManualDriver(on_demand_pools=("short", "long"))
    driver.arrive("r1", prompt_tokens=100)
    driver.now += 4.0
    driver.arrive("r2", prompt_tokens=100)
    assert observe(driver.scheduler, POOLS, driver.now)["short"].oldest_wait_s == 4.0


def test_a_full_cache_counts_as_full_slots() -> None:
    driver = ManualDriver()
    driver.join("s1", "short", max_model_len=1_000, kv_tokens=1_000, max_num_seqs=64)
    driver.arrive("r1", prompt_tokens=390, max_output_tokens=10)
    view = observe(driver.scheduler, POOLS, driver.now)["short"]
    assert view.full_ratio == pytest.approx(0.4, abs=0.01)
    assert view.slots == pytest.approx(2.5, abs=0.1)


def test_reports_contain_sequences_and_their_tpot() -> None:
    driver = two_pools()
    driver.arrive("r1", prompt_tokens=100)
    driver.feed(FirstToken("r1"))
    driver.report("s1", after_s=0.2, running=1, tpot_s=0.02, received=1)
    assert observe(driver.scheduler, POOLS, driver.now)["short"].reports == ((1, 0.02),)


def test_a_replica_that_drains_is_not_ready_and_what_it_has_still_counts() -> None:
    driver = two_pools()
    driver.arrive("r1", prompt_tokens=100)
    driver.report("s1", after_s=0.2, running=1, received=1, draining=True)
    view = observe(driver.scheduler, POOLS, driver.now)["short"]
    assert (view.ready, view.in_flight, view.has_demand) == (0, 1, True)


def test_waits_that_another_replica_would_not_end_add_no_replica() -> None:
    driver = ManualDriver()
    driver.join("s1", "short", adapters=("both", "sql"))
    driver.join("s2", "short", adapters=("both",))
    driver.join("leaves", "short")
    driver.report("leaves", draining=True)
    driver.join("l1", "long")
    fill(driver, bound_to="s1")
    fill(driver, "g", bound_to="s2")
    driver.arrive("bound", prompt_tokens=100, bound_to="s1")
    driver.arrive("loaded on one", prompt_tokens=100, adapter="sql")
    assert observe(driver.scheduler, POOLS, 9.0)["short"].oldest_wait_s == 0.0
    driver.arrive("loaded on all", prompt_tokens=100, adapter="both")
    assert observe(driver.scheduler, POOLS, 9.0)["short"].oldest_wait_s == 9.0


def test_rejections_that_more_replicas_would_not_prevent_are_no_load() -> None:
    driver = two_pools()
    terms = key(requests_per_minute=2)
    for number in range(50):
        driver.arrive(f"limited{number}", prompt_tokens=100, key=terms)
    driver.arrive("of another model", model="other")
    driver.arrive("too long", prompt_tokens=10**6)
    seen = observe(driver.scheduler, POOLS, driver.now)
    assert (seen["short"].arrived_requests, seen["long"].arrived_requests) == (2, 0)


def test_the_gate_is_the_current_one_after_a_tuner_has_changed_it() -> None:
    driver = two_pools()
    now = driver.scheduler.settings
    assert observe(driver.scheduler, POOLS, 0.0)["short"].tpot_limit_s == now.backpressure.tpot_gate_s
    driver.feed(Retuned(replace(now, backpressure=replace(now.backpressure, tpot_gate_s=0.01))))
    assert observe(driver.scheduler, POOLS, 0.0)["long"].tpot_limit_s == 0.01


def test_a_lost_replica_is_not_observed_until_it_returns() -> None:
    driver = two_pools()
    assert observe(driver.scheduler, POOLS, 0.0)["short"].replica_ids == ("s1",)
    driver.feed(ReplicaLost("s1"))
    assert observe(driver.scheduler, POOLS, 0.0)["short"].replica_ids == ()
    driver.join("s1", "short")
    assert observe(driver.scheduler, POOLS, 0.0)["short"].replica_ids == ("s1",)


# -- speed of engines and pools ---------------------------------------------------------------------------


def test_a_line_through_reports_gives_the_step_time_of_a_full_batch() -> None:
    line = DecodeLine()
    assert line.tpot_s(10) is None
    for sequences in (4, 8, 16, 32):
        line.observe(sequences, 0.02 + 0.001 * sequences)
    assert line.tpot_s(64) == pytest.approx(0.084)


def test_one_number_of_sequences_gives_no_slope() -> None:
    line = DecodeLine()
    for _ in range(5):
        line.observe(8, 0.03)
    assert line.tpot_s(64) == pytest.approx(0.03)


def test_more_sequences_never_make_a_step_shorter_nor_more_than_in_proportion() -> None:
    falling, steep = DecodeLine(), DecodeLine()
    for sequences, tpot_s in ((4, 0.05), (32, 0.02)):
        falling.observe(sequences, tpot_s)
    for sequences, tpot_s in ((4, 0.001), (8, 0.1)):
        steep.observe(sequences, tpot_s)
    assert falling.tpot_s(64) == pytest.approx(falling.tpot_s(1))
    assert steep.tpot_s(0) >= 0.0  # type: ignore[operator]


def test_a_speed_with_an_unknown_part_is_unknown() -> None:
    speed = PoolSpeed()
    assert speed.now(None) is None
    speed.slots = 16.0
    speed.observe(8, 0.03, prefill_ratio=0.0)
    assert speed.now(None) is None
    speed.set_prefill(0.0001)
    assert speed.now(None) == EngineSpeed(0.0001, 0.03 / 16)


def test_prefills_are_taken_out_of_a_reported_tpot() -> None:
    speed = PoolSpeed()
    speed.slots = 8.0
    speed.set_prefill(0.0001)
    speed.observe(8, 0.06, prefill_ratio=0.5)
    found = speed.now(None)
    assert found is not None
    assert found.output_token_s == pytest.approx(0.03 / 8)


def test_an_engine_that_may_not_fill_its_slots_is_slower() -> None:
    """With the limit at half of a full batch's TPOT, half of the slots stay empty."""
    speed = PoolSpeed()
    speed.slots = 101.0
    speed.set_prefill(0.0)
    for sequences in (1, 51, 101):
        speed.observe(sequences, 0.001 * sequences, prefill_ratio=0.0)
    full, limited = speed.now(None), speed.now(0.051)
    assert full is not None
    assert limited is not None
    assert full.output_token_s == pytest.approx(0.001)
    assert limited.output_token_s == pytest.approx(0.001, rel=1e-3)
    base = PoolSpeed()
    base.slots = 100.0
    base.set_prefill(0.0)
    for sequences in (1, 50, 100):
        base.observe(sequences, 0.05 + 0.0005 * sequences, prefill_ratio=0.0)
    slow = base.now(0.06)
    assert slow is not None
    assert slow.output_token_s == pytest.approx(0.06 / 20, rel=0.02)


def test_stated_figures_of_an_engine_count_once() -> None:
    speed = PoolSpeed()
    speed.slots = 10.0
    speed.set_prefill(0.001)
    for _ in range(100):
        speed.state(10, 0.05)
    for _ in range(50):
        speed.observe(10, 0.02, prefill_ratio=0.0)
    found = speed.now(None)
    assert found is not None
    assert found.output_token_s == pytest.approx(0.002, rel=0.1)
    assert found.seconds(1_000, 100) == pytest.approx(1.0 + 100 * found.output_token_s)


# -- start time -------------------------------------------------------------------------------------------


def replicas(count: int) -> list[str]:
    return [f"r{number}" for number in range(count)]


def test_the_first_start_replaces_the_guess_and_later_ones_are_averaged() -> None:
    start = StartTime()
    assert (start.seconds, start.learned_s()) == (60.0, None)
    start.on_ready(replicas(1), 0.0)
    start.on_order(2, 10.0)
    start.on_ready(replicas(2), 30.0)
    assert start.seconds == start.learned_s() == 20.0
    start.on_ready(replicas(3), 40.0)
    assert start.seconds == 20.0 + 0.3 * (30.0 - 20.0)


def test_replicas_that_were_not_ordered_do_not_count() -> None:
    start = StartTime()
    start.on_ready((), 0.0)
    start.on_ready(replicas(3), 1.0)
    assert start.seconds == 60.0


def test_a_cancelled_order_is_not_awaited() -> None:
    start = StartTime()
    start.on_ready(replicas(1), 0.0)
    start.on_order(2, 10.0)
    start.on_order(-1, 20.0)
    start.on_ready(replicas(2), 50.0)
    start.on_ready(replicas(3), 500.0)
    assert start.seconds == 40.0


def test_a_brief_disconnection_is_not_a_start() -> None:
    start = StartTime()
    start.on_ready(replicas(2), 0.0)
    start.on_order(1, 10.0)
    start.on_ready(replicas(1), 11.0)
    start.on_ready(replicas(2), 12.0)
    assert start.learned_s() is None
    # A new scheduler: all replicas disappear and return.
    start.on_ready((), 13.0)
    start.on_ready(replicas(2), 14.0)
    assert start.learned_s() is None
    start.on_ready(replicas(3), 50.0)
    assert start.learned_s() == 40.0


def test_a_restored_start_time_is_averaged_with_later_starts() -> None:
    start = StartTime()
    start.restore(100.0)
    start.on_ready((), 0.0)
    start.on_order(1, 0.0)
    start.on_ready(replicas(1), 50.0)
    assert start.seconds == 100.0 + 0.3 * (50.0 - 100.0)


def test_replicas_lost_long_ago_are_removed_and_connected_ones_remain() -> None:
    start = StartTime()
    start.on_ready(("stays",), 0.0)
    for number in range(20_000):
        start.on_ready(("stays", f"comes-and-goes-{number}"), float(number))
    start.on_ready((), 20_000.0)
    start.on_order(2, 20_000.0)
    start.on_ready(("stays", "comes-and-goes-0"), 20_030.0)
    assert start.learned_s() == 30.0
    assert "1 ordered" in repr(start)


# -- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"min_replicas": 2, "max_replicas": 1}, "got min 2, initial None, max 1"),
        ({"initial_replicas": 0}, "got min 1, initial 0, max 1"),
        ({"initial_replicas": 3, "max_replicas": 2}, "got min 1, initial 3, max 2"),
    ],
)
def test_bounds_that_contradict_each_other_are_rejected(bounds: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AutoscalingSettings(**bounds)


def test_a_pool_begins_with_its_minimum_unless_another_number_is_given() -> None:
    assert AutoscalingSettings(min_replicas=0, max_replicas=4).first_replicas == 0
    assert AutoscalingSettings(min_replicas=0, initial_replicas=2, max_replicas=4).first_replicas == 2


def test_a_budget_below_the_minimum_of_the_pools_is_rejected() -> None:
    pool = ScaledPool(autoscaling=AutoscalingSettings(min_replicas=2, max_replicas=4), gpus=4.0)
    assert ScalingSettings(pools={"long": pool}, gpu_budget=8).gpu_budget == 8
    with pytest.raises(ValueError, match="gpu_budget of 6 is below the 8 GPUs"):
        ScalingSettings(pools={"long": pool}, gpu_budget=6)


def test_pools_of_a_fixed_size_count_as_their_size() -> None:
    with pytest.raises(ValueError, match="gpu_budget of 6 is below the 8 GPUs"):
        ScalingSettings(pools={"long": ScaledPool(replicas=2, gpus=4.0)}, gpu_budget=6)
