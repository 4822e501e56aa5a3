from typing import Any

import numpy as np
import pytest

from serve_app.tuning.partition.drift import DriftSettings, has_drifted, kolmogorov_p_value
from tests.tuning.builders import heavy_tail, paper_mix

USUAL = DriftSettings()
FEW = DriftSettings(min_sample=2)


def test_the_shift_is_the_largest_difference_of_the_distribution_functions() -> None:
    # Up to 20: 2 of 4 before, none now. Up to 30: 3 of 4 and 1 of 5. Up to 40: all and 2 of 5, the largest.
    drift = has_drifted([10, 20, 30, 40], [30, 40, 50, 60, 70], FEW)

    assert drift.shift == pytest.approx(0.6)
    assert drift.at_tokens == 40


def test_equal_samples_have_not_shifted_at_all() -> None:
    drift = has_drifted(paper_mix(1000, 1), paper_mix(1000, 1), USUAL)

    assert (drift.drifted, drift.shift, drift.p_value) == (False, 0.0, 1.0)


def test_the_p_value_agrees_with_the_tables_of_kolmogorov() -> None:
    # Critical values of the limit distribution: 1.3581 at 5 %, 1.6276 at 1 %, 1.9495 at 0.1 %.
    for critical, probability in ((1.3581, 0.05), (1.6276, 0.01), (1.9495, 0.001)):
        shift = critical / np.sqrt(10**8 / 2)
        assert kolmogorov_p_value(shift, 10**8, 10**8) == pytest.approx(probability, rel=0.01)


def test_the_p_value_agrees_with_another_implementation() -> None:
    stats = pytest.importorskip("scipy.stats")
    for seed in range(5):
        before = np.random.default_rng(seed).normal(0.0, 1.0, 300)
        now = np.random.default_rng(seed + 50).normal(0.03 * seed, 1.0, 450)
        other = stats.ks_2samp(before, now, method="exact")
        assert kolmogorov_p_value(other.statistic, 300, 450) == pytest.approx(other.pvalue, abs=0.02)


def test_independent_samples_of_the_same_traffic_give_hardly_a_false_alarm() -> None:
    # A chance of 0.001 each and the demand for a tenth: one of 200 would be plenty.
    alarms = [
        has_drifted(heavy_tail(500, seed), heavy_tail(500, seed + 1000), USUAL).drifted for seed in range(200)
    ]

    assert sum(alarms) <= 1


def test_a_mix_that_flips_is_noticed_at_the_boundary_between_its_parts() -> None:
    before = paper_mix(2000, 1)
    now = np.where(np.random.default_rng(2).random(500) < 0.3, before[:500], 3000)

    drift = has_drifted(before, now, USUAL)

    assert drift.drifted
    assert 256 <= drift.at_tokens < 3000
    assert drift.p_value < 1e-6


def test_a_trifle_does_not_count_however_certain_it_is() -> None:
    before = np.arange(100_000) % 1000 + 1
    now = before + 30

    drift = has_drifted(before, now, USUAL)

    assert drift.p_value < 1e-9
    assert drift.shift == pytest.approx(0.03)
    assert not drift.drifted


def test_a_large_shift_that_may_be_chance_does_not_count() -> None:
    drift = has_drifted([1, 2, 3, 4], [4, 5, 6, 7], FEW)

    assert drift.shift == 0.75
    assert not drift.drifted


@pytest.mark.parametrize(("before", "now"), [(0, 0), (199, 5000), (5000, 199)])
def test_too_few_requests_say_nothing(before: int, now: int) -> None:
    drift = has_drifted([10] * before, [9000] * now, USUAL)

    assert not drift.drifted
    assert not drift.enough


def test_two_hundred_requests_are_enough_for_a_complete_change() -> None:
    drift = has_drifted([10] * 200, [9000] * 200, USUAL)

    assert (drift.drifted, drift.enough, drift.shift, drift.at_tokens) == (True, True, 1.0, 10)


@pytest.mark.parametrize(
    "wrong", [{"min_shift": 0.0}, {"min_shift": 1.0}, {"significance": -0.1}, {"min_sample": 0}]
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DriftSettings(**wrong)
