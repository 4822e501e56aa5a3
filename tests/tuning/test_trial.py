"""Sequential test of a candidate in production, and its error rates."""

import random
import statistics
from collections import Counter
from collections.abc import Callable

import pytest

from serve_app.tuning.objective import Reward
from serve_app.tuning.study import Trial, Verdict, evidence, verdict_of
from tests.tuning.rewards import rewarded

PAIRS, SLICE_S, SETTLE_S, LIMIT_S = 12, 60.0, 10.0, 120.0
# Standard deviation of the difference of two neighbouring slices with the same values.
NOISE = 0.05


def trial(pairs: int = PAIRS) -> Trial:
    return Trial(pairs=pairs, slice_s=SLICE_S, settle_s=SETTLE_S, judge_limit_s=LIMIT_S)


def play(made: Trial, reward: Callable[[bool], Reward]) -> float:
    """Drive a trial second by second to its verdict; return how long the candidate's values were current."""
    sides: dict[float, bool] = {}
    on_trial_s = now = 0.0
    while made.verdict is None and now < 10_000:
        if made.advance(now):
            sides[now + SETTLE_S] = made.is_candidate_slice
        on_trial_s += made.is_candidate_slice and not made.is_slice_over(now)
        made.judge(now, now, lambda start, _: reward(sides[start]))
        now += 1.0
    return on_trial_s


class Production:
    """Slice rewards that differ by the effect of a candidate, and by traffic that neighbours share."""

    def __init__(self, seed: int, effect: float, *, memory: float = 0.5) -> None:
        self._rng, self._effect, self._memory = random.Random(seed), effect, memory
        # Per slice, so that the difference of two neighbours has the deviation NOISE.
        self._sd = NOISE / (2 * (1 - memory)) ** 0.5
        self._traffic = self._rng.gauss(0, self._sd)

    def reward(self, is_candidate: bool) -> Reward:
        fresh = self._rng.gauss(0, self._sd * (1 - self._memory**2) ** 0.5)
        self._traffic = self._memory * self._traffic + fresh
        return rewarded(0.6 + self._traffic + (self._effect if is_candidate else 0.0))


def verdicts(effect: float, seeds: int, memory: float = 0.5) -> tuple[Counter[Verdict], float]:
    """Return the verdicts over many seeds, and the mean time with the candidate's values."""
    found, times = Counter[Verdict](), []
    for seed in range(seeds):
        made = trial()
        times.append(play(made, Production(seed, effect, memory=memory).reward))
        assert made.verdict is not None
        found[made.verdict] += 1
    return found, statistics.fmean(times)


@pytest.mark.parametrize("memory", [0.0, 0.5])
def test_without_a_difference_hardly_a_candidate_is_adopted_and_few_are_withdrawn_early(
    memory: float,
) -> None:
    """Stated error rates: 400 trials of the current values against themselves.

    Measured: 0.2 to 0.5 % end as a gain, 10 % as harm, and 90 % inconclusive.
    """
    found, _ = verdicts(0.0, 400, memory)
    assert found[Verdict.GAIN] <= 0.02 * 400
    assert found[Verdict.HARM] <= 0.15 * 400
    assert found[Verdict.INCONCLUSIVE] >= 0.83 * 400


def test_a_harmful_candidate_is_withdrawn_and_a_large_harm_within_three_pairs() -> None:
    found, in_force_s = verdicts(-2 * NOISE, 100)
    assert found == {Verdict.HARM: 100}
    assert in_force_s <= 5 * SLICE_S
    _, in_force_s = verdicts(-6 * NOISE, 100)
    assert in_force_s <= 3 * SLICE_S


def test_a_beneficial_candidate_is_adopted_and_never_judged_harmful() -> None:
    found, _ = verdicts(2 * NOISE, 100)
    assert found[Verdict.GAIN] >= 97
    assert found[Verdict.HARM] == 0
    smaller, _ = verdicts(NOISE, 100)
    assert smaller[Verdict.GAIN] >= 50


def test_the_evidence_is_the_mean_of_two_bayes_factors() -> None:
    # By hand: n = 3, mean 0.2, standard deviation 0.1, so t^2 = 12, v = 2, 1 + n g = 13.
    of_t = 13**-0.5 * ((1 + 12 / 2) / (1 + 12 / (2 * 13))) ** 1.5
    # Three of three are positive: 2^3 * 3! * 0! / 4!.
    expected = (of_t + 2.0) / 2
    assert evidence([0.1, 0.2, 0.3]) == pytest.approx(expected)
    assert evidence([0.3]) == 1.0
    assert evidence([-0.1, -0.2, -0.3]) == pytest.approx(expected)


def test_one_wild_minute_does_not_hide_a_steady_gain() -> None:
    steady = [0.10, 0.32, 0.16, 0.04, 0.11, 0.06, 0.04, 0.09]
    assert verdict_of(steady, PAIRS) is Verdict.GAIN
    assert verdict_of([*steady[:3], 2.0, *steady[3:]], PAIRS) is Verdict.GAIN


def test_a_constant_reward_and_trifles_prove_nothing() -> None:
    assert verdict_of([0.0] * PAIRS, PAIRS) is Verdict.INCONCLUSIVE
    assert verdict_of([0.001] * PAIRS, PAIRS) is Verdict.INCONCLUSIVE
    assert verdict_of([0.2, 0.2], PAIRS) is None
    assert verdict_of([-0.2, -0.2], PAIRS) is Verdict.HARM


def test_sides_take_turns_so_that_a_steady_trend_favours_neither() -> None:
    made, turns = trial(pairs=4), []
    for now in range(0, 8 * int(SLICE_S), int(SLICE_S)):
        assert made.advance(now)
        turns.append(made.is_candidate_slice)
    assert turns == [False, True, True, False] * 2
    assert not made.advance(8 * SLICE_S)


def test_a_pair_waits_for_its_requests_and_a_slice_whose_requests_do_not_end_is_not_measured() -> None:
    made = trial()
    made.advance(0.0)
    made.advance(SLICE_S)
    end = 2 * SLICE_S
    assert not made.judge(end, SLICE_S + 1, lambda *_: rewarded(0.5))
    # One request of the candidate's slice never ends.
    assert made.judge(end + LIMIT_S, SLICE_S + 1, lambda *_: rewarded(0.5))
    assert made.verdict is Verdict.HARM
    assert "have not ended" in made.reason


def test_void_pairs_are_made_up_for_but_not_for_ever() -> None:
    unmeasured = iter([True, True, True])

    def seldom(is_candidate: bool) -> Reward:
        if is_candidate:
            return rewarded(0.5)
        return rewarded(None if next(unmeasured, False) else 0.5)

    made = trial(pairs=4)
    play(made, seldom)
    assert (made.verdict, len(made.differences)) == (Verdict.INCONCLUSIVE, 4)
    never = trial(pairs=4)
    play(never, lambda is_candidate: rewarded(0.5 if is_candidate else None))
    assert never.verdict is Verdict.INCONCLUSIVE
    assert "without a reward" in never.reason
