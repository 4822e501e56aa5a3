import pytest

from serve_app.core.metrics.confidence import interval_95, paired_difference_95, t_95


def test_the_interval_of_a_known_sample() -> None:
    interval = interval_95([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval.mean == 3.0
    # Standard deviation sqrt(2.5), n 5, t(4) = 2.776: half width 1.963.
    assert interval.low == pytest.approx(1.037, abs=1e-3)
    assert interval.high == pytest.approx(4.963, abs=1e-3)


def test_one_seed_gives_a_mean_without_bounds() -> None:
    interval = interval_95([7.0])
    assert interval.as_json() == {"mean": 7.0, "low": None, "high": None, "n": 1}


def test_pairing_removes_what_the_seeds_share() -> None:
    baseline = [10.0, 20.0, 30.0]
    difference = paired_difference_95([9.0, 19.1, 28.9], baseline)
    assert difference.mean == pytest.approx(-1.0)
    assert difference.high is not None
    assert difference.high < 0


def test_unpaired_runs_are_rejected() -> None:
    with pytest.raises(ValueError, match="got 1 and 2 values"):
        paired_difference_95([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="at least one value"):
        interval_95([])


def test_t_falls_with_the_degrees_of_freedom_towards_the_normal() -> None:
    points = [t_95(n) for n in range(1, 200)]
    assert points == sorted(points, reverse=True)
    assert t_95(60) == pytest.approx(2.000, abs=1e-3)
    assert t_95(10**6) == pytest.approx(1.960, abs=1e-3)
