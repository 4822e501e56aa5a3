import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.metrics.statistics import Distribution, percentile

finite = st.floats(min_value=-1e9, max_value=1e9)


@given(st.lists(finite, min_size=1), st.floats(min_value=0, max_value=100))
def test_percentiles_agree_with_numpy(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_a_distribution_does_not_depend_on_the_order_of_the_sample() -> None:
    figures = Distribution.of([3.0, 1.0, 2.0]).as_json()
    assert figures == pytest.approx({"mean": 2.0, "p50": 2.0, "p95": 2.9, "p99": 2.98, "max": 3.0})


def test_an_empty_sample_has_no_figures_rather_than_zeros() -> None:
    assert Distribution.of([]).as_json() == {"mean": None, "p50": None, "p95": None, "p99": None, "max": None}
    with pytest.raises(ValueError, match="empty sample"):
        percentile([], 50)


def test_a_percent_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="got 101"):
        percentile([1.0], 101)
