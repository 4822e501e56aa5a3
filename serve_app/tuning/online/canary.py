"""A trial of one step in production: time slices of incumbent and candidate, paired for a verdict.

The slices come in the order incumbent, candidate, candidate, incumbent, and so on, so a load that rises or
falls steadily favours neither side. Two neighbours are a pair; `trial_verdict` judges the pairs. Pairs that
turn out void are made up for by further ones.

Where a twin can say what the values in force would have made of each slice, a pair also waits for that
expectation (`control_variate`). If one is missing, the trial goes on as if there had been none.
"""

from collections.abc import Mapping

from serve_app.tuning.objective.objective import Reward, finite
from serve_app.tuning.online.control_variate import ControlVariate
from serve_app.tuning.online.rollout_settings import RolloutSettings, Slice
from serve_app.tuning.online.slice_noise import Measured, Neighbours, SliceNoise
from serve_app.tuning.online.trial_verdict import Evidence, Pair, Verdict


class Canary:
    """One trial of one step.

    Args:
        now: start of its first slice, one of the incumbent.
        slice_noise: differences of neighbouring slices before the trial; None is the strictest.
        control: how to clear differences of what the twin expects; None: there will be no expectations.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        now: float,
        slice_noise: SliceNoise | None = None,
        control: ControlVariate | None = None,
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
        """Slices whose requests are over, or have taken longer than `judge_limit_s`.

        Args:
            settled_until: arrival of the oldest request that is still open; `now`, when none is.
        """
        limit_s = self._settings.judge_limit_s
        return [
            self._slice(number)
            for number, end in enumerate(self._ended)
            if number not in self._rewards and (settled_until >= end or now >= end + limit_s)
        ]

    def is_late(self, number: int, settled_until: float) -> bool:
        """Whether some requests of a slice are still open, so that it cannot be judged."""
        return settled_until < self._ended[number]

    def judge(self, number: int, reward: Reward) -> Verdict:
        """Note the reward of a slice, and return the state of the trial."""
        if 0 <= number < len(self._ended) and number not in self._rewards:
            self._rewards[number] = reward
        return self.verdict()

    def to_expect(self) -> list[Slice]:
        """Slices of measured pairs whose expectation is missing."""
        if self._control is None:
            return []
        return [
            self._slice(number)
            for first in self._judged_pairs()
            if self._pair(first).is_measured
            for number in (first, first + 1)
            if number not in self._expected
        ]

    def expect(self, expected: Mapping[int, Reward]) -> Verdict:
        """Note what the values in force would have made of some slices; return the state of the trial."""
        self._expected |= expected
        if any(finite(reward.value) is None for reward in expected.values()):
            self._control = None
        return self.verdict()

    def use_control(self, control: ControlVariate) -> Verdict:
        """Clear differences by another control variate; return the state of the trial."""
        if self._control is not None:
            self._control = control
        return self.verdict()

    def drop_control(self) -> Verdict:
        """Go on without expectations; return the state of the trial."""
        self._control = None
        return self.verdict()

    def neighbours(self) -> list[Neighbours]:
        """Successive slices of one side, which show how much slices of the same values differ."""
        measured = {number: self._measured(number) for number in self._rewards}
        last = max(measured, default=0)
        return [
            (measured[number], measured[number + 1])
            for number in range(1, last, 2)
            if number in measured and number + 1 in measured
        ]

    def verdict(self) -> Verdict:
        """The state of the trial."""
        evidence = Evidence(self._settings, self._slice_noise, self._control)
        return evidence.verdict([self._pair(first) for first in self._judged_pairs()])

    def _judged_pairs(self) -> list[int]:
        """The first slice of each pair whose slices are both judged."""
        return [
            first
            for first in range(0, len(self._ended) - 1, 2)
            if first in self._rewards and first + 1 in self._rewards
        ]

    def _pair(self, first: int) -> Pair:
        incumbent, candidate = sorted((first, first + 1), key=_of_candidate)
        return Pair(self._measured(incumbent), self._measured(candidate))

    def _measured(self, number: int) -> Measured:
        return Measured(self._rewards[number], self._expected.get(number))

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
        """Whether another slice is needed; void pairs are made up for."""
        void = sum(not self._pair(first).is_measured for first in self._judged_pairs())
        return len(self._ended) < 2 * (self._settings.pairs + void)


def _of_candidate(number: int) -> bool:
    """Incumbent, candidate, candidate, incumbent, and again."""
    return number % 4 in (1, 2)
