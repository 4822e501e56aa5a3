"""Search spaces, and the optimiser that searches them."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core import SchedulerSettings
from serve_app.core.dispatch.promotion import EnginePrioritySettings
from serve_app.core.isolation import IsolationSettings
from serve_app.core.settings import EwsjfSettings, ScoreWeights
from serve_app.errors import SettingsError
from serve_app.lab.simulation.baselines import SIMULATED_POLICIES
from serve_app.tuning.search_space import (
    Parameter,
    Scale,
    SearchSpace,
    TpeOptimiser,
    Tunable,
    Values,
    parameters_of,
    space_of,
)
from tests.tuning.rewards import BEST, CURRENT, PARAMETERS, bowl, space

UNIT = st.floats(0.0, 1.0)
A, B, N = PARAMETERS
VALUES = st.fixed_dictionaries(
    {"a": st.floats(-1.0, 1.0), "b": st.floats(0.01, 100.0), "n": st.integers(1, 16)}
)


def test_a_unit_is_linear_or_logarithmic() -> None:
    assert A.unit(0.0) == pytest.approx(0.5)
    assert B.unit(1.0) == pytest.approx(0.5)
    assert N.unit(4) == pytest.approx(0.5)
    assert [each.unit(-1e9) for each in PARAMETERS] == [0.0, 0.0, 0.0]
    assert [each.unit(1e9) for each in PARAMETERS] == [1.0, 1.0, 1.0]


@given(unit=UNIT)
@pytest.mark.parametrize("parameter", PARAMETERS)
def test_every_unit_has_a_value_within_the_bounds(parameter: Parameter, unit: float) -> None:
    value = parameter.at_unit(unit)
    assert parameter.low <= value <= parameter.high
    if parameter.integer:
        assert isinstance(value, int)
    else:
        assert parameter.unit(value) == pytest.approx(unit, abs=2e-3)


@given(current=VALUES, draws=st.fixed_dictionaries({"a": UNIT, "b": UNIT, "n": UNIT}))
def test_draws_and_values_are_inverse(current: Values, draws: dict[str, float]) -> None:
    around = space(current)
    values = around.from_draws(draws)
    assert around.clipped(values) == values
    back = around.from_draws(around.draws_of(values))
    assert back == pytest.approx(values, rel=1e-3, abs=1e-3)


@given(current=VALUES)
def test_the_current_values_are_in_the_middle_of_the_prior(current: Values) -> None:
    around = space(current)
    units = {each.name: each.unit(current[each.name]) for each in around}
    assert around.draws_of(current) == pytest.approx(units)


def test_the_prior_is_denser_near_the_current_value_and_reaches_both_ends() -> None:
    one = SearchSpace([A], {"a": 0.0})
    drawn = [one.from_draws({"a": place / 1_000})["a"] for place in range(1_001)]
    near = sum(abs(value) < 0.1 for value in drawn)
    far = sum(abs(value) > 0.9 for value in drawn)
    assert near > 3 * far
    assert (drawn[0], drawn[-1]) == (-1.0, 1.0)
    assert drawn == sorted(drawn)


def test_a_current_value_beyond_the_bounds_stays() -> None:
    beyond = space({**CURRENT, "n": 40})
    assert beyond.current["n"] == 40
    assert beyond.draws_of(beyond.current)["n"] == 1.0
    assert beyond.clipped(beyond.current)["n"] < 40


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": 0.0, "b": 1.0}, "n must be a finite number"),
        ({**CURRENT, "x": 1.0}, "unknown parameter x"),
        ({**CURRENT, "a": float("nan")}, "a must be a finite number"),
        ({**CURRENT, "a": float("inf")}, "a must be a finite number"),
    ],
)
def test_values_that_are_none_are_rejected(values: dict[str, float], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        space().checked(values)


def test_parameters_that_contradict_themselves_are_rejected() -> None:
    with pytest.raises(ValueError, match="bounds must be in order"):
        Parameter(name="a", path="a", low=1.0, high=1.0)
    with pytest.raises(ValueError, match="above 0"):
        Parameter(name="a", path="a", low=0.0, high=1.0, scale=Scale.LOG)
    with pytest.raises(ValueError, match="whole numbers"):
        Parameter(name="a", path="a", low=0.5, high=1.5, integer=True)
    with pytest.raises(SettingsError, match="at least one parameter"):
        SearchSpace([], {})


# Settings that can be tuned

OURS = Tunable(scheduler=SchedulerSettings(model="m"))
PAPER_NAMES = ("a_u", "b_u", "a_f", "b_f", "alpha")


def test_the_papers_parameters_are_among_ours_within_its_ranges() -> None:
    space = space_of(OURS)
    assert set(PAPER_NAMES) <= set(space.names)
    assert (space["a_u"].low, space["a_u"].high) == (-1e-3, 1e-2)
    assert (space["a_f"].low, space["a_f"].high) == (-1e-3, 1e-3)
    assert space["alpha"].low <= 0.5 < 3.0 <= space["alpha"].high


def test_given_weights_stay() -> None:
    given = EwsjfSettings(weights=ScoreWeights(b_u=3.0))
    assert space_of(Tunable(scheduler=SchedulerSettings(model="m", ewsjf=given))).current["b_u"] == 3.0


@pytest.mark.parametrize("policy", SIMULATED_POLICIES)
def test_every_policy_has_a_space_whose_corners_are_settings(policy: str) -> None:
    tunable = Tunable(scheduler=SchedulerSettings(model="m", policy=policy))
    space = space_of(tunable)
    for draw in (0.0, 1.0):
        corner = space.from_draws(dict.fromkeys(space.names, draw))
        tuned = tunable.with_values(corner, space)
        assert {each.name: tuned.value(each) for each in space} == corner


def test_only_what_matters_is_tuned() -> None:
    plain = {each.name for each in parameters_of(SchedulerSettings(model="m", policy="fcfs"))}
    assert plain == {"target_waiting"}
    off = SchedulerSettings(model="m", isolation=IsolationSettings(max_long_prefills=0))
    assert "short_work_share" not in space_of(Tunable(scheduler=off)).names
    ordered = SchedulerSettings(model="m", engine_priority=EnginePrioritySettings(enabled=True))
    (waiting,) = (each for each in parameters_of(ordered) if each.name == "target_waiting")
    assert waiting.path == "engine_priority.target_waiting"


def test_a_part_of_the_space_can_be_chosen() -> None:
    assert space_of(OURS, only=["b_u", "alpha"]).names == ("b_u", "alpha")
    with pytest.raises(SettingsError, match="cannot tune c_u"):
        space_of(OURS, only=["c_u"])


# -- optimiser --------------------------------------------------------------------------------------------

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
    assert all(space().clipped(values) == values for course in courses for values in course)


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
