"""Fits to runs of the engine model, with known coefficients, and to a real engine."""

import functools
from dataclasses import asdict
from pathlib import Path

import pytest

from serve_app.engines.model.roofline import load_profile
from serve_app.engines.model.step_time import StepTimeModel, attended_pairs
from serve_app.lab.calibration import (
    EXPECTED_REPLAYS,
    MIN_FITTED,
    CalibrationError,
    MeasuredRequest,
    compare,
    fit_step_time,
    initial_coefficients,
    measured,
    read_measurements,
    replay,
)
from tests.lab.calibration.builders import LIMITS, TRUTH, engine_run, measured_request

REAL = Path(__file__).parents[4] / "shared" / "measurements" / "rtx4090_llama31_8b" / "requests.jsonl"
# Light load shows single steps; at 1.2 requests per second this engine is near its limit and preempts.
RUNS = {"light": 0.6, "heavy": 1.2}


@functools.cache
def run(load: str) -> list[MeasuredRequest]:
    return engine_run(180, per_s=RUNS[load], seed=2)


@functools.cache
def fitted(load: str) -> StepTimeModel:
    return fit_step_time(run(load), 120, LIMITS)


@pytest.mark.parametrize("load", RUNS)
def test_the_coefficients_that_dominate_are_recovered(load: str) -> None:
    found = fitted(load)
    # Under heavy load nearly all steps have prompt tokens, which hide the base.
    assert found.decode_base_s == pytest.approx(TRUTH.decode_base_s, rel=0.05)
    assert found.prefill_per_token_s == pytest.approx(TRUTH.prefill_per_token_s, rel=0.05)


@pytest.mark.parametrize("load", RUNS)
@pytest.mark.parametrize(("sequences", "context_tokens"), [(1, 1_500), (5, 8_000), (12, 18_000)])
def test_decode_steps_take_as_long_as_they_truly_do(load: str, sequences: int, context_tokens: int) -> None:
    step = {"sequences": sequences, "context_tokens": context_tokens}
    assert fitted(load).step_s(**step) == pytest.approx(TRUTH.step_s(**step), rel=0.03)


@pytest.mark.parametrize("load", RUNS)
@pytest.mark.parametrize("chunk", [1_000, 2_048])
def test_prefill_steps_take_as_long_as_they_truly_do(load: str, chunk: int) -> None:
    step = {"prefill_tokens": chunk, "attended_pairs": attended_pairs(0, chunk), "sequences": 5}
    assert fitted(load).step_s(**step) == pytest.approx(TRUTH.step_s(**step), rel=0.05)


@pytest.mark.parametrize("load", RUNS)
def test_requests_that_were_not_fitted_are_predicted(load: str) -> None:
    unseen = slice(120, None)
    played = replay(run(load), LIMITS, fitted(load), part=unseen)
    for accuracy in compare(played, measured(run(load)[unseen])).values():
        assert abs(accuracy.errors.mean) < 0.03
        assert abs(accuracy.errors.p90) < 0.05


def test_a_fit_is_the_same_every_time_and_reports_its_replays() -> None:
    requests, calls = run("light")[:60], []
    first = fit_step_time(requests, 40, LIMITS, on_replay=lambda: calls.append(1))
    second = fit_step_time(requests, 40, LIMITS)
    assert first == second
    assert 0 < len(calls) <= EXPECTED_REPLAYS


@pytest.mark.slow
def test_the_timings_of_requests_that_are_not_fitted_are_not_used() -> None:
    requests = run("light")[:60]
    disguised = requests[:40] + [
        measured_request(
            prompt_tokens=one.prompt_tokens,
            output_tokens=one.output_tokens,
            queued_at=one.queued_at,
            scheduled_at=one.queued_at,
            first_token_at=one.queued_at + 50,
            last_token_at=one.queued_at + 99,
        )
        for one in requests[40:]
    ]
    assert fit_step_time(disguised, 40, LIMITS) == fit_step_time(requests, 40, LIMITS)


def test_the_start_is_right_to_a_factor() -> None:
    start = asdict(initial_coefficients(run("light")))
    for name in ("decode_base_s", "prefill_per_token_s"):
        assert 0.5 < start[name] / asdict(TRUTH)[name] < 2.0


def test_too_few_requests_are_rejected() -> None:
    with pytest.raises(CalibrationError, match=rf"cannot fit 5 of 180 requests: at least {MIN_FITTED}"):
        fit_step_time(run("light"), 5, LIMITS)


def test_measurements_that_show_no_decode_step_are_rejected() -> None:
    only_prefills = [measured_request(output_tokens=1, last_token_at=10.5)] * 30
    with pytest.raises(CalibrationError, match="decode steps are not observed"):
        fit_step_time(only_prefills, 30, LIMITS)


def test_measurements_that_show_no_prefill_are_rejected() -> None:
    no_prefills = [measured_request(scheduled_at=10.5)] * 30
    with pytest.raises(CalibrationError, match="prefills are not observed"):
        fit_step_time(no_prefills, 30, LIMITS)


@pytest.fixture
def real_requests() -> list[MeasuredRequest]:
    if not REAL.exists():
        pytest.skip("the measured run lies beside the project, not in it")
    return read_measurements(REAL).requests


def assert_predicted(requests: list[MeasuredRequest], step_time: StepTimeModel, unseen: slice) -> None:
    settings = load_profile("llama31-8b-rtx4090-tp1").model_settings()
    played = replay(requests, settings, step_time, part=unseen)
    for accuracy in compare(played, measured(requests[unseen])).values():
        assert abs(accuracy.errors.mean) < 0.03
        assert abs(accuracy.errors.p50) < 0.03
        assert abs(accuracy.errors.p90) < 0.05


def test_a_real_engine_is_predicted_from_its_timestamps_alone(real_requests: list[MeasuredRequest]) -> None:
    settings = load_profile("llama31-8b-rtx4090-tp1").model_settings()
    step_time = fit_step_time(real_requests, 200, settings)
    assert_predicted(real_requests, step_time, slice(200, None))


def test_the_profile_of_that_engine_is_as_accurate_as_stated(real_requests: list[MeasuredRequest]) -> None:
    step_time = load_profile("llama31-8b-rtx4090-tp1").step_time
    assert_predicted(real_requests, step_time, slice(200, None))
