"""Calibration of the twin's engines, and reasons that block a search."""

import json
from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.metrics.record import RequestRecord
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.lab.calibration import FittedEngine
from serve_app.tuning.digital_twin import CalibrationSettings, TrafficLog, TwinCalibration
from serve_app.tuning.engine_fit import EngineFitResult, TwinError
from tests.builders import spec
from tests.core.metrics.builders import record

SETTINGS = CalibrationSettings(first_requests=20, check_requests=10, every_s=30.0)
REPLICAS = [spec("r1", "only", max_model_len=8_192, kv_tokens=32_768, max_num_seqs=16)]
MODEL = FittedEngine(
    step_time=StepTimeModel(
        decode_base_s=0.01, decode_per_sequence_s=0.001, prefill_base_s=0.01, prefill_per_token_s=0.0001
    ),
    latency_s=0.004,
)


def answers(count: int, start: float = 0.0, **changes: Any) -> list[RequestRecord]:
    return [
        record(
            request_id=f"{start}-{number}",
            arrived_at=start,
            dispatched_at=start,
            first_token_at=start + 0.1,
            finished_at=start + 1.0,
            replica="r1",
            **changes,
        )
        for number in range(count)
    ]


def result(error: float | None, engines: bool = True) -> EngineFitResult:
    twin_error = None if error is None else TwinError(ttft_ratio=error, tpot_ratio=0.0, requests=10)
    return EngineFitResult(
        engines={"only": MODEL} if engines else None, error=twin_error, until=5.0, requests=0
    )


def fed(calibration: TwinCalibration, count: int, traffic: TrafficLog, **changes: Any) -> None:
    new = answers(count, **changes)
    for each in new:
        traffic.add(each)
    calibration.note(new)


def test_without_a_profile_it_fits_first_and_waits_for_the_error() -> None:
    made, traffic = TwinCalibration(SETTINGS, None), TrafficLog()
    assert made.engines(REPLICAS) is None
    fed(made, 19, traffic)
    assert made.due(traffic, REPLICAS, 10.0, 10.0) is None
    assert "fitted after 20 streamed responses (19 so far)" in made.obstacle
    fed(made, 1, traffic)
    task = made.due(traffic, REPLICAS, 10.0, 10.0)
    assert task is not None
    assert (len(task.records), task.current, task.is_fitted) == (20, {}, False)
    fed(made, 20, traffic)
    made.finish(result(None), 12.0)
    assert "measured after 10 more streamed responses" in made.obstacle
    assert made.due(traffic, REPLICAS, 10.0, 41.0) is None
    check = made.due(traffic, REPLICAS, 10.0, 42.0)
    assert check is not None
    assert (check.current, check.fitted_until, check.is_fitted) == ({"only": MODEL}, 5.0, True)
    made.finish(result(0.04, engines=False), 43.0)
    assert made.obstacle == ""
    (plan,) = made.engines(REPLICAS) or ()
    assert plan.step_time == MODEL.step_time
    assert made.latency_s == MODEL.latency_s / 2


def test_a_replica_of_another_speed_has_its_own_step_times() -> None:
    made, traffic = TwinCalibration(SETTINGS, None), TrafficLog()
    slow = replace(MODEL, step_time=MODEL.step_time.scaled(3.0))
    known = {"only": MODEL, "r2": slow}
    made.finish(replace(result(None), engines={**known, "gone": slow}), 1.0)
    replicas = [*REPLICAS, replace(REPLICAS[0], replica_id="r2")]
    assert [plan.step_time for plan in made.engines(replicas) or ()] == [MODEL.step_time, slow.step_time]
    fed(made, 20, traffic)
    task = made.due(traffic, replicas, 100.0, 100.0)
    assert task is not None
    assert task.current == known


def test_a_large_error_is_an_obstacle_until_a_small_one_is_measured() -> None:
    made, traffic = TwinCalibration(SETTINGS, "laptop"), TrafficLog()
    # A profile is trusted until a check fails.
    assert made.obstacle == ""
    fed(made, 10, traffic)
    assert made.due(traffic, REPLICAS, 10.0, 0.0) is not None
    made.finish(result(-0.4), 1.0)
    assert "the error of the twin exceeds 15%: mean TTFT -40%, TPOT +0% against 10 requests" in made.obstacle
    fed(made, 10, traffic)
    assert made.due(traffic, REPLICAS, 10.0, 100.0) is not None
    made.finish(result(0.14, engines=False), 101.0)
    assert made.obstacle == ""
    assert made.source() == "fitted to the engines (once)"


def test_engines_that_no_fit_describes_are_fitted_less_and_less_often() -> None:
    made, traffic = TwinCalibration(SETTINGS, None), TrafficLog()
    at, waits = 10.0, []
    for error in (None, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.01, 0.5):
        fed(made, 20, traffic)
        assert made.due(traffic, REPLICAS, at, at) is not None
        made.finish(result(error), at)
        fed(made, 20, traffic)
        ended_at = at
        while made.due(traffic, REPLICAS, at, at) is None:
            at += 30.0
        waits.append(at - ended_at)
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 480.0, 480.0, 30.0, 60.0]


def test_answers_that_show_no_pace_do_not_count() -> None:
    made, traffic = TwinCalibration(SETTINGS, None), TrafficLog()
    fed(made, 30, traffic, output_tokens=1)
    assert made.due(traffic, REPLICAS, 10.0, 10.0) is None


def test_the_limits_are_those_that_the_replica_states() -> None:
    made = TwinCalibration(SETTINGS, "laptop")
    (plan,) = made.engines(REPLICAS) or ()
    assert (plan.engine.kv_tokens, plan.engine.max_num_seqs) == (32_768, 16)
    # The profile applies where the replica reports nothing.
    assert plan.engine.max_num_batched_tokens == 1_024
    assert plan.engine.long_prefill_token_threshold == plan.step_time.chunk_tokens()
    stated = replace(REPLICAS[0], kv_tokens=4_096, max_num_batched_tokens=512, long_prefill_token_threshold=0)
    (plan,) = made.engines([stated]) or ()
    assert (plan.engine.max_num_batched_tokens, plan.engine.long_prefill_token_threshold) == (512, 0)
    # A context that exceeds the cache is cut.
    assert plan.engine.max_model_len == 4_096


def test_a_restart_preserves_the_step_times_and_measures_their_error_again() -> None:
    made, traffic = TwinCalibration(SETTINGS, None), TrafficLog()
    fed(made, 20, traffic)
    made.due(traffic, REPLICAS, 10.0, 10.0)
    made.finish(result(None), 12.0)
    again = TwinCalibration(SETTINGS, None)
    again.restore(json.loads(json.dumps(made.state())))
    assert again.engines(REPLICAS) == made.engines(REPLICAS)
    assert again.source() == "fitted to the engines (before a restart)"
    assert "is measured after 10 more" in again.obstacle
    with pytest.raises(ValueError, match="invalid step times"):
        again.restore({"only": {"latency_s": 0.1}})
    assert again.engines(REPLICAS) == made.engines(REPLICAS)
