"""Pool views observed from a real scheduler."""

from dataclasses import replace

import pytest

from serve_app.core.events import FirstToken, ReplicaLost, Retuned
from serve_app.core.scaling import observe
from serve_app.request import PriorityClass
from tests.builders import ManualDriver, fill, key, two_pools

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
