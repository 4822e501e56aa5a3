"""The verdict on a trial: harm, gain, or not enough evidence, from pairs of neighbouring slices.

A pair is one slice of the incumbent and one of the candidate; the difference of their rewards is one
observation. What cannot be measured never counts as good. A pair without a reward on both sides is void. When
too many are void, or only the candidate's side has no reward, the trial has failed.

*Harm* ends a trial early when the mean difference is below the margin and below the noise of the traffic
itself (`slice_noise`). The same holds for the SLO attainment of every service class.

*A gain* is proven when the sum of the differences exceeds z * sigma * sqrt(n). Here n is the planned number
of pairs, sigma the larger of the noise before the trial and the scatter of its own pairs, and z the normal
quantile of 1 - p / 2. By the reflection principle, the sum of n differences without a gain is above that at
*any* time with a chance of at most p. So a trial may end as soon as it is: a clear gain takes three pairs, an
unclear one takes all. This is the boundary of O'Brien and Fleming (Biometrics 35, 1979) in continuous time.
Where no noise is known, a few pairs say too little about sigma, and only the last look counts.

With a control variate, differences are first cleared of what the twin expected of the same requests. A pair
then waits for its expectation, except for harm that is plain without one.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from serve_app.tuning.objective.objective import Reward, finite
from serve_app.tuning.online.control_variate import ControlVariate
from serve_app.tuning.online.rollout_settings import RolloutSettings
from serve_app.tuning.online.slice_noise import Measured, SliceNoise
from serve_app.tuning.search.comparison import compare

_FIRST_LOOK = 3
"""Pairs before a gain can be proven: two pairs show no scatter."""
_PLAIN = 3.0
"""Times the limit at which harm is plain without an expectation: the traffic alone hardly ever does that."""


class TrialStatus(StrEnum):
    """The state of a trial."""

    OPEN = "open"
    FAILED = "failed"
    # It looks better, within what may be chance.
    UNPROVEN = "unproven"
    WON = "won"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state of a trial, and why.

    Attributes:
        figures: the numbers that it rests on, by name.
    """

    status: TrialStatus
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two neighbouring slices, one of each side."""

    incumbent: Measured
    candidate: Measured

    @property
    def is_measured(self) -> bool:
        """Whether both sides have a reward."""
        return (
            finite(self.incumbent.reward.value) is not None
            and finite(self.candidate.reward.value) is not None
        )

    @property
    def is_expected(self) -> bool:
        """Whether the twin was asked about both slices."""
        return self.incumbent.expected is not None and self.candidate.expected is not None

    @property
    def difference(self) -> float:
        """Candidate less incumbent, in reward; for a measured pair."""
        return _value(self.candidate.reward) - _value(self.incumbent.reward)

    def cleared(self, control: ControlVariate | None) -> float:
        """The difference without the part that the twin expected of the traffic."""
        if control is None:
            return self.difference
        assert self.candidate.expected is not None
        assert self.incumbent.expected is not None
        expected = _value(self.candidate.expected) - _value(self.incumbent.expected)
        return self.difference - control.reward * expected


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the pairs of a trial are held against.

    Attributes:
        slice_noise: differences of neighbouring slices before the trial.
        control: how to clear differences of what the twin expects; None does not.
    """

    settings: RolloutSettings
    slice_noise: SliceNoise
    control: ControlVariate | None

    def verdict(self, pairs: Sequence[Pair]) -> Verdict:
        """The state of a trial with these pairs, all of whose slices have been judged."""
        for pair in pairs:
            mine, theirs = pair.candidate.reward, pair.incumbent.reward
            if finite(mine.value) is None and finite(theirs.value) is not None:
                return _failed(f"no reward under the candidate: {mine.reason or 'it is not finite'}")
        known = [pair for pair in pairs if pair.is_measured]
        void = len(pairs) - len(known)
        if void > self.settings.void_pairs:
            return _failed(f"{void} pairs of slices could not be measured", {"void_pairs": void})
        if self.control is not None:
            plain = self._plain_harm(known)
            if plain is not None:
                return plain
            known = [pair for pair in known if pair.is_expected]
        return self._weighed(known) if known else Verdict(TrialStatus.OPEN)

    def _plain_harm(self, known: Sequence[Pair]) -> Verdict | None:
        """Harm far beyond the noise of the traffic, if that noise is known."""
        if not known or not self.slice_noise.reward > 0:
            return None
        mean = statistics.fmean(pair.difference for pair in known)
        noise = self.settings.noise_allowance * self.slice_noise.reward / math.sqrt(len(known))
        limit = _PLAIN * (self.settings.margin + noise)
        if mean >= -limit:
            return None
        figures = {"pairs": float(len(known)), "mean_difference": mean, "limit": limit, "noise": noise}
        return _failed("the reward is far below the incumbent's", figures)

    def _weighed(self, known: Sequence[Pair]) -> Verdict:
        differences = [pair.cleared(self.control) for pair in known]
        mean = statistics.fmean(differences)
        allowance = self.settings.noise_allowance / math.sqrt(len(known))
        noise = allowance * self._noise.reward
        # One pair alone has to be far off to end a trial; from two on the mean counts.
        limit = self.settings.margin if len(known) > 1 else 3 * self.settings.margin
        limit = max(limit, self.settings.margin + noise)
        figures = self._figures(known, differences) | {"limit": limit, "noise": noise}
        if mean < -limit:
            return _failed("the reward is below the incumbent's by more than the margin", figures)
        worst = self._worst_class(known, allowance)
        if worst is not None:
            name, change, class_limit = worst
            figures |= {"attainment_difference": change, "attainment_limit": class_limit}
            if change < -class_limit:
                return _failed(f"class {name} keeps its targets less often than before", figures)
        return self._gain(known, differences, figures)

    def _gain(
        self, known: Sequence[Pair], differences: Sequence[float], figures: dict[str, float]
    ) -> Verdict:
        """Whether a gain is proven, or still may be."""
        mean, needed = statistics.fmean(differences), self._needed(differences)
        figures = {**figures, "needed": needed}
        is_last = len(known) >= self.settings.pairs
        may_look = is_last or (self._noise.reward > 0 and len(known) >= _FIRST_LOOK)
        # A constant reward measures nothing, whatever the twin expected of it.
        measures = any(pair.difference != 0 for pair in known)
        if may_look and measures and mean > needed:
            return Verdict(TrialStatus.WON, "the reward is better than the incumbent's", figures)
        if not is_last:
            return Verdict(TrialStatus.OPEN, figures=figures)
        if mean > 0:
            reason = "the reward is better than the incumbent's by no more than the slice noise explains"
            return Verdict(TrialStatus.UNPROVEN, reason, figures)
        return _failed("the reward is no better than the incumbent's", figures)

    @property
    def _noise(self) -> SliceNoise:
        """Slice noise that is left in cleared differences, or all of it without a control variate."""
        return self.slice_noise if self.control is None else self.control.residual

    def _figures(self, known: Sequence[Pair], differences: Sequence[float]) -> dict[str, float]:
        found = compare(dict(enumerate(differences)), dict.fromkeys(range(len(known)), 0.0))
        figures = {
            "pairs": float(len(known)),
            "mean_difference": statistics.fmean(differences),
            "candidate_reward": statistics.fmean(_value(pair.candidate.reward) for pair in known),
            "incumbent_reward": statistics.fmean(_value(pair.incumbent.reward) for pair in known),
        }
        if self.control is not None:
            figures["uncleared_difference"] = statistics.fmean(pair.difference for pair in known)
        if found.low is not None and found.high is not None:
            figures |= {"low": found.low, "high": found.high}
        return figures

    def _needed(self, differences: Sequence[float]) -> float:
        """The mean difference that proves a gain after so many pairs; never negative."""
        sigma = self._noise.reward
        if len(differences) > 1:
            # The time before the trial may have been too short to tell.
            sigma = max(sigma, statistics.stdev(differences))
        quantile = statistics.NormalDist().inv_cdf(1.0 - self.settings.false_adoption / 2)
        return quantile * sigma * math.sqrt(self.settings.pairs) / len(differences)

    def _worst_class(self, known: Sequence[Pair], allowance: float) -> tuple[str, float, float] | None:
        """The class nearest to its limit or farthest beyond: the change of its attainment, and the limit."""
        mine = _attained(pair.candidate.reward for pair in known)
        theirs = _attained(pair.incumbent.reward for pair in known)
        least = self.settings.min_class_requests
        changes = {
            name: mine[name][0] - theirs[name][0]
            for name in mine.keys() & theirs.keys()
            if min(mine[name][1], theirs[name][1]) >= least
        }
        if self.control is not None:
            mine = _attained(pair.candidate.expected for pair in known)
            theirs = _attained(pair.incumbent.expected for pair in known)
            for name in changes.keys() & mine.keys() & theirs.keys():
                slope = self.control.attainment.get(name, 1.0)
                changes[name] -= slope * (mine[name][0] - theirs[name][0])
        limits = {
            name: self.settings.attainment_margin + allowance * self._noise.attainment.get(name, 0.0)
            for name in changes
        }
        return min(
            ((name, change, limits[name]) for name, change in changes.items()),
            key=lambda each: (each[1] + each[2], each[0]),
            default=None,
        )


def _value(reward: Reward) -> float:
    """A reward that is known to be measured."""
    assert reward.value is not None
    return reward.value


def _attained(rewards: Iterable[Reward | None]) -> dict[str, tuple[float, int]]:
    """By class, the share of its requests within the targets over all these slices, and their number."""
    sums: dict[str, tuple[float, int]] = {}
    for reward in rewards:
        for name, figures in reward.classes.items() if reward is not None else ():
            kept, requests = sums.get(name, (0.0, 0))
            sums[name] = kept + figures.requests * figures.attainment_ratio, requests + figures.requests
    return {name: (kept / requests, requests) for name, (kept, requests) in sums.items() if requests}


def _failed(reason: str, figures: Mapping[str, float] | None = None) -> Verdict:
    return Verdict(TrialStatus.FAILED, reason, figures or {})
