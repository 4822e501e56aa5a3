"""Prefill costs, and speeds of replicas."""

import random

import pytest

from serve_app.core.routing.prefill_cost import DecayingRate, PrefillCost, PrefillCosts, Speeds
from serve_app.core.routing.replica_state import ReplicaState
from tests.builders import spec


def test_the_prior_applies_before_the_first_observation() -> None:
    assert PrefillCost.prior().seconds(1_000) == pytest.approx(0.13)


def test_a_linear_cost_is_found() -> None:
    rng = random.Random(1)
    cost = PrefillCost.prior()
    for _ in range(1_000):
        tokens = rng.randint(32, 4_096)
        cost.observe(tokens, (0.02 + 5e-4 * tokens) * rng.uniform(0.9, 1.1))
    for tokens in (100, 1_000, 4_000):
        assert cost.seconds(tokens) == pytest.approx(0.02 + 5e-4 * tokens, rel=0.1)


def test_a_faster_engine_is_learned_within_some_hundreds() -> None:
    cost = PrefillCost.prior()
    for speed in (1e-3, 1e-4):
        for number in range(1_000):
            tokens = 100 + number % 50 * 80
            cost.observe(tokens, speed * tokens)
    assert cost.per_token_s == pytest.approx(1e-4, rel=0.1)


def test_noise_never_makes_a_prompt_free() -> None:
    cost = PrefillCost.prior()
    for number in range(500):
        cost.observe(4_000 if number % 2 else 40, 0.01 if number % 2 else 3.0)
    assert cost.seconds(1) > 0
    assert cost.seconds(8_000) >= cost.seconds(1)


def test_prompts_of_one_length_leave_the_slope_as_it_was() -> None:
    """Their points give no slope: what is left of it after thousands of them is rounding errors."""
    rng, cost = random.Random(1), PrefillCost.prior()
    for _ in range(9_000):
        cost.observe(1_000, 0.13 * rng.uniform(0.9, 1.1))
    assert cost.per_token_s == pytest.approx(1e-4, rel=0.05)
    assert cost.seconds(1_000) == pytest.approx(0.13, rel=0.05)


def test_impossible_observations_are_ignored() -> None:
    cost = PrefillCost.prior()
    cost.observe(0, 1.0)
    cost.observe(10, 0.0)
    assert cost.observations == 0
    assert repr(cost).endswith("n=0>")


def test_pools_on_unlike_hardware_have_unlike_costs() -> None:
    costs = PrefillCosts()
    for number in range(400):
        tokens = 100 + number % 50 * 80
        costs.observe("short", tokens, 5e-4 * tokens)
        costs.observe("long", tokens, 5e-5 * tokens)
    assert costs.of("short").per_token_s == pytest.approx(5e-4, rel=0.1)
    assert costs.of("long").per_token_s == pytest.approx(5e-5, rel=0.1)


def test_a_pool_with_few_observations_uses_the_cost_of_all_pools() -> None:
    costs = PrefillCosts()
    for _ in range(100):
        costs.observe("short", 1_000, 2.0)
    costs.observe("long", 1_000, 0.1)
    assert costs.of("long") is costs.of("another") is costs.shared
    assert costs.of("short") is not costs.shared


# -- speeds of replicas, and the expected completion of a request on each ---------------------------------


def pool_of(*seconds: float | None) -> tuple[Speeds, list[ReplicaState]]:
    """Return replicas that took so long for each of three requests of 1,000 tokens; None for no request."""
    found = [ReplicaState(spec(f"s{n}"), n, DecayingRate(1.0, 0.0), kv_budget=1) for n in range(len(seconds))]
    for replica, took_s in zip(found, seconds, strict=True):
        for _ in range(3 if took_s is not None else 0):
            replica.speed.record(took_s or 0.0, 1_000.0, 0.0)
    speeds = Speeds()
    speeds.compare("short", found, 0.0)
    return speeds, found


def ratios(replicas: list[ReplicaState]) -> list[float]:
    return [round(each.speed.ratio, 2) for each in replicas]


def test_replicas_that_differ_by_chance_are_alike() -> None:
    speeds, replicas = pool_of(1.0, 1.4)
    assert not speeds.are_unlike("short")
    assert ratios(replicas) == [1.0, 1.0]


def test_slowness_is_relative_to_the_fastest_and_an_unknown_replica_counts_as_fast() -> None:
    speeds, replicas = pool_of(2.0, 1.0, None, 5.0)
    assert speeds.are_unlike("short")
    assert ratios(replicas) == [2.0, 1.0, 1.0, 5.0]


def test_one_outlier_of_three_answers_does_not_count() -> None:
    speeds, replicas = pool_of(1.0, 1.0)
    replicas[1].speed.record(90.0, 1_000.0, 1.0)
    speeds.compare("short", replicas, 2.0)
    assert not speeds.are_unlike("short")


def test_replicas_that_become_alike_are_chosen_by_load_again() -> None:
    speeds, replicas = pool_of(1.0, 3.0)
    for _ in range(16):
        replicas[1].speed.record(1.0, 1_000.0, 1.0)
    speeds.compare("short", replicas, 2.0)
    assert not speeds.are_unlike("short")
    assert ratios(replicas) == [1.0, 1.0]


def test_the_completion_weighs_speed_against_load() -> None:
    speeds, (fast, slow) = pool_of(1.0, 2.0)
    args = (100, 50, 1.0)
    assert speeds.completion(fast, *args) < speeds.completion(slow, *args)
    fast.prefills.tokens = 50_000
    assert speeds.completion(fast, *args) > speeds.completion(slow, *args)
    fast.prefills.tokens, fast.in_flight = 0, 200
    assert speeds.completion(fast, *args) > speeds.completion(slow, *args)


def test_pending_prefills_count_more_on_a_replica_with_many_requests() -> None:
    speeds, (one, other) = pool_of(1.0, 2.0)
    one.prefills.tokens = other.prefills.tokens = 10_000
    alone = speeds.completion(one, 100, 50, 1.0)
    one.in_flight = 8
    # Twice the pending tokens, and a decode step that is longer by the eight.
    assert speeds.completion(one, 100, 50, 1.0) - alone == 10_000 + 50 * 8 * 2


def test_the_cost_is_that_of_like_replicas_times_the_slowness() -> None:
    speeds, (fast, slow) = pool_of(1.0, 2.0)
    for each in (fast, slow):
        each.prefills.tokens, each.in_flight = 400, 3
    assert (speeds.cost(fast, 100, 1.0), speeds.cost(slow, 100, 1.0)) == (2_000, 4_000)


def test_an_idle_slow_replica_is_tried_again_after_a_while() -> None:
    speeds, (fast, slow) = pool_of(1.0, 2.0)
    args = (100, 50)
    assert speeds.completion(slow, *args, 239.0) > speeds.completion(fast, *args, 239.0)
    assert speeds.completion(slow, *args, 241.0) == speeds.completion(fast, *args, 241.0)
    # Only one request at a time.
    slow.in_flight = 1
    assert speeds.completion(slow, *args, 241.0) > 2 * speeds.completion(fast, *args, 241.0)


def test_replicas_whose_answers_overlap_are_alike() -> None:
    speeds, (one, other) = pool_of(None, None)
    # Medians differ by a factor of two, and three such samples in a hundred do so by chance.
    for seconds in (0.5, 1.0, 3.0, 3.5):
        one.speed.record(seconds, 1_000.0, 0.0)
    for seconds in (0.6, 2.0, 4.0, 9.0):
        other.speed.record(seconds, 1_000.0, 0.0)
    speeds.compare("short", [one, other], 2.0)
    assert not speeds.are_unlike("short")
