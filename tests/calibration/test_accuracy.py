import numpy as np
import pytest

from serve_app.calibration.accuracy import compare
from serve_app.calibration.replay import Floats, Timings


def test_errors_are_signed_and_those_of_the_statistics() -> None:
    measured: Floats = np.arange(1.0, 102.0, dtype=np.float64)
    # The slowest ten take twice as long; which request is which does not matter.
    played: Floats = np.where(measured > 91, 2 * measured, measured)[::-1]
    half: Floats = 0.5 * measured
    found = compare(Timings(played, played, half), Timings(measured, measured, measured))
    errors = found["ttft_s"].errors
    assert errors.mean == pytest.approx(sum(range(92, 102)) / sum(range(1, 102)))
    assert (errors.p50, errors.p90, errors.p99) == pytest.approx((0.0, 0.0, 1.0))
    assert found["e2e_s"].errors.mean == pytest.approx(-0.5)


def test_a_metric_that_no_request_has_is_left_out() -> None:
    one, none = np.ones(1, dtype=np.float64), np.ones(0, dtype=np.float64)
    assert list(compare(Timings(one, none, one), Timings(one, none, one))) == ["ttft_s", "e2e_s"]
