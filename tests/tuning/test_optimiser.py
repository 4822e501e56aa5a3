import math
import statistics

import pytest

from serve_app.tuning.search_space import TpeOptimiser, Values
from tests.tuning.rewards import BEST, CURRENT, bowl, space

RANDOM = 1_000
"""Start-up trials that never end: random search from the prior."""


def run(optimiser: TpeOptimiser, count: int) -> list[Values]:
    """Try the current values and then proposals on the bowl, without noise."""
    tried: list[Values] = [CURRENT]
    optimiser.add(CURRENT)
    while len(tried) < count:
        optimiser.tell({len(tried) - 1: bowl(tried[-1], 0)})
        tried.append(optimiser.propose())
    return tried


def miss(tried: list[Values]) -> float:
    return -max(bowl(values, 0) for values in tried)


def test_proposals_differ_from_each_other_and_from_what_was_added() -> None:
    optimiser = TpeOptimiser(space())
    optimiser.add(BEST)
    optimiser.add({**BEST, "n": 99})
    proposed = [optimiser.propose() for _ in range(8)]
    assert all(proposed.count(values) == 1 for values in proposed)
    assert not any(values in (BEST, {**BEST, "n": 16}) for values in proposed)


def test_what_was_added_guides_the_proposals() -> None:
    def proposed_beside(good: Values) -> float:
        optimiser = TpeOptimiser(space(), startup=8)
        for number in range(12):
            optimiser.add({**good, "a": good["a"] + 0.01 * number})
            optimiser.add({**good, "a": -good["a"]})
            optimiser.tell({2 * number: 1.0 + number, 2 * number + 1: 0.0})
        return statistics.fmean(optimiser.propose()["a"] for _ in range(10))

    assert proposed_beside({**BEST, "a": -0.6}) < 0 < proposed_beside({**BEST, "a": 0.6})


def test_every_proposal_is_within_the_bounds_and_a_seed_decides_the_course() -> None:
    courses = [run(TpeOptimiser(space(), seed=seed), 30) for seed in (1, 1, 2)]
    assert courses[0] == courses[1]
    assert courses[0] != courses[2]
    assert all(space().is_within(values) for course in courses for values in course)


def test_tpe_beats_random_search_on_most_seeds() -> None:
    wins = [
        miss(run(TpeOptimiser(space(), seed=seed), 50))
        < miss(run(TpeOptimiser(space(), seed=seed, startup=RANDOM), 50))
        for seed in range(5)
    ]
    assert sum(wins) >= 4


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, -math.inf])
def test_unmeasurable_values_do_not_attract_the_search(reward: float | None) -> None:
    optimiser = TpeOptimiser(space(), seed=0, startup=5)
    proposals: list[float] = []
    for number in range(30):
        values = optimiser.propose()
        optimiser.tell({number: reward if values["a"] > 0 else bowl(values, 0)})
        proposals.append(values["a"])
    # Two thirds of the prior are there.
    assert sum(value > 0 for value in proposals[15:]) <= 7
