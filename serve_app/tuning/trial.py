"""The trial of one step in production: paired time slices under one sequential test.

The values in force (A) and the step (B) are in force in turn, in the order A B B A, so that a load that rises
or falls steadily favours neither. Two neighbouring slices are a pair, and the difference of their rewards is
one observation. After each pair the test looks at all of them, and the trial ends with the first verdict:

- `harm`: the step serves worse; it is withdrawn.
- `gain`: the step serves better; it is kept.
- `inconclusive`: neither after the last pair; the values in force stay.

The evidence e against "no difference" is the mean of two Bayes factors, for n differences. The first is that
of a t-test. With t the usual statistic, v = n - 1, and effects (in standard deviations) of variance g
expected if there are any:

    e_t = (1 + n g)^(-1/2) * ((1 + t^2 / v) / (1 + t^2 / (v (1 + n g))))^((v + 1) / 2)

The second looks at signs alone, k of m positive, so that one wild minute cannot hide a steady difference:

    e_s = 2^m * k! (m - k)! / (m + 1)!

Without a difference, and whatever the scatter, e exceeds 1 / p at *any* of the looks with a chance of at most
p, so it may be looked at after every pair. Two limits make harm quicker to find than gain: to withdraw a step
without need costs a chance of improvement, and to keep a bad one costs requests.

What it assumes: differences of pairs are independent and symmetric, for e_t about normal. Traffic that stays
busy for several minutes makes neighbours alike; `tests/tuning/test_trial.py` has the error rates under such
noise.

What cannot be measured never counts as good. A pair in which the step alone has no reward is harm. One in
which the values in force have none is void and is made up for, a few times.

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

# Bound of the chance that the evidence ever suffices without a difference. Each sign has half of it, and a
# trial that ends has less: `tests/tuning/test_trial.py` measures 0.5 % kept, and 10 % withdrawn early.
_GAIN_RISK, _HARM_RISK = 0.1, 0.5
_EFFECT_VARIANCE = 4.0
"""g: steps worth a trial move the reward by about two standard deviations of a pair. Smaller effects need
more pairs at any g; with a smaller g, a large harm needs three pairs, not two."""
_LEAST_SCATTER = 0.005
"""Standard deviation that is assumed at least: half a point of reward in a slice is a request or two."""
_MOST_VOID = 3
"""Void pairs after which the trial is given up."""

RewardOf = Callable[[float, float], Reward]
"""The reward of the requests that arrived from one time to another."""


class Verdict(StrEnum):
    """The end of a trial."""

    HARM = "harm"
    GAIN = "gain"
    INCONCLUSIVE = "inconclusive"


def evidence(differences: Sequence[float]) -> float:
    """Evidence against "no difference"; 1 is none either way."""
    count = len(differences)
    if count < 2:
        return 1.0
    scatter = max(statistics.stdev(differences), _LEAST_SCATTER)
    t_squared = count * (statistics.fmean(differences) / scatter) ** 2
    freedom, shrinking = count - 1, 1 + count * _EFFECT_VARIANCE
    ratio = (1 + t_squared / freedom) / (1 + t_squared / (freedom * shrinking))
    of_t = ratio ** (count / 2) / math.sqrt(shrinking)
    # Trifles have no sign.
    better = sum(each > _LEAST_SCATTER for each in differences)
    worse = sum(each < -_LEAST_SCATTER for each in differences)
    signs = better + worse
    of_signs = 2**signs / ((signs + 1) * math.comb(signs, better))
    return float(of_t + of_signs) / 2


def verdict_of(differences: Sequence[float], pairs: int) -> Verdict | None:
    """The verdict on these differences, step less values in force; None while more pairs are needed.

    Args:
        pairs: differences at most.
    """
    if differences:
        found, mean = evidence(differences), statistics.fmean(differences)
        if mean < 0 and found >= 1 / _HARM_RISK:
            return Verdict.HARM
        if mean > 0 and found >= 1 / _GAIN_RISK:
            return Verdict.GAIN
    return Verdict.INCONCLUSIVE if len(differences) >= pairs else None


@dataclass(slots=True)
class Trial:
    """One trial.

    Args:
        pairs: measured pairs at most.
        slice_s: seconds that one side is in force.
        settle_s: seconds at the start of a slice that are not judged: requests of the other side still fill
            the engines.
        judge_limit_s: seconds after its end at which a slice with open requests counts as not measured.

    Attributes:
        differences: of the pairs measured so far, step less values in force.
        verdict: None while the trial goes on.
        reason: for the verdict, in words.
    """

    pairs: int
    slice_s: float
    settle_s: float
    judge_limit_s: float
    differences: list[float] = field(init=False, default_factory=list)
    verdict: Verdict | None = field(init=False, default=None)
    reason: str = field(init=False, default="")
    # Begin and end of each slice, and how many pairs have been judged.
    _slices: list[tuple[float, float]] = field(init=False, default_factory=list)
    _judged: int = field(init=False, default=0)

    @property
    def is_steps_turn(self) -> bool:
        """Whether the step is to be in force in the latest slice."""
        return _of_step(len(self._slices) - 1)

    def is_over(self, now: float) -> bool:
        """Whether the latest slice has ended."""
        return not self._slices or now >= self._slices[-1][1]

    def advance(self, now: float) -> bool:
        """Begin the next slice if one is due; whether one begins."""
        if not self.is_over(now):
            return False
        # A pair that is void is made up for.
        void = self._judged - len(self.differences)
        if len(self._slices) >= 2 * (self.pairs + void):
            return False
        # From `now` on, not from the end of the last slice: in between, nothing was put in force.
        self._slices.append((now, now + self.slice_s))
        return True

    def judge(self, now: float, settled_until: float, reward_of: RewardOf) -> bool:
        """Judge the next pair if its requests are over, or take too long; whether one was judged.

        Args:
            settled_until: arrival of the oldest request that is still open; `now`, when none is.
        """
        first = 2 * self._judged
        if self.verdict is not None or len(self._slices) < first + 2:
            return False
        end = self._slices[first + 1][1]
        if now < end or (settled_until < end and now < end + self.judge_limit_s):
            return False
        step, base = (
            self._reward(number, settled_until, reward_of)
            for number in sorted((first, first + 1), key=_of_step, reverse=True)
        )
        self._judged += 1
        mine, theirs = finite(step.value), finite(base.value)
        if mine is not None and theirs is not None:
            self.differences.append(mine - theirs)
            self._conclude(verdict_of(self.differences, self.pairs))
        elif theirs is not None:
            reason = f"no reward under the step: {step.reason or 'it is not finite'}"
            self.verdict, self.reason = Verdict.HARM, reason
        elif self._judged - len(self.differences) > _MOST_VOID:
            reason = f"too many pairs without a reward: {base.reason or 'it is not finite'}"
            self.verdict, self.reason = Verdict.INCONCLUSIVE, reason
        return True

    def figures(self) -> dict[str, float]:
        """The numbers that the state of the trial rests on."""
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
            figures = self.figures()
            self.verdict = verdict
            self.reason = (
                f"{verdict.value} after {len(self.differences)} pairs: reward "
                f"{figures['mean_difference']:+.4f}, evidence {figures['evidence']:.1f}"
            )

    def _reward(self, number: int, settled_until: float, reward_of: RewardOf) -> Reward:
        begin, end = self._slices[number]
        if settled_until < end:
            # Those that are over are the quick ones, which are no sample.
            return Reward(value=None, reason="requests of the slice were still open")
        return reward_of(begin + self.settle_s, end)


def _of_step(number: int) -> bool:
    """Values in force, step, step, values in force, and again."""
    return number % 4 in (1, 2)
