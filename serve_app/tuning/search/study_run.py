"""The run of a study to its verdict, within a budget of seconds, with a record of each round.

The study and the twin know no clock; this is where they meet one, and the clock is an argument all the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serve_app.tuning.objective.objective import Reward
from serve_app.tuning.search.scoreboard import INCUMBENT
from serve_app.tuning.search.study import Job, Phase, Study, StudySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """What a candidate made of a window.

    Attributes:
        requests: simulated, the unmeasured ones among them: the cost of the window.
    """

    reward: Reward
    requests: int


class WindowPlayer(Protocol):
    """Plays windows, as `twin.processes.TwinProcesses` does."""

    def play(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, WindowResult]]:
        """Each job with its result, in the order of the jobs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """How far a search was after one of its rounds.

    Attributes:
        seconds: since the search began.
        requests: simulated so far.
        trials: candidates so far.
        leader: number of the best one; 0 has the values in force.
        gain: its mean paired difference to the incumbent, on the search windows.
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
        rounds: one entry for each round of the search.
        results: by candidate and window.
        seconds: the study took in all.
    """

    rounds: list[Round] = field(default_factory=list)
    results: dict[tuple[int, int], WindowResult] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def requests(self) -> int:
        """Simulated in all."""
        return sum(each.requests for each in self.results.values())

    def results_of(self, candidate: int, windows: range) -> list[WindowResult]:
        """A candidate's results in these windows, as far as it played them."""
        return [self.results[candidate, window] for window in windows if (candidate, window) in self.results]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long a study may take.

    Attributes:
        seconds: for all of it; the search ends early enough for the confirmation. None sets no limit.
        clock: seconds, on any clock that only goes forward.
        rest: called after each window; a driver that may use only a share of a core waits there.
    """

    clock: Callable[[], float]
    seconds: float | None = None
    rest: Callable[[], object] = lambda: None


def run_study(
    study: Study,
    settings: StudySettings,
    player: WindowPlayer,
    budget: Budget,
    on_round: Callable[[Round], object] = lambda _: None,
) -> Course:
    """Play until there is a verdict (`study.finding`).

    Args:
        on_round: called after each round of the search.
    """
    course, began = Course(), budget.clock()
    first_s = 0.0
    while study.jobs():
        searching = study.phase in (Phase.INCUMBENT, Phase.SEARCH)
        # A round of the search may be given up in the middle when time is up; a confirmation may not.
        for job, result in player.play(study.jobs()):
            course.results[job.candidate, job.window] = result
            study.tell(job, result.reward.value)
            budget.rest()
            seconds = budget.clock() - began
            first_s = first_s or seconds
            if searching and _is_over(budget, settings, seconds, _each_s(course, seconds - first_s)):
                study.end_search()
                break
        course.seconds = budget.clock() - began
        if searching and study.phase is not Phase.INCUMBENT:
            course.rounds.append(_round(study, course))
            on_round(course.rounds[-1])
    return course


def _each_s(course: Course, seconds: float) -> float:
    """Seconds for each window so far; without the first, in which the processes started."""
    return seconds / max(1, len(course.results) - 1)


def _is_over(budget: Budget, settings: StudySettings, seconds: float, each_s: float) -> bool:
    """Whether the remaining time is needed to confirm candidates."""
    if budget.seconds is None:
        return False
    return seconds + each_s * settings.confirm_windows * (1 + settings.finalists) >= budget.seconds


def _round(study: Study, course: Course) -> Round:
    leader = study.board.leader()
    return Round(
        seconds=course.seconds,
        requests=course.requests,
        trials=len(study.board),
        leader=leader,
        gain=0.0 if leader == INCUMBENT else study.board.over_search(leader).mean,
    )
