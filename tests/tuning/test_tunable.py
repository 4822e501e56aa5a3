import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.dispatch.engine_priority import EnginePrioritySettings
from serve_app.core.isolation import IsolationSettings
from serve_app.core.policies import POLICIES
from serve_app.core.settings import EwsjfSettings, ScoreWeights
from serve_app.errors import SettingsError
from serve_app.tuning.search_space import Tunable, parameters_of, space_of

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


@pytest.mark.parametrize("policy", POLICIES)
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
