from dataclasses import replace

import pytest

from serve_app.lab.reports.document import FigureDifference, Judgement, Sample, paired_difference, verdict_of
from tests.lab.reports.builders import DIFFERENCE

SEEDS = Sample(4, "seed", "seeds", "raise --seeds")
ONE_SEED = Sample(1, "seed", "seeds", "raise --seeds")


def paired(base: list[float | None], other: list[float | None], name: str = "TTFT") -> FigureDifference:
    found = paired_difference(base, other, figure=name)
    assert found is not None
    return found


def goodput(base: list[float | None], other: list[float | None]) -> FigureDifference:
    found = paired_difference(base, other, figure="goodput", lower_is_better=False)
    assert found is not None
    return found


def test_only_an_interval_without_zero_is_better_or_worse() -> None:
    assert paired([1, 2, 3, 4], [0.5, 1.4, 2.6, 3.4]).judgement is Judgement.BETTER
    assert paired([1, 2, 3, 4], [1.5, 2.4, 3.6, 4.4]).judgement is Judgement.WORSE
    assert paired([1, 2, 3, 4], [0.5, 2.5, 2.5, 4.6]).judgement is Judgement.UNCLEAR
    assert paired([1], [0.1]).judgement is Judgement.UNKNOWN


def test_a_higher_good_figure_is_better() -> None:
    assert goodput([1, 2, 3, 4], [1.5, 2.4, 3.6, 4.4]).judgement is Judgement.BETTER
    assert goodput([1, 2, 3, 4], [0.5, 1.4, 2.6, 3.4]).judgement is Judgement.WORSE


def test_seeds_without_the_figure_on_one_side_are_left_out() -> None:
    found = paired([1.0, None, 3.0], [2.0, 5.0, 4.0])
    assert (found.base, found.other, found.difference) == (2.0, 3.0, 1.0)
    assert paired_difference([None], [1.0], figure="TTFT") is None


def test_the_interval_is_that_of_the_paired_differences() -> None:
    # Differences of -1, -1, -2, -2: mean -1.5, standard error 0.2887, t of 3 degrees 3.182.
    found = paired([10, 20, 30, 40], [9, 19, 28, 38])
    assert found.low is not None
    assert found.high is not None
    assert (found.low, found.high) == pytest.approx(
        (-1.5 - 3.182 * 0.28868, -1.5 + 3.182 * 0.28868), abs=1e-4
    )
    assert found.change == pytest.approx(-1.5 / 25)
    assert found.change_interval == pytest.approx((found.low / 25, found.high / 25))


def test_the_verdict_names_what_is_better_worse_and_undecided() -> None:
    better = paired([10, 10, 10, 10], [5, 5.1, 4.9, 5], "short TTFT")
    worse = paired([10, 10, 10, 10], [15, 15.1, 14.9, 15], "long TTFT")
    unclear = paired([1, 2, 3, 4], [0.5, 2.5, 2.5, 4.6], "TPOT")
    sentence = verdict_of("fcfs", "ewsjf", [better, worse, unclear], SEEDS)
    assert sentence == (
        "ewsjf against fcfs is better in short TTFT (-50 %; 95 %: -51 % to -49 %); worse in long TTFT "
        "(+50 %; 95 %: +49 % to +51 %); no significant difference with 4 seeds in TPOT."
    )


def test_where_every_interval_holds_zero_there_is_no_difference_that_can_be_shown() -> None:
    unclear = paired([1, 2, 3, 4], [0.5, 2.5, 2.5, 4.6])
    assert verdict_of("fcfs", "ewsjf", [unclear], SEEDS) == (
        "No significant difference between ewsjf and fcfs with 4 seeds; for narrower intervals, "
        "raise --seeds."
    )


def test_one_seed_shows_nothing_for_sure() -> None:
    sentence = verdict_of("fcfs", "ewsjf", [paired([2], [1])], ONE_SEED)
    assert sentence == (
        "ewsjf against fcfs with 1 seed, which gives no confidence interval, so the differences may be "
        "chance: TTFT (-50 %). For intervals, raise --seeds."
    )


def test_a_baseline_of_zero_has_no_change_in_shares() -> None:
    found = paired([0, 0, 0, 0], [1, 1.1, 0.9, 1], "preemptions")
    assert found.change is None
    assert "preemptions (0.00 to 1.00)" in verdict_of("fcfs", "ewsjf", [found], SEEDS)


def test_a_relative_improvement_is_capped_at_all_of_it() -> None:
    # A symmetric interval of few seeds can reach below zero.
    found = replace(DIFFERENCE, base=4.0, other=0.2, difference=-3.8, low=-5.3, high=-2.3)

    assert found.change_interval == (-1.0, -2.3 / 4.0)
    assert replace(found, lower_is_better=False).change_interval == (-5.3 / 4.0, -2.3 / 4.0)
