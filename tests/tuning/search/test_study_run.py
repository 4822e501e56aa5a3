from collections.abc import Iterator, Sequence

from serve_app.tuning.objective.objective import Reward
from serve_app.tuning.search.study import Job, StudySettings
from serve_app.tuning.search.study_run import Budget, Course, Round, WindowResult, run_study
from tests.tuning.rewards import bowl, study

SETTINGS = StudySettings(trials=41, rungs=(1, 2, 4), confirm_windows=4, finalists=1)


class Bowl:
    """Takes a second for each window, and ten more for the first."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def play(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, WindowResult]]:
        for job in jobs:
            self.now += 1.0 if self.now else 11.0
            reward = Reward(value=bowl(job.values, job.window), requests=50)
            yield job, WindowResult(reward=reward, requests=60)


def played(seconds: float | None) -> tuple[Bowl, Course, bool, list[Round]]:
    twin, machine, rounds = Bowl(), study(SETTINGS), list[Round]()
    course = run_study(machine, SETTINGS, twin, Budget(clock=twin.clock, seconds=seconds), rounds.append)
    assert machine.finding is not None
    assert not machine.jobs()
    return twin, course, machine.finding.confident, rounds


def test_without_a_limit_every_candidate_is_tried() -> None:
    twin, course, confident, rounds = played(None)
    assert confident
    assert rounds == course.rounds
    assert rounds[-1].trials == 41
    assert course.seconds == twin.now
    assert course.requests == 60 * len(course.results)


def test_the_leader_only_ever_gets_better() -> None:
    _, _, _, rounds = played(None)
    gains = [each.gain for each in rounds]
    assert gains == sorted(gains)
    assert gains[0] >= 0.0
    assert [each.requests for each in rounds] == sorted(each.requests for each in rounds)


def test_the_search_ends_in_time_for_the_confirmation() -> None:
    for seconds in (40.0, 60.0, 80.0):
        twin, course, _, _ = played(seconds)
        assert len(course.results) > 4
        assert seconds - 10.0 < twin.now <= seconds


def test_hardly_any_time_leaves_the_settings_as_they_are() -> None:
    _, course, confident, rounds = played(1.0)
    assert not confident
    assert len(course.results) == 4
    assert [step.trials for step in rounds] == [1]


def test_there_is_a_rest_after_every_window() -> None:
    twin, machine, rests = Bowl(), study(SETTINGS), []
    budget = Budget(clock=twin.clock, rest=lambda: rests.append(twin.now))
    course = run_study(machine, SETTINGS, twin, budget)
    assert len(rests) == len(course.results)


def test_the_results_of_a_candidate_are_kept() -> None:
    _, course, _, _ = played(None)
    assert len(course.results_of(0, range(8))) == 8
    assert course.results_of(0, range(100, 110)) == []
