import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.workloads.arrivals import Arrivals, GammaArrivals, OnOffArrivals
from serve_app.workloads.streams import stream


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.5])
def test_gamma_gaps_have_the_asked_mean_and_variation(cv: float) -> None:
    times = GammaArrivals(rate_per_s=20, cv=cv).sample(100_000, stream(1, "arrivals"))
    gaps = np.diff(times)
    assert 1 / gaps.mean() == pytest.approx(20, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_on_off_arrivals_keep_the_mean_rate_and_have_pauses() -> None:
    times = OnOffArrivals(rate_per_s=5, on_s=10, off_s=10).sample(50_000, stream(2, "arrivals"))
    assert len(times) / times[-1] == pytest.approx(5, rel=0.1)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() > 5
    busy = gaps[gaps < 1]
    assert 1 / busy.mean() == pytest.approx(10, rel=0.1)


@given(st.integers(0, 200), st.integers(0, 1000))
def test_arrivals_ascend_whatever_the_count_and_the_seed(count: int, seed: int) -> None:
    processes: list[Arrivals] = [
        GammaArrivals(rate_per_s=3, cv=2),
        OnOffArrivals(rate_per_s=3, on_s=1, off_s=2),
    ]
    for process in processes:
        times = process.sample(count, stream(seed, "arrivals"))
        assert len(times) == count
        assert np.all(np.diff(times) >= 0)


def test_the_same_seed_gives_the_same_arrivals_and_another_gives_others() -> None:
    process = GammaArrivals(rate_per_s=1)
    once, again = (process.sample(5, stream(7, "arrivals")) for _ in range(2))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, process.sample(5, stream(8, "arrivals")))
    assert not np.array_equal(once, process.sample(5, stream(7, "lengths")))


def test_a_rate_of_zero_is_refused_with_its_value() -> None:
    with pytest.raises(ValueError, match="rate_per_s must be positive, got 0"):
        GammaArrivals(rate_per_s=0)
    with pytest.raises(ValueError, match="off_s must be positive, got -1"):
        OnOffArrivals(rate_per_s=1, on_s=1, off_s=-1)
