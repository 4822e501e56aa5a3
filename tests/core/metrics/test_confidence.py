import pytest

from serve_app.core.metrics.summary import interval_95, t_95


def test_the_interval_of_a_known_sample() -> None:
    interval = interval_95([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval.mean == 3.0
    # Standard deviation sqrt(2.5), n 5, t(4) = 2.776: half width 1.963.
    assert interval.low == pytest.approx(1.037, abs=1e-3)
    assert interval.high == pytest.approx(4.963, abs=1e-3)


def test_one_seed_gives_a_mean_without_bounds() -> None:
    interval = interval_95([7.0])
    assert interval.as_json() == {"mean": 7.0, "low": None, "high": None, "n": 1}


def test_no_runs_have_no_interval() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        interval_95([])


def test_t_falls_with_the_degrees_of_freedom_towards_the_normal() -> None:
    points = [t_95(n) for n in range(1, 200)]
    assert points == sorted(points, reverse=True)
    assert t_95(60) == pytest.approx(2.000, abs=1e-3)
    assert t_95(10**6) == pytest.approx(1.960, abs=1e-3)
