import math

import pytest

from serve_app.tuning.optimiser import TpeOptimiser
from serve_app.tuning.search_space import Values
from tests.tuning.rewards import BEST, CURRENT, bowl, space

RANDOM = 1_000
"""Start-up trials that never end: random search from the prior."""


def run(optimiser: TpeOptimiser, trials: int) -> list[Values]:
    """Try this many proposals on the bowl, without noise."""
    tried = []
    for _ in range(trials):
        proposal = optimiser.ask()
        optimiser.tell(proposal, bowl(proposal.values, 0))
        tried.append(proposal.values)
    return tried


def miss(tried: list[Values]) -> float:
    return -max(bowl(values, 0) for values in tried)


def test_the_current_values_are_first_then_the_anchors() -> None:
    optimiser = TpeOptimiser(space(), anchors=[BEST, CURRENT, {**BEST, "n": 99}])
    first = [optimiser.ask().values for _ in range(4)]
    assert first[:3] == [CURRENT, BEST, {**BEST, "n": 16}]
    assert first[3] not in first[:3]


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
    proposals = []
    for _ in range(30):
        proposal = optimiser.ask()
        poisoned = proposal.values["a"] > 0
        optimiser.tell(proposal, reward if poisoned else bowl(proposal.values, 0))
        proposals.append(proposal.values["a"])
    # Two thirds of the prior are there.
    assert sum(value > 0 for value in proposals[15:]) <= 7


def test_a_proposal_of_another_optimiser_is_rejected() -> None:
    with pytest.raises(ValueError, match="not made by this optimiser"):
        TpeOptimiser(space()).tell(TpeOptimiser(space()).ask(), 1.0)
