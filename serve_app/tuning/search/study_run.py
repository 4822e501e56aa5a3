"""Plays a study to its verdict within a budget of seconds, and keeps what happened on the way.

The study and the twin know no clock; this is where they meet one. The clock is an argument all the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serve_app.tuning.search.scoreboard import INCUMBENT, Job
from serve_app.tuning.search.study import Phase, Study
from serve_app.tuning.search.study_settings import StudySettings
from serve_app.tuning.twin.digital_twin import Played


class Twin(Protocol):
    """Plays windows, as `twin_processes.TwinProcesses` does."""

    def play(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Played]]:
        """Each job with what came of it, in their order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How far a search was after a round.

    Attributes:
        seconds: since it began.
        requests: simulated so far.
        trials: candidates so far.
        leader: number of the best one; 0 is what is in force.
        gain: its mean paired difference to what is in force, on the search windows.
    """

    seconds: float
    requests: int
    trials: int
    leader: int
    gain: float


@dataclass(slots=True)
class Course:
    """What happened in a study.

    Attributes:
        steps: one for each round of the search.
        played: what came of each window, by candidate and window.
        seconds: that it took in all.
    """

    steps: list[Step] = field(default_factory=list)
    played: dict[tuple[int, int], Played] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def requests(self) -> int:
        """Simulated in all."""
        return sum(each.requests for each in self.played.values())

    def rounds_of(self, candidate: int, windows: range) -> list[Played]:
        """What a candidate came to in these windows, as far as it played them."""
        return [self.played[candidate, window] for window in windows if (candidate, window) in self.played]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long a study may take.

    Attributes:
        seconds: for all of it; the search ends early enough for the confirmation. None sets no limit.
        clock: seconds, on any clock that only goes forward.
        rest: called after each window: where whoever may take only a share of a core waits.
    """

    clock: Callable[[], float]
    seconds: float | None = None
    rest: Callable[[], object] = lambda: None


def run_study(
    study: Study,
    settings: StudySettings,
    twin: Twin,
    budget: Budget,
    on_step: Callable[[Step], object] = lambda _: None,
) -> Course:
    """Play until there is a verdict (`study.finding`).

    Args:
        on_step: called after each round of the search.
    """
    course, began = Course(), budget.clock()
    first_s = 0.0
    for _ in _rounds(study):
        searching = study.phase in (Phase.INCUMBENT, Phase.SEARCH)
        # A round of the search may be given up in the middle when time is up; a confirmation may not.
        for job, played in twin.play(study.jobs()):
            course.played[job.candidate, job.window] = played
            study.tell(job, played.reward.value)
            budget.rest()
            seconds = budget.clock() - began
            first_s = first_s or seconds
            if searching and _is_over(budget, settings, seconds, _each_s(course, seconds - first_s)):
                study.end_search()
                break
        course.seconds = budget.clock() - began
        if searching and study.phase is not Phase.INCUMBENT:
            course.steps.append(_step(study, course))
            on_step(course.steps[-1])
    return course


def _rounds(study: Study) -> Iterator[None]:
    while study.jobs():
        yield


def _each_s(course: Course, seconds: float) -> float:
    """Seconds for each window so far, with all processes at work; without the first, which started them."""
    return seconds / max(1, len(course.played) - 1)


def _is_over(budget: Budget, settings: StudySettings, seconds: float, each_s: float) -> bool:
    """Whether what is left of the time is needed to confirm candidates."""
    if budget.seconds is None:
        return False
    return seconds + each_s * settings.confirm_windows * (1 + settings.finalists) >= budget.seconds


def _step(study: Study, course: Course) -> Step:
    leader = study.board.leader()
    return Step(
        seconds=course.seconds,
        requests=course.requests,
        trials=len(study.board),
        leader=leader,
        gain=0.0 if leader == INCUMBENT else study.board.over_search(leader).mean,
    )
