"""Whether long prompts delay the others of an engine, learned from the starts of short ones."""

import math
import random

import pytest

from serve_app.core.routing.observed import PrefillInterference


def observe(learned: PrefillInterference, delay_s: float, count: int, seed: int = 1) -> bool:
    """Observe starts, half of them delayed by a long prefill. Return whether interference was ever shown."""
    rng, was_shown = random.Random(seed), False
    for number in range(count):
        beside_long = number % 2 == 1
        seconds = 0.4 * math.exp(rng.gauss(0, 0.5)) + (delay_s if beside_long else 0.0)
        learned.on_start(3, seconds, beside_long=beside_long)
        was_shown |= learned.is_shown
    return was_shown


@pytest.mark.parametrize("seed", range(10))
def test_chance_is_no_interference(seed: int) -> None:
    assert not observe(PrefillInterference(), 0.0, 2_000, seed)


def test_a_delay_is_shown_until_it_ends() -> None:
    learned = PrefillInterference()
    assert observe(learned, 1.0, 100)
    assert learned.is_shown
    observe(learned, 0.0, 400)
    assert not learned.is_shown


def test_a_significant_delay_that_does_not_matter_is_none() -> None:
    learned = PrefillInterference()
    for number in range(200):
        learned.on_start(3, 1.0 + 0.05 * (number % 2), beside_long=number % 2 == 1)
    assert not learned.is_shown
