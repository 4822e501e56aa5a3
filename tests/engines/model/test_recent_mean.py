import pytest

from serve_app.engines.model.model import RecentMean


def test_a_recent_mean_forgets_what_left_the_window() -> None:
    mean = RecentMean(window_s=2.0)
    mean.record(0.0, 0, now=0.0)
    mean.record(10.0, 10, now=1.0)  # 1 each
    mean.record(12.0, 20, now=2.5)  # 0.2 each
    assert mean.mean(now=2.5) == pytest.approx(12 / 20)
    assert mean.mean(now=3.2) == pytest.approx(0.2)
    assert mean.mean(now=4.6) is None


def test_a_recent_mean_restarts_with_the_counters() -> None:
    mean = RecentMean()
    mean.record(100.0, 1_000, now=0.0)
    mean.record(0.5, 1, now=0.2)
    assert mean.mean(now=0.2) is None
    mean.record(1.5, 3, now=0.4)
    assert mean.mean(now=0.4) == pytest.approx(0.5)


def test_nothing_counted_means_no_mean() -> None:
    assert RecentMean().mean(now=5.0) is None
