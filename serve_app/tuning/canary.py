"""Does a step hold in production? Time slices of incumbent and candidate, judged in pairs.

The slices come in the order incumbent, candidate, candidate, incumbent, and so on: a load that rises or falls
steadily then favours neither side. Two neighbours are a pair, and the difference of their rewards is one
observation. What cannot be measured never counts as good: a pair without a reward on both sides is void and
is made up for; when too many are, or when only the candidate's side has none, the trial has failed.

Harm ends a trial early when it is beyond the margin and beyond what the traffic does by itself (`swings`).

A gain is proven when the sum of the differences exceeds z * sigma * sqrt(n), where n pairs are planned, sigma
is the larger of the swing before the trial and the scatter of its own pairs, and z the normal quantile of
1 - p / 2. By the reflection principle the sum of n differences without a gain is above that at *any* time
with a chance of at most p, so a trial may end as soon as it is: what is clear takes three pairs, what is not
takes all. (The boundary of O'Brien and Fleming, Biometrics 35, 1979, in continuous time.) Where no swing is
known, few pairs say too little about sigma, and only the last look counts.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from serve_app.tuning.comparison import compare
from serve_app.tuning.history import finite
from serve_app.tuning.objective import Reward
from serve_app.tuning.rollout_settings import RolloutSettings, Slice
from serve_app.tuning.swings import Swings

_FIRST_LOOK = 3
"""Pairs before a gain can be proven: a scatter of two is no scatter."""


class Standing(StrEnum):
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

    standing: Standing
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


class Canary:
    """One trial of one step.

    Args:
        now: when its first slice, one of the incumbent, begins.
        swings: what neighbouring slices differed by before it began.
    """

    def __init__(self, settings: RolloutSettings, now: float, swings: Swings | None = None) -> None:
        self._settings, self._swings = settings, swings or Swings()
        self._begun = [now]
        self._ended: list[float] = []
        self._rewards: dict[int, Reward] = {}

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
            Slice(
                number=number,
                of_candidate=_of_candidate(number),
                start=min(self._begun[number] + self._settings.settle_s, end),
                end=end,
            )
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

    def verdict(self) -> Verdict:
        """How the trial stands."""
        pairs = self._pairs()
        for incumbent, candidate in pairs:
            if _value(candidate) is None and _value(incumbent) is not None:
                return _failed(f"no reward under the candidate: {candidate.reason or 'it is not finite'}")
        sides = [(_value(candidate), _value(incumbent)) for incumbent, candidate in pairs]
        known = [(mine, theirs) for mine, theirs in sides if mine is not None and theirs is not None]
        void = len(pairs) - len(known)
        if void > self._settings.void_pairs:
            return _failed(f"{void} pairs of slices could not be measured", {"void_pairs": void})
        return self._weighed(known) if known else Verdict(Standing.OPEN)

    def _weighed(self, known: list[tuple[float, float]]) -> Verdict:
        settings = self._settings
        differences = [mine - theirs for mine, theirs in known]
        mean = statistics.fmean(differences)
        found = compare(dict(enumerate(differences)), dict.fromkeys(range(len(known)), 0.0))
        figures = {
            "pairs": float(len(known)),
            "mean_difference": mean,
            "candidate_reward": statistics.fmean(mine for mine, _ in known),
            "incumbent_reward": statistics.fmean(theirs for _, theirs in known),
        }
        if found.low is not None and found.high is not None:
            figures |= {"low": found.low, "high": found.high}
        # One pair alone has to be far off to end a trial; from two on the mean counts.
        limit = settings.margin if len(known) > 1 else 3 * settings.margin
        allowance = settings.swing_allowance / math.sqrt(len(known))
        swing = allowance * self._swings.reward
        limit = max(limit, settings.margin + swing)
        figures |= {"limit": limit, "swing": swing}
        if mean < -limit:
            return _failed("the reward is below the incumbent's by more than the margin", figures)
        worst = self._worst_class(allowance)
        if worst is not None:
            name, change, class_limit = worst
            figures |= {"attainment_difference": change, "attainment_limit": class_limit}
            if change < -class_limit:
                return _failed(f"class {name} keeps its targets less often than before", figures)
        needed = self._needed(differences)
        figures["needed"] = needed
        is_last = len(known) >= settings.pairs
        may_look = is_last or (self._swings.reward > 0 and len(known) >= _FIRST_LOOK)
        if may_look and mean > needed:
            return Verdict(Standing.WON, "the reward is better than the incumbent's", figures)
        if not is_last:
            return Verdict(Standing.OPEN, figures=figures)
        if mean > 0:
            reason = "the reward is no better than the incumbent's by more than it swings by itself"
            return Verdict(Standing.UNPROVEN, reason, figures)
        return _failed("the reward is no better than the incumbent's", figures)

    def _needed(self, differences: list[float]) -> float:
        """The mean difference that proves a gain after so many pairs; never negative."""
        sigma = self._swings.reward
        if len(differences) > 1:
            # What was seen before the trial may have been too little to tell.
            sigma = max(sigma, statistics.stdev(differences))
        quantile = statistics.NormalDist().inv_cdf(1.0 - self._settings.false_adoption / 2)
        return quantile * sigma * math.sqrt(self._settings.pairs) / len(differences)

    def _worst_class(self, allowance: float) -> tuple[str, float, float] | None:
        """The class nearest to its limit or farthest beyond: how its attainment changed, and the limit."""
        sides: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
        for number, reward in self._rewards.items():
            for name, figures in reward.classes.items():
                kept, requests = sides[_of_candidate(number)].setdefault(name, [0.0, 0.0])
                sides[_of_candidate(number)][name] = [
                    kept + figures.requests * figures.attainment_ratio,
                    requests + figures.requests,
                ]
        least = self._settings.min_class_requests
        changes = {
            name: sides[1][name][0] / sides[1][name][1] - sides[0][name][0] / sides[0][name][1]
            for name in sides[0].keys() & sides[1].keys()
            if min(sides[0][name][1], sides[1][name][1]) >= least
        }
        limits = {
            name: self._settings.attainment_margin + allowance * self._swings.attainment.get(name, 0.0)
            for name in changes
        }
        return min(
            ((name, change, limits[name]) for name, change in changes.items()),
            key=lambda each: (each[1] + each[2], each[0]),
            default=None,
        )

    def _pairs(self) -> list[tuple[Reward, Reward]]:
        """Incumbent and candidate of each pair of which both slices are judged."""
        pairs = []
        for first in range(0, len(self._ended) - 1, 2):
            if first in self._rewards and first + 1 in self._rewards:
                sides = sorted((first, first + 1), key=_of_candidate)
                pairs.append((self._rewards[sides[0]], self._rewards[sides[1]]))
        return pairs

    def _wants_more(self) -> bool:
        """Whether another slice is needed: pairs that came to nothing are made up for."""
        void = sum(_value(mine) is None or _value(theirs) is None for mine, theirs in self._pairs())
        return len(self._ended) < 2 * (self._settings.pairs + void)


def _of_candidate(number: int) -> bool:
    """Incumbent, candidate, candidate, incumbent, and again."""
    return number % 4 in (1, 2)


def _value(reward: Reward) -> float | None:
    return finite(reward.value)


def _failed(reason: str, figures: Mapping[str, float] | None = None) -> Verdict:
    return Verdict(Standing.FAILED, reason, figures or {})
