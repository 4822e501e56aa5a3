from dataclasses import replace

import numpy as np
import pytest

from serve_app.lab.calibration import Floats, Timings, compare, measured, replay
from tests.lab.calibration.builders import LIMITS, TRUTH, engine_run, measured_request


def test_a_replay_with_the_true_coefficients_repeats_the_measurement() -> None:
    # Enough load for queueing and preemption; the replay combines steps that were measured singly.
    requests = engine_run(80, per_s=2.5)
    ours, theirs = replay(requests, LIMITS, TRUTH), measured(requests)
    assert ours.preemptions > 0
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-6, atol=1e-6)


def test_a_replay_uses_no_measured_times_except_the_arrivals() -> None:
    requests = engine_run(30, per_s=2.0)
    blind = [
        replace(one, scheduled_at=one.queued_at, first_token_at=one.queued_at + 1, last_token_at=1e9)
        for one in requests
    ]
    ours, theirs = replay(blind, LIMITS, TRUTH), replay(requests, LIMITS, TRUTH)
    assert ours.e2e_s.tolist() == theirs.e2e_s.tolist()


def test_a_part_of_a_replay_is_taken_from_the_replay_of_all() -> None:
    requests = engine_run(30, per_s=2.0)
    everything, part = replay(requests, LIMITS, TRUTH), replay(requests, LIMITS, TRUTH, part=slice(20, None))
    assert part.ttft_s.tolist() == everything.ttft_s[20:].tolist()


def test_requests_of_one_instant_share_their_first_step() -> None:
    pair = [measured_request(prompt_tokens=100), measured_request(prompt_tokens=200)]
    played = replay(pair, LIMITS, TRUTH)
    pairs = 100 * 101 // 2 + 200 * 201 // 2
    assert played.ttft_s == pytest.approx([TRUTH.step_s(prefill_tokens=300, attended_pairs=pairs)] * 2)


def test_measured_timings_are_those_of_the_definitions() -> None:
    timings = measured([measured_request(), measured_request(output_tokens=1, last_token_at=10.5)])
    assert timings.ttft_s.tolist() == [0.5, 0.5]
    assert timings.tpot_s.tolist() == [0.1]
    assert timings.e2e_s.tolist() == [1.5, 0.5]


def test_errors_are_signed_and_those_of_the_statistics() -> None:
    measured: Floats = np.arange(1.0, 102.0, dtype=np.float64)
    # The slowest ten take twice as long; which requests these are does not matter.
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
