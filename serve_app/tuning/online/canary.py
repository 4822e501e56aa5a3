"""Does a step hold in production? Time slices of incumbent and candidate, judged in pairs.

The slices come in the order incumbent, candidate, candidate, incumbent, and so on: a load that rises or falls
steadily then favours neither side. Two neighbours are a pair, and the difference of their rewards is one
observation. What cannot be measured never counts as good: a pair without a reward on both sides is void and
is made up for; when too many are, or when only the candidate's side has none, the trial has failed.

Harm ends a trial early when it is beyond the margin and beyond what the traffic does by itself (`slice_noise`).

Where the twin can say what the values in force would have made of each slice, differences are cleared of that
first (`control_variate`), and it is what the traffic does *apart from that* that harm and gain are held
against. A pair then waits for what was expected of it; harm that is plain without does not. If an expectation
is missing, the trial goes on as if there had been none.

A gain is proven when the sum of the differences exceeds z * sigma * sqrt(n), where n pairs are planned, sigma
is the larger of the noise before the trial and the scatter of its own pairs, and z the normal quantile of
1 - p / 2. By the reflection principle the sum of n differences without a gain is above that at *any* time
with a chance of at most p, so a trial may end as soon as it is: what is clear takes three pairs, what is not
takes all. (The boundary of O'Brien and Fleming, Biometrics 35, 1979, in continuous time.) Where no noise is
known, few pairs say too little about sigma, and only the last look counts.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from serve_app.tuning.objective.objective import Reward
from serve_app.tuning.online.control_variate import Control
from serve_app.tuning.online.rollout_settings import RolloutSettings, Slice
from serve_app.tuning.online.slice_noise import Measured, Neighbours, SliceNoise
from serve_app.tuning.search.comparison import compare
from serve_app.tuning.search.history import finite

_FIRST_LOOK = 3
"""Pairs before a gain can be proven: a scatter of two is no scatter."""
_PLAIN = 3.0
"""Times the limit at which harm needs no expectation: the traffic alone would hardly ever do that."""


class TrialStatus(StrEnum):
    """How a trial stands."""

    OPEN = "open"
    FAILED = "failed"
    # It looks better, within what may be chance.
    UNPROVEN = "unproven"
    WON = "won"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a trial stands, and why.

    Attributes:
        figures: what it rests on.
    """

    trial_status: TrialStatus
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two neighbouring slices that are judged, by their numbers."""

    incumbent: int
    candidate: int


class Canary:
    """One trial of one step.

    Args:
        now: when its first slice, one of the incumbent, begins.
        slice_noise: what neighbouring slices differed by before it began.
        control: how to clear differences of what the twin expects; None: nobody will say what it does.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        now: float,
        slice_noise: SliceNoise | None = None,
        control: Control | None = None,
    ) -> None:
        self._settings, self._slice_noise = settings, slice_noise or SliceNoise()
        self._control = control
        self._begun = [now]
        self._ended: list[float] = []
        self._rewards: dict[int, Reward] = {}
        self._expected: dict[int, Reward] = {}

    def __repr__(self) -> str:
        return f"<Canary slices={len(self._ended)} judged={len(self._rewards)}>"

    @property
    def is_candidates_turn(self) -> bool:
        """Whether the candidate is to be in force now; the incumbent is once all slices are over."""
        return len(self._begun) > len(self._ended) and _of_candidate(len(self._ended))

    def advance(self, now: float) -> bool:
        """End the slice under way when its time is up, and begin the next; whether the side may change."""
        if len(self._begun) == len(self._ended):
            if self._wants_more():
                self._begun.append(now)
                return True
            return False
        end = self._begun[-1] + self._settings.slice_s
        if now < end:
            return False
        # Not `now`, which may be much later: by then the side may not have been in force any more.
        self._ended.append(end)
        if self._wants_more():
            self._begun.append(now)
        return True

    def to_judge(self, now: float, settled_until: float) -> list[Slice]:
        """Slices whose requests are over, or should have been long ago.

        Args:
            settled_until: when the oldest request arrived that is not over yet; `now`, when none is open.
        """
        limit_s = self._settings.judge_limit_s
        return [
            self._slice(number)
            for number, end in enumerate(self._ended)
            if number not in self._rewards and (settled_until >= end or now >= end + limit_s)
        ]

    def is_late(self, number: int, settled_until: float) -> bool:
        """Whether some requests of a slice are still open, so that nothing can be said of it."""
        return settled_until < self._ended[number]

    def judge(self, number: int, reward: Reward) -> Verdict:
        """What came of a slice; how the trial stands now."""
        if 0 <= number < len(self._ended) and number not in self._rewards:
            self._rewards[number] = reward
        return self.verdict()

    def to_expect(self) -> list[Slice]:
        """Slices of pairs that can be weighed, but for what the twin expects of them."""
        if self._control is None:
            return []
        missing = [
            number
            for pair in self._known(self._pairs())
            for number in sorted((pair.incumbent, pair.candidate))
            if number not in self._expected
        ]
        return [self._slice(number) for number in missing]

    def expect(self, expected: Mapping[int, Reward]) -> Verdict:
        """What the values in force would have made of some slices; how the trial stands now."""
        self._expected |= expected
        if any(finite(reward.value) is None for reward in expected.values()):
            self._control = None
        return self.verdict()

    def clear_by(self, control: Control) -> Verdict:
        """Another way to clear differences of what is expected; how the trial stands by it."""
        if self._control is not None:
            self._control = control
        return self.verdict()

    def neighbours(self) -> list[Neighbours]:
        """Slices that follow each other on one side, which tell how far the traffic slice_noise."""
        measured = {
            number: Measured(reward, self._expected.get(number)) for number, reward in self._rewards.items()
        }
        last = max(measured, default=0)
        return [
            (measured[number], measured[number + 1])
            for number in range(1, last, 2)
            if number in measured and number + 1 in measured
        ]

    def expect_nothing(self) -> Verdict:
        """Nobody can say what the twin expects; how the trial stands without."""
        self._control = None
        return self.verdict()

    def verdict(self) -> Verdict:
        """How the trial stands."""
        pairs = self._pairs()
        for pair in pairs:
            candidate = self._rewards[pair.candidate]
            if self._value(pair.candidate) is None and self._value(pair.incumbent) is not None:
                return _failed(f"no reward under the candidate: {candidate.reason or 'it is not finite'}")
        known = self._known(pairs)
        void = len(pairs) - len(known)
        if void > self._settings.void_pairs:
            return _failed(f"{void} pairs of slices could not be measured", {"void_pairs": void})
        if self._control is not None:
            plain = self._plain_harm(known)
            if plain is not None:
                return plain
            known = [pair for pair in known if {pair.incumbent, pair.candidate} <= self._expected.keys()]
        return self._weighed(known) if known else Verdict(TrialStatus.OPEN)

    def _plain_harm(self, known: list[_Pair]) -> Verdict | None:
        """Harm that is far beyond all that the traffic does by itself, if that is known."""
        if not known or not self._slice_noise.reward > 0:
            return None
        mean = statistics.fmean(self._raw(pair) for pair in known)
        noise = self._settings.noise_allowance * self._slice_noise.reward / math.sqrt(len(known))
        limit = _PLAIN * (self._settings.margin + noise)
        if mean >= -limit:
            return None
        figures = {"pairs": float(len(known)), "mean_difference": mean, "limit": limit, "noise": noise}
        return _failed("the reward is far below the incumbent's", figures)

    def _weighed(self, known: list[_Pair]) -> Verdict:
        settings = self._settings
        differences = [self._cleared(pair) for pair in known]
        mean = statistics.fmean(differences)
        found = compare(dict(enumerate(differences)), dict.fromkeys(range(len(known)), 0.0))
        figures = {
            "pairs": float(len(known)),
            "mean_difference": mean,
            "candidate_reward": self._mean(pair.candidate for pair in known),
            "incumbent_reward": self._mean(pair.incumbent for pair in known),
        }
        if self._control is not None:
            figures["uncleared_difference"] = statistics.fmean(self._raw(pair) for pair in known)
        if found.low is not None and found.high is not None:
            figures |= {"low": found.low, "high": found.high}
        # One pair alone has to be far off to end a trial; from two on the mean counts.
        limit = settings.margin if len(known) > 1 else 3 * settings.margin
        allowance = settings.noise_allowance / math.sqrt(len(known))
        noise = allowance * self._left.reward
        limit = max(limit, settings.margin + noise)
        figures |= {"limit": limit, "noise": noise}
        if mean < -limit:
            return _failed("the reward is below the incumbent's by more than the margin", figures)
        worst = self._worst_class(known, allowance)
        if worst is not None:
            name, change, class_limit = worst
            figures |= {"attainment_difference": change, "attainment_limit": class_limit}
            if change < -class_limit:
                return _failed(f"class {name} keeps its targets less often than before", figures)
        needed = self._needed(differences)
        figures["needed"] = needed
        is_last = len(known) >= settings.pairs
        may_look = is_last or (self._left.reward > 0 and len(known) >= _FIRST_LOOK)
        # A constant reward measures nothing, whatever the twin expected of it.
        measures = any(self._raw(pair) != 0 for pair in known)
        if may_look and measures and mean > needed:
            return Verdict(TrialStatus.WON, "the reward is better than the incumbent's", figures)
        if not is_last:
            return Verdict(TrialStatus.OPEN, figures=figures)
        if mean > 0:
            reason = "the reward is no better than the incumbent's by more than it slice_noise by itself"
            return Verdict(TrialStatus.UNPROVEN, reason, figures)
        return _failed("the reward is no better than the incumbent's", figures)

    @property
    def _left(self) -> SliceNoise:
        """What slices of one side differ by, cleared of what is expected where that is known."""
        return self._slice_noise if self._control is None else self._control.left

    def _needed(self, differences: list[float]) -> float:
        """The mean difference that proves a gain after so many pairs; never negative."""
        sigma = self._left.reward
        if len(differences) > 1:
            # What was seen before the trial may have been too little to tell.
            sigma = max(sigma, statistics.stdev(differences))
        quantile = statistics.NormalDist().inv_cdf(1.0 - self._settings.false_adoption / 2)
        return quantile * sigma * math.sqrt(self._settings.pairs) / len(differences)

    def _worst_class(self, known: list[_Pair], allowance: float) -> tuple[str, float, float] | None:
        """The class nearest to its limit or farthest beyond: how its attainment changed, and the limit."""
        sides = [pair.candidate for pair in known], [pair.incumbent for pair in known]
        mine, theirs = (_attained(self._rewards[number] for number in side) for side in sides)
        least = self._settings.min_class_requests
        changes = {
            name: mine[name][0] - theirs[name][0]
            for name in mine.keys() & theirs.keys()
            if min(mine[name][1], theirs[name][1]) >= least
        }
        if self._control is not None:
            mine, theirs = (_attained(self._expected[number] for number in side) for side in sides)
            for name in changes.keys() & mine.keys() & theirs.keys():
                slope = self._control.attainment.get(name, 1.0)
                changes[name] -= slope * (mine[name][0] - theirs[name][0])
        limits = {
            name: self._settings.attainment_margin + allowance * self._left.attainment.get(name, 0.0)
            for name in changes
        }
        return min(
            ((name, change, limits[name]) for name, change in changes.items()),
            key=lambda each: (each[1] + each[2], each[0]),
            default=None,
        )

    def _pairs(self) -> list[_Pair]:
        """Those of which both slices are judged."""
        return [
            _Pair(*sorted((first, first + 1), key=_of_candidate))
            for first in range(0, len(self._ended) - 1, 2)
            if first in self._rewards and first + 1 in self._rewards
        ]

    def _known(self, pairs: list[_Pair]) -> list[_Pair]:
        """Those with a reward on both sides."""
        return [
            pair
            for pair in pairs
            if self._value(pair.candidate) is not None and self._value(pair.incumbent) is not None
        ]

    def _raw(self, pair: _Pair) -> float:
        """Candidate less incumbent, of a pair with rewards."""
        return _less(self._rewards[pair.candidate], self._rewards[pair.incumbent])

    def _cleared(self, pair: _Pair) -> float:
        """The same, without what is the traffic's."""
        if self._control is None:
            return self._raw(pair)
        expected = _less(self._expected[pair.candidate], self._expected[pair.incumbent])
        return self._raw(pair) - self._control.reward * expected

    def _value(self, number: int) -> float | None:
        return finite(self._rewards[number].value)

    def _mean(self, numbers: Iterable[int]) -> float:
        return statistics.fmean(value for number in numbers if (value := self._value(number)) is not None)

    def _slice(self, number: int) -> Slice:
        """A slice that is over, without its beginning."""
        end = self._ended[number]
        return Slice(
            number=number,
            of_candidate=_of_candidate(number),
            start=min(self._begun[number] + self._settings.settle_s, end),
            end=end,
        )

    def _wants_more(self) -> bool:
        """Whether another slice is needed: pairs that came to nothing are made up for."""
        pairs = self._pairs()
        void = len(pairs) - len(self._known(pairs))
        return len(self._ended) < 2 * (self._settings.pairs + void)


def _of_candidate(number: int) -> bool:
    """Incumbent, candidate, candidate, incumbent, and again."""
    return number % 4 in (1, 2)


def _less(mine: Reward, theirs: Reward) -> float:
    """The difference of two rewards that are there."""
    assert mine.value is not None
    assert theirs.value is not None
    return mine.value - theirs.value


def _attained(rewards: Iterable[Reward]) -> dict[str, tuple[float, int]]:
    """By class, the share of its requests within the targets over all these slices, and how many they are."""
    sums: dict[str, tuple[float, int]] = {}
    for reward in rewards:
        for name, figures in reward.classes.items():
            kept, requests = sums.get(name, (0.0, 0))
            sums[name] = kept + figures.requests * figures.attainment_ratio, requests + figures.requests
    return {name: (kept / requests, requests) for name, (kept, requests) in sums.items() if requests}


def _failed(reason: str, figures: Mapping[str, float] | None = None) -> Verdict:
    return Verdict(TrialStatus.FAILED, reason, figures or {})
