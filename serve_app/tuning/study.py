"""Search for better values, from the first window to the verdict, within a time budget.

1. *Search*: candidates and the incumbent play the same windows. First the presets race, then rounds of
   candidates that the optimiser proposes, if there is one. After the first windows of a race only the better
   half plays on.
2. *Confirmation*: the best candidate that played all search windows meets the incumbent on *fresh* windows,
   one after the other. On the windows it was chosen by, the best of many looks better than it is. The first
   fresh windows decide if the result is clear: a sequential test stops as soon as the candidate has won, or
   is not ahead. A candidate is recommended only if the lower bound of its gain is positive as well.

Candidates are compared with the incumbent on the same windows (`compare`). Both receive the same requests at
the same times, so the randomness of a window cancels out of the difference.

Sources: Jamieson, Talwalkar, Non-stochastic Best Arm Identification (AISTATS 2016), for halving; common
random numbers as in any textbook of simulation; `trial.evidence` for the sequential test.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from serve_app.core.metrics.summary import t_95
from serve_app.core.settings_base import NOT_NEGATIVE, at_least, settings
from serve_app.tuning.objective import Reward, finite
from serve_app.tuning.optimiser import TpeOptimiser
from serve_app.tuning.search_space import Values
from serve_app.tuning.trial import evidence

INCUMBENT = 0
"""Number of the candidate with the incumbent values."""

_HALVINGS = 2
"""Number of first windows after each of which only the better half of a race plays on."""
_ROUND = 8
"""Candidates that the optimiser proposes at a time, which race against each other."""
_MIN_FRESH = 4
"""Fresh windows before the first look. The t interval of fewer is too wide to be positive."""
_RISK = 0.05
"""Bound on the probability that the sequential test prefers a candidate that is not better, at any look."""


@settings(block="study")
class StudySettings:
    """Settings for the effort of a study, and for confirming a candidate."""

    # Windows on which candidates are chosen.
    search_windows: Annotated[int, at_least(1)] = 4
    # Maximum number of fresh windows on which the best candidate has to win.
    confirm_windows: Annotated[int, at_least(_MIN_FRESH).hint("fewer give no useful interval")] = 12
    # Maximum number of candidates that the optimiser proposes after the presets.
    proposals: Annotated[int, NOT_NEGATIVE] = 48

    @property
    def searched(self) -> range:
        """Windows by which candidates are chosen."""
        return range(self.search_windows)

    @property
    def fresh(self) -> range:
        """Windows on which the best candidate is confirmed."""
        return range(self.search_windows, self.search_windows + self.confirm_windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """Result of a candidate in a window, and its cost: all simulated requests, including unmeasured ones."""

    reward: Reward
    requests: int


PlayWindow = Callable[[Values, int], WindowResult]
"""Simulates a candidate's values on the window of a number, which has the same traffic for all candidates."""


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
        evidence: against no difference, valid at any number of windows; 1 is neutral.
        windows: windows in which both have a reward.
        missing: windows in which one of them has none.
    """

    mean: float
    low: float | None
    high: float | None
    evidence: float
    windows: int
    missing: int = 0

    @property
    def is_win(self) -> bool:
        """True if the candidate is better with confidence. Never true if a reward is missing."""
        return self.low is not None and self.low > 0 and self.evidence >= 1 / _RISK and not self.missing


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
    low = high = None
    if count >= 2:
        independent = min(float(count), max(1.0, independent_windows))
        half = t_95(count - 1) * statistics.stdev(differences) / math.sqrt(independent)
        low, high = mean - half, mean + half
    return Comparison(
        mean=mean, low=low, high=high, evidence=evidence(differences), windows=count, missing=missing
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Verdict of a study.

    Attributes:
        best: values of the best candidate; None if none looked better than the incumbent.
        confirmation: its comparison on fresh windows; None if it was not confirmed.
        confident: whether `best` is recommended.
        reason: the verdict in words.
        candidates: number of candidates without the incumbent.
    """

    best: Values | None
    confirmation: Comparison | None
    confident: bool
    reason: str
    candidates: int


def run_study(
    first: Sequence[Values],
    settings: StudySettings,
    play: PlayWindow,
    budget: Budget,
    *,
    optimiser: TpeOptimiser | None = None,
    independent_windows: float = math.inf,
) -> Finding:
    """Search until there is a verdict.

    Args:
        first: the incumbent, then the presets.
        optimiser: proposes further candidates, after it has learned from the first ones; None for presets
            only.
        independent_windows: see `compare`.
    """
    return _Study(settings, play, budget, independent_windows).run(first, optimiser)


@dataclass(slots=True)
class _Study:
    """A study in progress."""

    settings: StudySettings
    play: PlayWindow
    budget: Budget
    independent_windows: float
    candidates: list[Values] = field(init=False, default_factory=list)
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

    def run(self, first: Sequence[Values], optimiser: TpeOptimiser | None) -> Finding:
        """Return the verdict."""
        incumbent, *presets = first
        self.candidates.append(incumbent)
        searched = self.settings.searched
        self._play([INCUMBENT], searched)
        base = self._mean(INCUMBENT, searched)
        if base is None:
            return self._finding("the current values cannot be measured, so there is no comparison")
        # The optimiser numbers candidates as this study does.
        if optimiser is not None:
            for values in first:
                optimiser.add(values)
        rewards = self._race(presets, base)
        last = len(first) + self.settings.proposals
        while rewards is not None and optimiser is not None and len(self.candidates) < last:
            optimiser.tell({INCUMBENT: base, **rewards})
            size = min(_ROUND, last - len(self.candidates))
            rewards = self._race([optimiser.propose() for _ in range(size)], base)
        return self._confirm(in_time=rewards is not None)

    def _race(self, racing: Sequence[Values], base: float) -> dict[int, float | None] | None:
        """Play candidates against each other, and return their rewards by number; None if time was up.

        Args:
            base: mean reward of the incumbent. A candidate's reward is that plus the paired difference, so
                candidates are comparable although most never play all windows.
        """
        numbers = range(len(self.candidates), len(self.candidates) + len(racing))
        self.candidates += racing
        left = list(numbers)
        for window in self.settings.searched:
            if not self._play(left, [window], in_budget=True):
                return None
            if window < _HALVINGS:
                left.sort(key=lambda each: (-self._gain(each), each))
                left = left[: math.ceil(len(left) / 2)]
        return {each: finite(base + self._gain(each)) for each in numbers}

    def _confirm(self, *, in_time: bool) -> Finding:
        """Return the verdict on the best candidate."""
        searched, fresh = self.settings.searched, self.settings.fresh
        whole = [each for each in range(1, len(self.candidates)) if self._mean(each, searched) is not None]
        best = max(whole, key=lambda each: (self._gain(each), -each), default=INCUMBENT)
        if best == INCUMBENT and not in_time:
            return self._finding("the time ended before any candidate had completed all search windows")
        if best == INCUMBENT or self._gain(best) <= 0:
            return self._finding("no candidate was better than the current values")
        for window in fresh:
            self._play([INCUMBENT, best], [window])
            found = self._against(best, fresh)
            if found.is_win and found.windows >= _MIN_FRESH:
                return self._finding(f"better on {found.windows} fresh windows", best, won=True)
            if found.missing or (found.mean <= 0 and found.windows >= _MIN_FRESH):
                break
        return self._finding("no candidate won with confidence on fresh windows", best)

    def _finding(self, reason: str, best: int | None = None, *, won: bool = False) -> Finding:
        return Finding(
            best=None if best is None else self.candidates[best],
            confirmation=None if best is None else self._against(best, self.settings.fresh),
            confident=won,
            reason=reason,
            candidates=len(self.candidates) - 1,
        )

    def _play(self, candidates: Sequence[int], windows: Iterable[int], *, in_budget: bool = False) -> bool:
        """Play candidates on windows. Return False if the time was up before the end."""
        for window in windows:
            for each in candidates:
                self.results[each, window] = self.play(self.candidates[each], window)
                self.budget.yield_cpu()
                self._first_s = self._first_s or self.seconds
                if in_budget and self._is_over():
                    return False
        return True

    def _is_over(self) -> bool:
        """Return whether the remaining time is needed to confirm a candidate."""
        if self.budget.seconds is None:
            return False
        each_s = (self.seconds - self._first_s) / max(1, len(self.results) - 1)
        return self.seconds + 2 * self.settings.confirm_windows * each_s >= self.budget.seconds

    def _mean(self, candidate: int, windows: range) -> float | None:
        """Return the mean reward over these windows; None if one of them is missing."""
        rewards = [
            reward for reward in _rewards(self.results, candidate, windows).values() if reward is not None
        ]
        return statistics.fmean(rewards) if len(rewards) == len(windows) else None

    def _gain(self, candidate: int) -> float:
        """Return the mean difference to the incumbent on the search windows; very low without a reward."""
        found = self._against(candidate, self.settings.searched)
        return found.mean if found.windows and not found.missing else -math.inf

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
