"""Search for better values, from the first window to the verdict, within a time budget.

1. *Incumbent*: the incumbent plays all search windows. The optimiser receives a candidate's reward as the
   incumbent's mean plus the paired difference. So candidates are comparable although most never play all
   windows.
2. *Search*, in rounds of `batch` candidates. All play the windows of the first rung. A candidate advances to
   the next rung if it is among the best `keep_ratio` of all that ever reached this one; the others stop. This
   is the stopping variant of successive halving. A round does not depend on the number of processes.
3. *Confirmation*: the best candidates that played all search windows are compared with the incumbent on
   *fresh* windows, one after the other. On the windows it was chosen by, the best of many looks better than
   it is. The first that wins with confidence is recommended. If none does, the incumbent remains.

Candidates are compared with the incumbent on the same windows (`compare`). Both receive the same requests at
the same times, so the randomness of a window cancels out of the difference.

Sources: Li et al., A System for Massively Parallel Hyperparameter Tuning (MLSys 2020), for the rungs; common
random numbers as in any textbook of simulation.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from serve_app.core.metrics.confidence import t_95
from serve_app.core.settings_base import POSITIVE_SHARE, at_least, settings
from serve_app.tuning.objective import Reward, finite
from serve_app.tuning.optimiser import Proposal, TpeOptimiser
from serve_app.tuning.search_space import Values

INCUMBENT = 0
"""Number of the proposal with the incumbent values."""


@settings(block="study")
class StudySettings:
    """Settings for the effort of a study, and for confirming a candidate."""

    # Number of candidates, including the incumbent.
    trials: Annotated[int, at_least(1)] = 60
    # Windows after which poor candidates stop. The last number is the number of windows that all are compared
    # on.
    rungs: tuple[int, ...] = (1, 2, 4, 8)
    # Share of candidates that advance at a rung. Lower values search wider; higher ones rely less on few
    # windows.
    keep_ratio: Annotated[float, POSITIVE_SHARE] = 0.4
    # Candidates per round: at least the number of processes, or some are idle.
    batch: Annotated[int, at_least(1)] = 4
    # Fresh windows on which a candidate has to win.
    confirm_windows: Annotated[int, at_least(2).hint("one window gives no interval")] = 12
    # Candidates that are confirmed. Each has a chance of one in forty to win without being better.
    finalists: Annotated[int, at_least(1)] = 2

    def __post_init__(self) -> None:
        ordered = list(self.rungs) == sorted(set(self.rungs))
        if not self.rungs or self.rungs[0] < 1 or not ordered:
            raise ValueError(f"study.rungs must be numbers of windows in ascending order, got {self.rungs}")

    @property
    def search_windows(self) -> range:
        """Windows by which candidates are chosen."""
        return range(self.rungs[-1])

    @property
    def fresh_windows(self) -> range:
        """Windows on which candidates are confirmed."""
        return range(self.rungs[-1], self.rungs[-1] + self.confirm_windows)


@dataclass(frozen=True, slots=True)
class WindowTask:
    """The simulation of one candidate on one window.

    Attributes:
        candidate: number of the proposal.
        window: number of the window, with the same traffic for all candidates.
    """

    candidate: int
    window: int
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """Result of a candidate in a window, and its cost: all simulated requests, including unmeasured ones."""

    reward: Reward
    requests: int


class WindowPlayer(Protocol):
    """Interface to play windows, implemented by `digital_twin.TwinProcesses`."""

    def play(self, jobs: Sequence[WindowTask]) -> Iterator[tuple[WindowTask, WindowResult]]:
        """Yield each job with its result, in the order of the jobs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Time budget of a study.

    Attributes:
        seconds: total; the search ends early enough for the confirmation. None for no limit.
        clock: returns seconds on any monotonic clock.
        yield_cpu: called after each window; a driver that is limited to a share of a core waits there.
    """

    clock: Callable[[], float]
    seconds: float | None = None
    yield_cpu: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Difference in reward: candidate less incumbent.

    Attributes:
        mean: over the windows in which both have a reward; 0 without any.
        low, high: the 95 % interval; None with fewer than two windows.
        windows: windows in which both have a reward.
        missing: windows in which one of them has none.
    """

    mean: float
    low: float | None
    high: float | None
    windows: int
    missing: int = 0

    @property
    def is_win(self) -> bool:
        """True if the candidate is better with confidence. Never true if a reward is missing."""
        return self.low is not None and self.low > 0 and not self.missing


def compare(
    candidate: Mapping[int, float | None],
    incumbent: Mapping[int, float | None],
    *,
    independent_windows: float = math.inf,
) -> Comparison:
    """Return the paired difference over the windows of the candidate, with Student's t interval.

    All windows are drawn from the same minutes of traffic. More windows make the result more precise for
    *those* minutes, but not for the next ones. So the standard error never falls below that of as many
    windows as the traffic is long (bootstrap of m out of n).

    Args:
        candidate, incumbent: rewards by window; None if there is none.
        independent_windows: length of the traffic that they were drawn from, in windows; at least 1.
    """
    differences = []
    for window, reward in candidate.items():
        other = incumbent.get(window)
        if reward is not None and other is not None:
            differences.append(reward - other)
    count, missing = len(differences), len(candidate) - len(differences)
    mean = statistics.fmean(differences) if differences else 0.0
    if count < 2:
        return Comparison(mean=mean, low=None, high=None, windows=count, missing=missing)
    independent = min(float(count), max(1.0, independent_windows))
    half = t_95(count - 1) * statistics.stdev(differences) / math.sqrt(independent)
    return Comparison(mean=mean, low=mean - half, high=mean + half, windows=count, missing=missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Progress of a search after one of its rounds.

    Attributes:
        seconds: since the search began.
        requests: simulated so far.
        trials: candidates so far.
        leader: number of the best candidate.
        gain: its mean paired difference to the incumbent, on the search windows.
    """

    seconds: float
    requests: int
    trials: int
    leader: int
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Verdict of a study.

    Attributes:
        best: the best candidate; None if none looked better than the incumbent.
        search: its comparison on the windows that it was chosen by, which is optimistic.
        confirmation: its comparison on fresh windows; None if it was not confirmed.
        confident: whether `best` is recommended.
        reason: the verdict in words.
    """

    best: Proposal | None
    search: Comparison | None
    confirmation: Comparison | None
    confident: bool
    reason: str
    trials: int


@dataclass(slots=True, kw_only=True)
class StudyHistory:
    """Complete course of a study.

    Attributes:
        proposals: every candidate by number; the incumbent is the first.
        rounds: one entry per round of the search.
        results: by candidate and window.
        seconds: total duration.
    """

    finding: Finding
    proposals: Sequence[Proposal]
    rounds: Sequence[Round]
    results: Mapping[tuple[int, int], WindowResult]
    seconds: float

    @property
    def requests(self) -> int:
        """Total number of simulated requests."""
        return sum(each.requests for each in self.results.values())

    def rewards(self, candidate: int, windows: range) -> dict[int, float | None]:
        """Return a candidate's rewards in these windows, as far as it played them."""
        return _rewards(self.results, candidate, windows)


def run_study(
    optimiser: TpeOptimiser,
    settings: StudySettings,
    player: WindowPlayer,
    budget: Budget,
    on_round: Callable[[Round], object] = lambda _: None,
    *,
    independent_windows: float = math.inf,
) -> StudyHistory:
    """Search until there is a verdict.

    Args:
        on_round: called after each round of the search.
        independent_windows: see `compare`.
    """
    study = _Study(optimiser, settings, player, budget, independent_windows)
    finding = study.run(on_round)
    return StudyHistory(
        finding=finding,
        proposals=study.proposals,
        rounds=study.rounds,
        results=study.results,
        seconds=study.seconds,
    )


@dataclass(slots=True)
class _Study:
    """A study in progress."""

    optimiser: TpeOptimiser
    settings: StudySettings
    player: WindowPlayer
    budget: Budget
    independent_windows: float
    proposals: list[Proposal] = field(init=False, default_factory=list)
    rounds: list[Round] = field(init=False, default_factory=list)
    results: dict[tuple[int, int], WindowResult] = field(init=False, default_factory=dict)
    _began: float = field(init=False)
    # End of the first window. Until then, processes started.
    _first_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._began = self.budget.clock()

    @property
    def seconds(self) -> float:
        """Seconds since the study began."""
        return self.budget.clock() - self._began

    def run(self, on_round: Callable[[Round], object]) -> Finding:
        self.proposals.append(self.optimiser.ask())
        windows = self.settings.search_windows
        in_time = self._play([INCUMBENT], windows, within_budget=False)
        base = self._mean(INCUMBENT, windows)
        if base is None:
            return self._finding("the current values cannot be measured, so there is no comparison")
        self.optimiser.tell(self.proposals[INCUMBENT], base)
        in_time = in_time and not self._is_over()
        while in_time and len(self.proposals) < self.settings.trials:
            in_time = self._round(base)
            leader = max(self._whole(), key=lambda each: (self._gain(each), -each))
            self.rounds.append(
                Round(
                    seconds=self.seconds,
                    requests=sum(each.requests for each in self.results.values()),
                    trials=len(self.proposals),
                    leader=leader,
                    gain=self._gain(leader),
                )
            )
            on_round(self.rounds[-1])
        return self._confirm(in_time=in_time)

    def _round(self, base: float) -> bool:
        """Run one round of the search and return whether it was in time."""
        size = min(self.settings.batch, self.settings.trials - len(self.proposals))
        racing = [self.optimiser.ask() for _ in range(size)]
        self.proposals += racing
        numbers, in_time = [each.number for each in racing], True
        for rung in self.settings.rungs:
            in_time = self._play(numbers, range(rung), within_budget=True)
            if not in_time:
                break
            means = {
                each.number: mean
                for each in self.proposals
                if (mean := self._mean(each.number, range(rung))) is not None
            }
            kept = math.ceil(self.settings.keep_ratio * len(means))
            best = sorted(means, key=lambda each: (-means[each], each))[:kept]
            numbers = [each for each in numbers if each in best]
        for each in racing:
            found = self._against(each.number, self.settings.search_windows)
            is_known = found.windows and not found.missing
            self.optimiser.tell(each, base + found.mean if is_known else None)
        return in_time

    def _confirm(self, *, in_time: bool) -> Finding:
        """Return the first finalist that wins on fresh windows, if any does."""
        windows = self.settings.fresh_windows
        better = [each for each in self._whole() if self._gain(each) > 0]
        finalists = sorted(better, key=lambda each: (-self._gain(each), each))[: self.settings.finalists]
        for each in finalists:
            self._play([INCUMBENT, each], windows, within_budget=False)
            found = self._against(each, windows)
            if found.is_win:
                return self._finding(f"candidate {each} won on {found.windows} fresh windows", each, won=True)
        if finalists:
            return self._finding("no candidate won with confidence on fresh windows", finalists[0])
        if not in_time and self._whole() == [INCUMBENT]:
            return self._finding("the time ended before any candidate had completed all search windows")
        return self._finding("no candidate was better than the current values")

    def _finding(self, reason: str, best: int | None = None, *, won: bool = False) -> Finding:
        return Finding(
            best=None if best is None else self.proposals[best],
            search=None if best is None else self._against(best, self.settings.search_windows),
            confirmation=None if best is None else self._against(best, self.settings.fresh_windows),
            confident=won,
            reason=reason,
            trials=len(self.proposals),
        )

    def _play(self, candidates: Sequence[int], windows: Iterable[int], *, within_budget: bool) -> bool:
        """Play the missing results, window by window. Return False if the time was up before the end."""
        jobs = [
            WindowTask(each, window, self.proposals[each].values)
            for window in windows
            for each in candidates
            if (each, window) not in self.results
        ]
        for job, result in self.player.play(jobs):
            self.results[job.candidate, job.window] = result
            self.budget.yield_cpu()
            self._first_s = self._first_s or self.seconds
            if within_budget and self._is_over():
                return False
        return True

    def _is_over(self) -> bool:
        """Return whether the remaining time is needed to confirm candidates."""
        if self.budget.seconds is None:
            return False
        each_s = (self.seconds - self._first_s) / max(1, len(self.results) - 1)
        left = self.settings.confirm_windows * (1 + self.settings.finalists)
        return self.seconds + each_s * left >= self.budget.seconds

    def _whole(self) -> list[int]:
        """Return the candidates with a reward for every search window, including the incumbent."""
        windows = self.settings.search_windows
        return [each.number for each in self.proposals if self._mean(each.number, windows) is not None]

    def _mean(self, candidate: int, windows: range) -> float | None:
        """Return the mean reward over these windows; None if one of them is missing."""
        rewards = [
            reward for reward in _rewards(self.results, candidate, windows).values() if reward is not None
        ]
        return statistics.fmean(rewards) if len(rewards) == len(windows) else None

    def _gain(self, candidate: int) -> float:
        return self._against(candidate, self.settings.search_windows).mean

    def _against(self, candidate: int, windows: range) -> Comparison:
        """Compare a candidate with the incumbent."""
        return compare(
            _rewards(self.results, candidate, windows),
            _rewards(self.results, INCUMBENT, windows),
            independent_windows=self.independent_windows,
        )


def _rewards(
    results: Mapping[tuple[int, int], WindowResult], candidate: int, windows: range
) -> dict[int, float | None]:
    return {
        window: finite(results[candidate, window].reward.value)
        for window in windows
        if (candidate, window) in results
    }
