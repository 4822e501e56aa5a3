import random

import pytest

from serve_app.core.routing.prefill_cost import PrefillCost, PrefillCosts


def test_the_prior_applies_before_the_first_observation() -> None:
    assert PrefillCost().seconds(1_000) == pytest.approx(0.13)


def test_a_linear_cost_is_found() -> None:
    rng = random.Random(1)
    cost = PrefillCost()
    for _ in range(1_000):
        tokens = rng.randint(32, 4_096)
        cost.observe(tokens, (0.02 + 5e-4 * tokens) * rng.uniform(0.9, 1.1))
    for tokens in (100, 1_000, 4_000):
        assert cost.seconds(tokens) == pytest.approx(0.02 + 5e-4 * tokens, rel=0.1)


def test_a_faster_engine_is_learned_within_some_hundreds() -> None:
    cost = PrefillCost()
    for speed in (1e-3, 1e-4):
        for number in range(1_000):
            tokens = 100 + number % 50 * 80
            cost.observe(tokens, speed * tokens)
    assert cost.per_token_s == pytest.approx(1e-4, rel=0.1)


def test_noise_never_makes_a_prompt_free() -> None:
    cost = PrefillCost()
    for number in range(500):
        cost.observe(4_000 if number % 2 else 40, 0.01 if number % 2 else 3.0)
    assert cost.seconds(1) > 0
    assert cost.seconds(8_000) >= cost.seconds(1)


def test_impossible_observations_are_ignored() -> None:
    cost = PrefillCost()
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
