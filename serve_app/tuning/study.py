"""Comparison of candidates with the incumbent: the search in windows of traffic, and the trial in production.

`Study` searches for better values within a time budget, in two stages:

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
random numbers as in any textbook of simulation; `evidence` for the sequential test.

`Trial` is an A/B test of a candidate in production: paired time slices with one sequential test. The
incumbent (A) and the candidate (B) alternate in the order A B B A, so that a load that rises or falls
steadily favours neither. Two neighbouring slices are a pair, and the difference of their rewards is one
observation. After each pair the test evaluates all of them, and the trial ends with the first verdict:

- `harm`: the candidate is worse and is rolled back.
- `gain`: the candidate is better and is adopted.
- `inconclusive`: neither after the last pair; the incumbent remains.

The evidence e against the null hypothesis of no difference is the mean of two Bayes factors, for n
differences. The first is that of a t-test. With t the usual statistic, v = n - 1, and g the expected variance
of an effect in standard deviations:

    e_t = (1 + n g)^(-1/2) * ((1 + t^2 / v) / (1 + t^2 / (v (1 + n g))))^((v + 1) / 2)

The second uses signs only, k of m positive, so that one outlier cannot hide a steady difference:

    e_s = 2^m * k! (m - k)! / (m + 1)!

Under the null hypothesis, and for any standard deviation, e exceeds 1 / p at *any* evaluation with a
probability of at most p, so it may be evaluated after every pair. Harm needs less evidence than gain and is
found sooner: an unnecessary rollback loses a chance of improvement, but a bad candidate costs requests.

Assumptions: differences of pairs are independent and symmetric, for e_t approximately normal. Traffic that
stays busy for several minutes makes neighbouring slices correlated; `tests/tuning/test_study.py` has the
error rates with such noise.

A missing measurement never counts as good. A pair in which only the candidate has no reward is harm. A pair
in which the incumbent has none is void and is repeated, at most three times.

Sources: e_t is that of Gonen, Johnson, Lu, Westfall, The Bayesian Two-Sample t Test (The American
Statistician 59, 2005), for one sample; its validity at all looks: Hendriksen, de Heide, Grunwald, Optional
Stopping with Bayes Factors (Bayesian Analysis 16, 2021). e_s and mixtures for sequential tests: Robbins,
Statistical Methods Related to the Law of the Iterated Logarithm (Annals of Mathematical Statistics 41, 1970).
For experiments in production: Johari, Koomen, Pekelis, Walsh, Always Valid Inference (Operations Research 70,
2022).
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from serve_app.core.metrics.summary import t_95
from serve_app.core.settings_base import (
    FINITE_NOT_NEGATIVE,
    FINITE_POSITIVE,
    NOT_NEGATIVE,
    at_least,
    settings,
)
from serve_app.tuning.objective import Reward, finite
from serve_app.tuning.search_space import TpeOptimiser, Values

# Bound on the probability of a verdict under the null hypothesis. Each sign has half of it, and a trial of
# limited length has less: `tests/tuning/test_study.py` measures 0.5 % adopted, and 10 % rolled back early.
_GAIN_RISK, _HARM_RISK = 0.1, 0.5
_EFFECT_VARIANCE = 4.0
"""g: candidates worth a trial change the reward by about two standard deviations of a pair. Smaller effects
need more pairs at any g; with a smaller g, a large harm needs three pairs, not two."""
_MIN_STDEV = 0.005
"""Assumed minimum of the standard deviation: 0.005 of reward in a slice is one or two requests."""
_MAX_VOID = 3
"""Void pairs after which the trial is abandoned."""

RewardOf = Callable[[float, float], Reward]
"""Returns the reward of the requests that arrived from one time to another."""


class Verdict(StrEnum):
    """Result of a trial."""

    HARM = "harm"
    GAIN = "gain"
    INCONCLUSIVE = "inconclusive"


def evidence(differences: Sequence[float]) -> float:
    """Return the evidence against the null hypothesis of no difference; 1 is neutral."""
    count = len(differences)
    if count < 2:
        return 1.0
    stdev = max(statistics.stdev(differences), _MIN_STDEV)
    t_squared = count * (statistics.fmean(differences) / stdev) ** 2
    # Variance of t if there is an effect, relative to its variance under the null hypothesis.
    degrees_of_freedom, variance_ratio = count - 1, 1 + count * _EFFECT_VARIANCE
    ratio = (1 + t_squared / degrees_of_freedom) / (1 + t_squared / (degrees_of_freedom * variance_ratio))
    t_factor = ratio ** (count / 2) / math.sqrt(variance_ratio)
    # Negligible differences have no sign.
    better = sum(each > _MIN_STDEV for each in differences)
    worse = sum(each < -_MIN_STDEV for each in differences)
    signs = better + worse
    sign_factor = 2**signs / ((signs + 1) * math.comb(signs, better))
    return float(t_factor + sign_factor) / 2


def verdict_of(differences: Sequence[float], pairs: int) -> Verdict | None:
    """Return the verdict on at most `pairs` differences (candidate minus incumbent), or None to continue."""
    if differences:
        found, mean = evidence(differences), statistics.fmean(differences)
        if mean < 0 and found >= 1 / _HARM_RISK:
            return Verdict.HARM
        if mean > 0 and found >= 1 / _GAIN_RISK:
            return Verdict.GAIN
    return Verdict.INCONCLUSIVE if len(differences) >= pairs else None


Mode = Literal["off", "advise", "on"]


@settings
class RolloutSettings:
    """Settings for trying candidates in production.

    Attributes:
        mode: `off` accepts no candidate; `advise` records what it would try without changing anything; `on`
            tries it.
        slice_s: seconds per slice, in which one side is active.
        settle_s: seconds at the start of a slice that are not judged, because requests of the previous
            slice still occupy the engines.
        judge_limit_s: seconds after its end at which a slice with requests that have not ended counts as not
            measured.
        pairs: maximum number of measured pairs of a trial.
        cool_down_s: seconds without trials after one.
    """

    mode: Mode = "on"
    slice_s: Annotated[float, FINITE_POSITIVE] = 60.0
    settle_s: Annotated[float, FINITE_NOT_NEGATIVE] = 10.0
    judge_limit_s: Annotated[float, FINITE_POSITIVE] = 120.0
    pairs: Annotated[int, at_least(2).hint("one pair gives no evidence")] = 12
    cool_down_s: Annotated[float, FINITE_NOT_NEGATIVE] = 600.0

    def __post_init__(self) -> None:
        if self.settle_s >= self.slice_s:
            raise ValueError(
                f"slice_s must be above settle_s ({self.settle_s:g}), got {self.slice_s}: the first settle_s "
                "seconds of a slice are not measured"
            )


@dataclass(slots=True)
class Trial:
    """An A/B test of a candidate, in alternating time slices.

    Attributes:
        differences: reward of the candidate minus that of the incumbent, for each measured pair.
        verdict: None while the trial continues.
    """

    settings: RolloutSettings
    differences: list[float] = field(init=False, default_factory=list)
    verdict: Verdict | None = field(init=False, default=None)
    reason: str = field(init=False, default="")
    # Start and end of each slice, and the number of judged pairs.
    _slices: list[tuple[float, float]] = field(init=False, default_factory=list)
    _judged: int = field(init=False, default=0)

    @property
    def is_candidate_slice(self) -> bool:
        """True if the candidate is active in the latest slice."""
        return _is_candidate_slice(len(self._slices) - 1)

    def is_slice_over(self, now: float) -> bool:
        """Return whether the latest slice has ended."""
        return not self._slices or now >= self._slices[-1][1]

    def advance(self, now: float) -> bool:
        """Begin the next slice if one is due, and return whether one begins."""
        if not self.is_slice_over(now):
            return False
        # A void pair is repeated.
        void = self._judged - len(self.differences)
        if len(self._slices) >= 2 * (self.settings.pairs + void):
            return False
        # From `now`, not from the end of the last slice, because nothing was applied in between.
        self._slices.append((now, now + self.settings.slice_s))
        return True

    def judge(self, now: float, completed_until: float, reward_of: RewardOf) -> bool:
        """Judge the next pair if its requests have ended, or take too long, and return whether it was judged.

        Args:
            completed_until: arrival of the oldest request that has not ended; `now` if there is none.
        """
        first = 2 * self._judged
        if self.verdict is not None or len(self._slices) < first + 2:
            return False
        end = self._slices[first + 1][1]
        if now < end or (completed_until < end and now < end + self.settings.judge_limit_s):
            return False
        candidate, incumbent = (
            self._reward(number, completed_until, reward_of)
            for number in sorted((first, first + 1), key=_is_candidate_slice, reverse=True)
        )
        self._judged += 1
        candidate_reward, incumbent_reward = finite(candidate.value), finite(incumbent.value)
        if candidate_reward is not None and incumbent_reward is not None:
            self.differences.append(candidate_reward - incumbent_reward)
            self._conclude(verdict_of(self.differences, self.settings.pairs))
        elif incumbent_reward is not None:
            reason = f"no reward with the candidate: {candidate.reason or 'not finite'}"
            self.verdict, self.reason = Verdict.HARM, reason
        elif self._judged - len(self.differences) > _MAX_VOID:
            reason = f"too many pairs without a reward: {incumbent.reason or 'not finite'}"
            self.verdict, self.reason = Verdict.INCONCLUSIVE, reason
        return True

    def summary(self) -> dict[str, float]:
        """Return the statistics of the measured pairs."""
        if not self.differences:
            return {"pairs": 0.0}
        return {
            "pairs": float(len(self.differences)),
            "difference": self.differences[-1],
            "mean_difference": statistics.fmean(self.differences),
            "evidence": evidence(self.differences),
        }

    def _conclude(self, verdict: Verdict | None) -> None:
        if verdict is not None:
            summary = self.summary()
            self.verdict = verdict
            self.reason = (
                f"{verdict.value} after {len(self.differences)} pairs: reward "
                f"{summary['mean_difference']:+.4f}, evidence {summary['evidence']:.1f}"
            )

    def _reward(self, number: int, completed_until: float, reward_of: RewardOf) -> Reward:
        begin, end = self._slices[number]
        if completed_until < end:
            # The requests that have ended are the quick ones, which are not representative.
            return Reward(value=None, reason="requests of the slice have not ended")
        return reward_of(begin + self.settings.settle_s, end)


def _is_candidate_slice(number: int) -> bool:
    """Return whether a slice is the candidate's: incumbent, candidate, candidate, incumbent, and again."""
    return number % 4 in (1, 2)


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


@dataclass(slots=True)
class Study:
    """A search for better values.

    Args:
        independent_windows: see `compare`.
    """

    settings: StudySettings
    play: PlayWindow
    budget: Budget
    independent_windows: float = math.inf
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

    def run(self, first: Sequence[Values], optimiser: TpeOptimiser | None = None) -> Finding:
        """Search until there is a verdict.

        Args:
            first: the incumbent, then the presets.
            optimiser: proposes further candidates, after it has learned from the first ones; None for presets
                only.
        """
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
        rewards = [reward for reward in self._rewards(candidate, windows).values() if reward is not None]
        return statistics.fmean(rewards) if len(rewards) == len(windows) else None

    def _gain(self, candidate: int) -> float:
        """Return the mean difference to the incumbent on the search windows; very low without a reward."""
        found = self._against(candidate, self.settings.searched)
        return found.mean if found.windows and not found.missing else -math.inf

    def _against(self, candidate: int, windows: range) -> Comparison:
        """Compare a candidate with the incumbent."""
        return compare(
            self._rewards(candidate, windows),
            self._rewards(INCUMBENT, windows),
            independent_windows=self.independent_windows,
        )

    def _rewards(self, candidate: int, windows: range) -> dict[int, float | None]:
        """Return the rewards by window, of those that the candidate has played."""
        return {
            window: finite(self.results[candidate, window].reward.value)
            for window in windows
            if (candidate, window) in self.results
        }
