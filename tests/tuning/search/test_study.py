import copy
import math
import random

import pytest

from serve_app.tuning.search.optimiser import make_optimiser
from serve_app.tuning.search.search_space import Values
from serve_app.tuning.search.study import Phase, Study, StudySettings
from tests.tuning.rewards import BEST, CURRENT, Objective, bowl, play, space, study

SMALL = StudySettings(trials=25, rungs=(1, 2, 4), confirm_windows=6, batch=4)


def verdict(machine: Study) -> tuple[bool, str]:
    assert machine.finding is not None
    return machine.finding.confident, machine.finding.reason


def test_a_better_candidate_is_found_and_confirmed_on_windows_it_was_not_chosen_by() -> None:
    machine = study(SMALL)
    play(machine, bowl)
    finding = machine.finding
    assert finding is not None
    assert finding.confident
    assert finding.best is not None
    assert finding.confirmation is not None
    assert (finding.trials, finding.confirmation.windows) == (25, 6)
    assert bowl(finding.best.values, 0) > bowl(CURRENT, 0)
    assert {window for window in machine.board.rewards[finding.best.number] if window >= 4} == set(
        range(4, 10)
    )


def test_from_the_best_values_nothing_is_recommended() -> None:
    machine = Study(make_optimiser("random", space(BEST)), SMALL)

    def flat(values: Values, window: int) -> float:
        return bowl(values, window) if values != BEST else 10.0

    play(machine, flat)
    assert verdict(machine) == (False, "no candidate looked better than the values in force")


def test_luck_is_not_recommended() -> None:
    chance = random.Random(4)
    wins = 0
    for seed in range(20):
        machine = study(StudySettings(trials=13, rungs=(1, 3), confirm_windows=6), seed=seed)
        play(machine, lambda _values, _window: chance.gauss(0.0, 1.0))
        wins += verdict(machine)[0]
    # One in twenty is expected.
    assert wins <= 4


@pytest.mark.parametrize(
    "poison",
    [
        lambda _values, _window: None,
        lambda _values, _window: math.nan,
        lambda _values, _window: math.inf,
        lambda values, _window: 0.0 if values == CURRENT else math.inf,
        lambda values, _window: 0.0 if values == CURRENT else None,
        lambda _values, _window: 0.5,
        lambda values, window: (9.0 if window < 4 else None) if values != CURRENT else 0.0,
    ],
    ids=["none", "nan", "inf", "inf but not now", "none but not now", "constant", "none when it counts"],
)
def test_a_poisoned_objective_recommends_nothing(poison: Objective) -> None:
    machine = study(SMALL)
    play(machine, poison)
    assert machine.phase is Phase.DONE
    assert not verdict(machine)[0]


def test_poor_candidates_stop_early() -> None:
    machine = study(SMALL)
    jobs = play(machine, bowl)
    windows = [sum(window < 4 for window in rewards) for rewards in machine.board.rewards.values()]
    assert windows[0] == 4
    assert windows.count(1) > len(windows) / 3
    assert jobs < 25 * 4 * 0.7 + 6 * 3


def test_all_candidates_meet_the_same_windows() -> None:
    machine = study(SMALL)
    play(machine, bowl)
    for rewards in machine.board.rewards.values():
        searched = [window for window in rewards if window < 4]
        assert searched == list(range(len(searched)))


def test_the_order_in_which_jobs_come_back_does_not_matter() -> None:
    straight, mixed = study(SMALL, method="tpe"), study(SMALL, method="tpe")
    play(straight, bowl)
    chance = random.Random(1)
    while mixed.jobs():
        job = chance.choice(mixed.jobs())
        mixed.tell(job, bowl(job.values, job.window))
    assert mixed.finding == straight.finding


def test_when_time_is_up_the_best_so_far_is_confirmed() -> None:
    machine = study(SMALL)
    play(machine, bowl, at_most=30)
    assert machine.phase is Phase.SEARCH
    tried = len(machine.board)
    machine.end_search()
    play(machine, bowl)
    assert machine.finding is not None
    assert machine.finding.trials == tried < 25


def test_time_may_be_up_before_anything_was_tried() -> None:
    machine = study(SMALL)
    machine.end_search()
    play(machine, bowl)
    why = "time was up before any candidate had played all windows of the search"
    assert verdict(machine) == (False, why)


def test_a_job_of_a_round_that_was_given_up_changes_nothing() -> None:
    machine = study(SMALL)
    play(machine, bowl, at_most=5)
    job = machine.jobs()[-1]
    machine.end_search()
    jobs, rewards = machine.jobs(), copy.deepcopy(machine.board.rewards)
    machine.tell(job, 100.0)
    assert (machine.jobs(), machine.board.rewards) == (jobs, rewards)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"trials": 0}, "study.trials"),
        ({"rungs": (2, 1)}, "study.rungs"),
        ({"rungs": ()}, "study.rungs"),
        ({"confirm_windows": 1}, "study.confirm_windows"),
        ({"keep_ratio": 0.0}, "study.keep_ratio"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StudySettings(**wrong)  # type: ignore[arg-type]
