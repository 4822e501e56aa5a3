from collections.abc import Sequence
from random import Random

import pytest

from serve_app.tuning.objective.objective import Reward
from serve_app.tuning.online.canary import Canary
from serve_app.tuning.online.control_variate import ControlVariate
from serve_app.tuning.online.rollout_settings import RolloutSettings
from serve_app.tuning.online.slice_noise import SliceNoise
from serve_app.tuning.online.trial_verdict import TrialStatus, Verdict
from tests.tuning.rewards import rewarded

QUICK = RolloutSettings(slice_s=10.0, settle_s=2.0, pairs=3, void_pairs=1, judge_limit_s=30.0)


def judged(
    rewards: Sequence[Reward], slice_noise: SliceNoise | None = None, control: ControlVariate | None = None
) -> tuple[Canary, Verdict]:
    """Judge one slice after the other; incumbent, candidate, candidate, incumbent..."""
    canary, verdict = Canary(QUICK, 0.0, slice_noise, control), Verdict(TrialStatus.OPEN)
    for number, reward in enumerate(rewards):
        canary.advance(10.0 * (number + 1))
        (part,) = [each for each in canary.to_judge(10.0 * (number + 1), 1e9) if each.number == number]
        verdict = canary.judge(part.number, reward)
    return canary, verdict


def verdict_of(
    rewards: Sequence[Reward], slice_noise: SliceNoise | None = None, control: ControlVariate | None = None
) -> Verdict:
    return judged(rewards, slice_noise, control)[1]


def status_of(rewards: Sequence[Reward], slice_noise: SliceNoise | None = None) -> TrialStatus:
    return verdict_of(rewards, slice_noise).status


def pairs(*differences: float | None) -> list[Reward]:
    """Slices of so many pairs, the incumbent always at 0.5; None leaves a pair without rewards."""
    rewards = []
    for place, difference in enumerate(differences):
        mine = rewarded(None if difference is None else 0.5 + difference)
        theirs = rewarded(None if difference is None else 0.5)
        rewards += [theirs, mine] if place % 2 == 0 else [mine, theirs]
    return rewards


def test_slices_come_in_an_order_that_a_rising_load_does_not_favour() -> None:
    canary = Canary(QUICK, 0.0)
    turns = []
    for second in range(60):
        turns.append(canary.is_candidates_turn)
        canary.advance(float(second + 1))
    assert turns == [False] * 10 + [True] * 20 + [False] * 20 + [True] * 10
    assert not canary.is_candidates_turn


def test_a_slice_is_judged_without_its_beginning_when_its_requests_are_over() -> None:
    canary = Canary(QUICK, 100.0)
    canary.advance(110.5)
    assert canary.to_judge(111.0, settled_until=109.0) == []
    (part,) = canary.to_judge(111.0, settled_until=111.0)
    assert (part.number, part.of_candidate, part.start, part.end) == (0, False, 102.0, 110.0)
    assert canary.to_judge(140.0, settled_until=109.0) == [part]
    assert canary.is_late(0, 109.0)


def test_a_slice_ends_in_time_even_if_nobody_looked() -> None:
    canary = Canary(QUICK, 0.0)
    canary.advance(10.0)
    canary.advance(500.0)
    assert [part.end for part in canary.to_judge(500.0, 500.0)] == [10.0, 20.0]


def test_a_gain_within_the_scatter_of_its_own_pairs_is_not_adopted() -> None:
    # Nothing is known of the traffic before, so nothing but the pairs can tell that this is chance.
    verdict = verdict_of(pairs(0.6, -0.04, -0.01))
    assert verdict.figures["mean_difference"] > 0
    assert verdict.status is TrialStatus.UNPROVEN


def test_better_in_all_is_won() -> None:
    assert status_of(pairs(0.1, -0.01, 0.1)) is TrialStatus.WON


@pytest.mark.parametrize("difference", [0.0, -0.001])
def test_no_better_is_failed(difference: float) -> None:
    verdict = verdict_of(pairs(difference, difference, difference))
    assert verdict.status is TrialStatus.FAILED
    assert "no better" in verdict.reason


def test_worse_by_more_than_the_margin_ends_after_two_pairs() -> None:
    assert status_of(pairs(-0.04)) is TrialStatus.OPEN
    verdict = verdict_of(pairs(-0.04, -0.04))
    assert verdict.status is TrialStatus.FAILED
    assert verdict.figures["mean_difference"] == pytest.approx(-0.04)


def test_far_worse_ends_after_one_pair() -> None:
    assert status_of(pairs(-0.1)) is TrialStatus.FAILED


def test_a_class_that_loses_ends_the_trial_however_good_the_reward() -> None:
    mine = rewarded(0.9, {"default short": (200, 1.0), "default long": (100, 0.8)})
    theirs = rewarded(0.5, {"default short": (200, 0.7), "default long": (100, 0.9)})
    verdict = verdict_of([theirs, mine])
    assert verdict.status is TrialStatus.FAILED
    assert "default long" in verdict.reason


def test_a_class_of_few_requests_says_nothing() -> None:
    mine, theirs = rewarded(0.9, {"batch long": (99, 0.0)}), rewarded(0.5, {"batch long": (99, 1.0)})
    assert status_of([theirs, mine]) is TrialStatus.OPEN


def test_no_reward_under_the_candidate_alone_ends_the_trial() -> None:
    verdict = verdict_of([rewarded(0.5), rewarded(None)])
    assert verdict.status is TrialStatus.FAILED
    assert "nothing was measured" in verdict.reason


def test_a_void_pair_is_made_up_for_but_not_for_ever() -> None:
    canary, verdict = judged([*pairs(0.1, None, 0.1)])
    assert verdict.status is TrialStatus.OPEN
    assert canary.advance(70.0)
    assert status_of(pairs(0.1, None, 0.1, 0.1)) is TrialStatus.WON
    verdict = verdict_of(pairs(0.1, None, None))
    assert verdict.status is TrialStatus.FAILED
    assert "2 pairs" in verdict.reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_none(value: float) -> None:
    assert status_of([rewarded(0.5), rewarded(value)]) is TrialStatus.FAILED


def test_slice_noise_ends_no_trial() -> None:
    # One pair of -0.2 is far off where slices are alike, and nothing where they differ by 0.3.
    assert status_of(pairs(-0.2)) is TrialStatus.FAILED
    noise = SliceNoise(reward=0.3)
    assert status_of(pairs(-0.2), noise) is TrialStatus.OPEN
    assert status_of(pairs(-0.2, 0.5, 0.9), noise) is TrialStatus.UNPROVEN
    assert status_of(pairs(0.2, 0.5, 0.4), noise) is TrialStatus.WON
    # Beyond margin and noise it is harm, and a gain smaller than the noise is not adopted.
    assert status_of(pairs(-0.4), noise) is TrialStatus.FAILED
    assert status_of(pairs(-0.25, -0.25), noise) is TrialStatus.FAILED
    verdict = verdict_of(pairs(0.1, 0.2, 0.1), noise)
    assert verdict.status is TrialStatus.UNPROVEN
    assert "by no more than the slice noise explains" in verdict.reason
    assert status_of(pairs(0.1, 0.2, 0.1)) is TrialStatus.WON


def test_a_class_may_vary_within_its_slice_noise_and_no_further() -> None:
    before, after = {"default long": (200, 0.9)}, {"default long": (200, 0.7)}
    rewards = [rewarded(0.5, before), rewarded(0.6, after)]
    assert status_of(rewards) is TrialStatus.FAILED
    assert status_of(rewards, SliceNoise(attainment={"default long": 0.2})) is TrialStatus.OPEN
    assert status_of(rewards, SliceNoise(attainment={"default short": 0.9})) is TrialStatus.FAILED
    verdict = verdict_of(rewards, SliceNoise(attainment={"default long": 0.1}))
    assert verdict.status is TrialStatus.FAILED
    assert verdict.figures["attainment_limit"] == pytest.approx(0.15)


def test_successive_slices_of_one_side_are_neighbours() -> None:
    canary = Canary(QUICK, 0.0, SliceNoise(), ControlVariate())
    for number in range(5):
        canary.advance(10.0 * (number + 1))
        canary.judge(number, rewarded(0.1 * number))
    canary.expect({3: rewarded(0.3), 4: rewarded(0.4)})
    (mine, theirs) = canary.neighbours()
    # Two of the candidate, of which the twin was not asked, and two of the incumbent.
    assert [each.reward.value for each in (*mine, *theirs)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert [each.expected for each in mine] == [None, None]
    assert [each.expected for each in theirs] == [rewarded(0.3), rewarded(0.4)]


def concluded(
    rewards: list[Reward], slice_noise: SliceNoise, settings: RolloutSettings
) -> tuple[TrialStatus, int]:
    """How a trial ends, and after how many pairs."""
    canary, verdict, slices = Canary(settings, 0.0, slice_noise), Verdict(TrialStatus.OPEN), 0
    while verdict.status is TrialStatus.OPEN and slices < len(rewards):
        canary.advance(settings.slice_s * (slices + 1))
        verdict = canary.judge(slices, rewards[slices])
        slices += 1
    return verdict.status, slices // 2


def test_a_step_without_a_gain_is_adopted_as_seldom_as_stated_and_harm_hardly_ever() -> None:
    settings, noise = RolloutSettings(), Random(0)
    won, pairs_needed = {}, {}
    for gain in (-0.05, 0.0, 0.2):
        trials = [
            concluded(
                pairs(*(gain + noise.gauss(0.0, 0.1) for _ in range(settings.pairs))),
                SliceNoise(reward=0.1),
                settings,
            )
            for _ in range(1_000)
        ]
        won[gain] = sum(end is TrialStatus.WON for end, _ in trials) / 1_000
        pairs_needed[gain] = sum(count for _, count in trials) / 1_000
    assert won[0.0] <= settings.false_adoption
    assert won[-0.05] <= 0.01
    assert won[0.2] >= 0.95
    # A clear gain is adopted before half of the pairs are over.
    assert pairs_needed[0.2] < settings.pairs / 2


def test_without_known_slice_noise_a_gain_is_proven_by_all_pairs_only() -> None:
    settings, alike = RolloutSettings(pairs=5), pairs(*[0.2] * 5)
    assert concluded(alike, SliceNoise(), settings) == (TrialStatus.WON, 5)
    assert concluded(alike, SliceNoise(reward=0.01), settings) == (TrialStatus.WON, 3)


def control(slope: float = 1.0, *, residual: float) -> ControlVariate:
    return ControlVariate(reward=slope, residual=SliceNoise(reward=residual))


def cleared(
    differences: list[tuple[float, float]],
    control: ControlVariate,
    settings: RolloutSettings = QUICK,
    noise: float = 0.5,
) -> Verdict:
    """The end of a trial with pairs of differences (measured, expected); the incumbent is always at 0.5."""
    canary = Canary(settings, 0.0, SliceNoise(reward=noise), control)
    verdict = Verdict(TrialStatus.OPEN)
    rewards = pairs(*(measured for measured, _ in differences))
    expected = pairs(*(expected for _, expected in differences))
    for number, reward in enumerate(rewards):
        canary.advance(settings.slice_s * (number + 1))
        verdict = canary.judge(number, reward)
        if verdict.status is TrialStatus.OPEN and number % 2:
            wanted = [part.number for part in canary.to_expect()]
            assert wanted == [number - 1, number]
            verdict = canary.expect({each: expected[each] for each in wanted})
        if verdict.status is not TrialStatus.OPEN:
            break
    return verdict


def test_what_the_twin_expects_of_the_traffic_is_no_difference_of_the_sides() -> None:
    # As measured, pairs differ by chance and prove nothing; cleared, the candidate gains 0.1 in each.
    differences = [(0.5, 0.4), (-0.3, -0.4), (0.1, 0.0)]
    assert status_of(pairs(0.5, -0.3, 0.1), SliceNoise(reward=0.5)) is TrialStatus.UNPROVEN
    verdict = cleared(differences, control(residual=0.02))
    assert verdict.status is TrialStatus.WON
    assert verdict.figures["mean_difference"] == pytest.approx(0.1)
    assert verdict.figures["uncleared_difference"] == pytest.approx(0.1)
    # Nothing of it is subtracted where the twin was no guide before.
    assert cleared(differences, control(0.0, residual=0.5)).status is TrialStatus.UNPROVEN


def test_harm_that_good_luck_hides_is_found() -> None:
    assert status_of(pairs(0.2), SliceNoise(reward=0.5)) is TrialStatus.OPEN
    verdict = cleared([(0.2, 0.5)], control(residual=0.02))
    assert verdict.status is TrialStatus.FAILED
    assert verdict.figures["mean_difference"] == pytest.approx(-0.3)


def test_a_pair_waits_for_what_is_expected_and_plain_harm_does_not() -> None:
    canary, verdict = judged(pairs(-0.2), SliceNoise(reward=0.1), ControlVariate())
    assert verdict.status is TrialStatus.OPEN
    assert [part.number for part in canary.to_expect()] == [0, 1]
    verdict = verdict_of(pairs(-0.5), SliceNoise(reward=0.1), ControlVariate())
    assert verdict.status is TrialStatus.FAILED
    assert "far below" in verdict.reason


@pytest.mark.parametrize("missing", ["never comes", "has no reward"])
def test_without_an_expectation_a_trial_goes_on_as_if_there_had_been_none(missing: str) -> None:
    canary, verdict = judged(pairs(-0.2), SliceNoise(), ControlVariate())
    assert verdict.status is TrialStatus.OPEN
    verdict = canary.drop_control() if missing == "never comes" else canary.expect({0: rewarded(None)})
    assert verdict.status is TrialStatus.FAILED
    assert canary.to_expect() == []


def test_a_class_is_cleared_of_what_is_expected_of_it() -> None:
    before, after = {"default long": (200, 0.9)}, {"default long": (200, 0.6)}
    rewards, expected = (
        [rewarded(0.5, before), rewarded(0.6, after)],
        [rewarded(0.5, before), rewarded(0.5, after)],
    )
    assert status_of(rewards) is TrialStatus.FAILED
    canary, _ = judged(rewards, SliceNoise(), ControlVariate())
    assert canary.expect(dict(enumerate(expected))).status is TrialStatus.OPEN
    canary, _ = judged(rewards, SliceNoise(), ControlVariate())
    verdict = canary.expect({0: expected[0], 1: expected[0]})
    assert verdict.status is TrialStatus.FAILED
    assert verdict.figures["attainment_difference"] == pytest.approx(-0.3)


def test_a_constant_reward_is_not_adopted_whatever_the_twin_expected_of_it() -> None:
    verdict = cleared([(0.0, -0.3), (0.0, -0.31), (0.0, -0.29)], control(residual=0.01))
    assert verdict.figures["mean_difference"] == pytest.approx(0.3)
    assert verdict.status is TrialStatus.UNPROVEN


@pytest.mark.parametrize("slope", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("twin", ["right", "wild", "contrary"])
def test_however_wrong_the_twin_a_step_without_a_gain_is_adopted_as_seldom_as_stated(
    twin: str, slope: float
) -> None:
    settings, noise = RolloutSettings(attainment_margin=1.0), Random(1)
    right, error = {"right": (0.9, 0.02), "contrary": (-0.9, 0.02), "wild": (0.0, 0.2)}[twin]
    residual = ((1 - slope * right) ** 2 * 0.1**2 + slope**2 * error**2) ** 0.5
    won = 0
    for _ in range(1_000):
        measured = [noise.gauss(0.0, 0.1) for _ in range(settings.pairs)]
        differences = [(each, right * each + noise.gauss(0.0, error)) for each in measured]
        verdict = cleared(differences, control(slope, residual=residual), settings, noise=0.1)
        won += verdict.status is TrialStatus.WON
    assert won <= 1_000 * settings.false_adoption
