"""A/B test of a candidate in production: paired time slices with one sequential test.

The incumbent (A) and the candidate (B) alternate in the order A B B A, so that a load that rises or falls
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
stays busy for several minutes makes neighbouring slices correlated; `tests/tuning/test_trial.py` has the
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from serve_app.tuning.objective import Reward, finite

# Bound on the probability of a verdict under the null hypothesis. Each sign has half of it, and a trial of
# limited length has less: `tests/tuning/test_trial.py` measures 0.5 % adopted, and 10 % rolled back early.
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


@dataclass(slots=True)
class Trial:
    """An A/B test of a candidate, in alternating time slices.

    Args:
        pairs: maximum number of measured pairs.
        slice_s: seconds per slice, in which one side is active.
        settle_s: seconds at the start of a slice that are not judged, because requests of the previous
            slice still occupy the engines.
        judge_limit_s: seconds after its end at which a slice with requests that have not ended counts as not
            measured.

    Attributes:
        differences: reward of the candidate minus that of the incumbent, for each measured pair.
        verdict: None while the trial continues.
    """

    pairs: int
    slice_s: float
    settle_s: float
    judge_limit_s: float
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
        if len(self._slices) >= 2 * (self.pairs + void):
            return False
        # From `now`, not from the end of the last slice, because nothing was applied in between.
        self._slices.append((now, now + self.slice_s))
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
        if now < end or (completed_until < end and now < end + self.judge_limit_s):
            return False
        candidate, incumbent = (
            self._reward(number, completed_until, reward_of)
            for number in sorted((first, first + 1), key=_is_candidate_slice, reverse=True)
        )
        self._judged += 1
        candidate_reward, incumbent_reward = finite(candidate.value), finite(incumbent.value)
        if candidate_reward is not None and incumbent_reward is not None:
            self.differences.append(candidate_reward - incumbent_reward)
            self._conclude(verdict_of(self.differences, self.pairs))
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
        return reward_of(begin + self.settle_s, end)


def _is_candidate_slice(number: int) -> bool:
    """Return whether a slice is the candidate's: incumbent, candidate, candidate, incumbent, and again."""
    return number % 4 in (1, 2)
