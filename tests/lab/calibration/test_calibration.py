"""Calibration: fits to runs of the engine model and to a real engine, and the command `calibrate`."""

import functools
import json
from dataclasses import asdict, astuple, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from experiments.common.load_test.open_loop import BodySettings, all_completed, play_trace
from serve_app.cli import main
from serve_app.core.metrics.record import RequestRecord
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.engines.model.roofline import load_profile
from serve_app.engines.model.step_time import StepTimeModel, attended_pairs
from serve_app.lab.calibration import (
    EXPECTED_REPLAYS,
    MIN_FITTED,
    CalibrationError,
    Floats,
    MeasuredRequest,
    Timings,
    compare,
    fit_step_time,
    initial_coefficients,
    measured,
    read_measurements,
    replay,
)
from serve_app.lab.workloads import TraceChoice, resolve, scale_to_rate
from tests.engines.emulated.endpoint import emulated_endpoint
from tests.lab.calibration.builders import (
    LIMITS,
    TRUTH,
    as_result,
    as_row,
    engine_run,
    measured_request,
    write_rows,
)

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


# -- replays of measurements ------------------------------------------------------------------------------


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


# -- `calibrate` on timestamps of an engine, and on results of `vllm bench serve` -------------------------

# Of vLLM 0.32.0 at an emulated engine.
RECORDED = Path(__file__).parent / "vllm-bench-0.32.0.json"


def test_requests_are_read_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    late, early = measured_request(queued_at=10.0), measured_request(queued_at=9.0, output_tokens=1)
    measurements = read_measurements(write_rows(tmp_path / "rows.jsonl", [late, early]))
    assert measurements.requests == [early, late]
    assert not measurements.skipped


def row(**changes: object) -> str:
    return json.dumps(as_row(measured_request()) | changes)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "it is not JSON"),
        ("[1]", "it is not an object"),
        ("{}", "queued_ts is missing or not a number"),
        (row(first_token_ts=None), "first_token_ts is missing or not a number"),
        (row(input_toks="12"), "input_toks is missing or not a number"),
        (row(output_toks=True), "output_toks is missing or not a number"),
        (row(output_toks=1.5), "output_toks is not a whole number"),
        (row(input_toks=float("inf")), "input_toks is not a whole number"),
        (row(input_toks=0), "a token count is below 1"),
        (row(queued_ts=float("nan")), "a timestamp is not finite"),
        (row(scheduled_ts=9.0), "its timestamps are out of order"),
        (row(last_token_ts=10.1), "its timestamps are out of order"),
        (row(last_token_ts=10.5), "it generated several tokens at the same time"),
        (row(queued_ts=10**400), "int too large to convert to float"),
    ],
)
def test_a_row_that_cannot_be_read_is_counted_with_its_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [measured_request()], line, line, "")
    measurements = read_measurements(path)
    assert len(measurements.requests) == 1
    assert measurements.skipped == {reason: 2}


def test_a_file_without_one_readable_row_is_rejected_with_its_reasons(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{\n[]\n")
    with pytest.raises(CalibrationError, match=r"no valid request: it is not JSON, it is not an object"):
        read_measurements(path)
    path.write_text("")
    with pytest.raises(CalibrationError, match="the file is empty"):
        read_measurements(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"cannot read .*none.jsonl: No such file"):
        read_measurements(tmp_path / "none.jsonl")


def test_a_load_test_of_an_engine_gives_its_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, out = tmp_path / "result.json", tmp_path / "out" / "mine.yaml"
    engine = EmulatedEngineSettings(served_model_names=("m",), profile="laptop")
    trace = scale_to_rate(resolve(TraceChoice(name="paper-mix", requests=40), 0), 15.0)
    with emulated_endpoint(engine) as url:
        records = all_completed(play_trace(url, BodySettings(model="m"), trace))
    result.write_text(as_result([as_client_measures(record) for record in records]))
    limits = ["--kv-tokens", "60000", "--max-model-len", "8192"]
    assert main(["calibrate", "--measurements", str(result), "--out", str(out), *limits]) == 0
    assert load_profile(str(out)).step_time.decode_base_s > 0
    shown = capsys.readouterr()
    assert "13 held-out requests (of 40)" in shown.out
    assert "the timestamps are those of a client" in shown.err


def as_client_measures(record: RequestRecord) -> MeasuredRequest:
    assert record.sent_at is not None
    assert record.first_token_at is not None
    return MeasuredRequest(
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        queued_at=record.sent_at,
        scheduled_at=record.sent_at,
        first_token_at=record.first_token_at,
        last_token_at=record.finished_at,
    )


def write_result(path: Path, *requests: MeasuredRequest, **changes: object) -> Path:
    path.write_text(as_result(list(requests), **changes))
    return path


def test_a_result_of_vllm_is_read_in_the_order_of_sending(tmp_path: Path) -> None:
    late, early = measured_request(), measured_request(queued_at=9.0, scheduled_at=9.0, output_tokens=6)
    found = read_measurements(write_result(tmp_path / "result.json", late, early)).requests
    for one, expected in zip(found, (early, late), strict=True):
        assert astuple(one) == pytest.approx(astuple(expected))


def test_a_recorded_result_of_vllm_is_read() -> None:
    measurements = read_measurements(RECORDED)
    written = json.loads(RECORDED.read_text())
    assert (len(measurements.requests), measurements.skipped) == (written["completed"], {})
    assert sum(one.output_tokens for one in measurements.requests) == written["total_output_tokens"]
    ttfts_ms = [1_000 * (one.first_token_at - one.queued_at) for one in measurements.requests]
    assert fmean(ttfts_ms) == pytest.approx(written["mean_ttft_ms"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"errors": ["Service Unavailable", ""]}, "it was not completed"),
        ({"itls": [[], [1.0]]}, "it generated several tokens at the same time"),
        ({"itls": [3, [1.0]]}, "itls is not a list of numbers"),
        ({"ttfts": ["late", 0.5]}, "ttfts is missing or not a number"),
    ],
)
def test_unusable_requests_of_a_result_are_counted_with_their_reason(
    changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = write_result(tmp_path / "result.json", measured_request(), measured_request(), **changes)
    measurements = read_measurements(path)
    assert (len(measurements.requests), measurements.skipped) == (1, {reason: 1})


def test_a_result_without_details_is_rejected_with_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    path.write_text('{"completed": 300, "request_throughput": 4.0}')
    assert main(["calibrate", "--measurements", str(path), "--out", str(tmp_path / "mine.yaml")]) == 2
    message = capsys.readouterr().err
    assert f"{path} has no start_times, ttfts, itls, input_lens, output_lens, errors" in message
    assert "run `vllm bench serve` with --save-detailed" in message


# -- output and files of `calibrate` ----------------------------------------------------------------------

LIMIT_ARGUMENTS = ["--kv-tokens", "20000", "--max-model-len", "4096"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    requests = engine_run(60, per_s=0.6)
    return write_rows(tmp_path_factory.mktemp("measured") / "rows.jsonl", requests, "{", "[]")


def calibrate(measurements: Path, out: Path, *more: str) -> int:
    return main(["calibrate", "--measurements", str(measurements), "--out", str(out), *more])


def test_it_writes_a_profile_and_the_errors_on_unseen_requests(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, document = tmp_path / "mine.yaml", tmp_path / "mine.json"
    assert calibrate(rows, out, *LIMIT_ARGUMENTS, "--fit-first", "40", "--json", str(document)) == 0
    profile = load_profile(str(out))
    assert (profile.kv_tokens, profile.max_model_len, profile.max_num_seqs) == (20_000, 4_096, 256)
    assert 0.018 < profile.step_time.decode_base_s < 0.022
    assert "to the first 40 of 60 requests in rows.jsonl" in out.read_text()
    found = json.loads(document.read_text())
    assert found["profile"]["step_time"]["decode_base_s"] == profile.step_time.decode_base_s
    assert set(found["errors"]) == {"ttft_s", "tpot_s", "e2e_s"}
    for metric, errors in found["errors"].items():
        assert set(errors) == {"mean", "p50", "p90", "p99"}
        measured, played = found["measured"][metric]["mean"], found["played"][metric]["mean"]
        assert errors["mean"] == pytest.approx(played / measured - 1)
        assert abs(errors["mean"]) < 0.1
    assert found["requests"] == {
        "fitted": 40,
        "unseen": 20,
        "skipped": {"it is not JSON": 1, "it is not an object": 1},
    }
    written = capsys.readouterr()
    assert "20 held-out requests (of 60)" in written.out
    assert "1 row skipped: it is not JSON" in written.err


def test_without_a_split_two_thirds_are_fitted_and_limits_come_from_a_profile(
    rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mine.yaml"
    assert calibrate(rows, out, "--profile", "laptop", "--kv-tokens", "20000", "--gpus", "2") == 0
    profile = load_profile(str(out))
    assert (profile.kv_tokens, profile.gpus) == (20_000, 2)
    assert profile.max_num_seqs == load_profile("laptop").max_num_seqs
    assert "to the first 40 of 60" in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "the engine's kv_tokens is unknown: pass --kv-tokens, or --profile NAME"),
        (["--kv-tokens", "20000"], "max_model_len is unknown: pass --max-model-len"),
        (["--profile", "gpt"], "no engine profile 'gpt'"),
        ([*LIMIT_ARGUMENTS, "--fit-first", "55"], "cannot fit 55 of 60 readable requests"),
        ([*LIMIT_ARGUMENTS, "--fit-first", "19"], "at least 20 are needed for the fit"),
        (["--kv-tokens", "20000", "--max-model-len", "500"], "more than max_model_len 500: raise"),
        (["--kv-tokens", "3000", "--max-model-len", "4096"], "does not fit into the KV cache"),
        ([*LIMIT_ARGUMENTS, "--json", "/nowhere/at/all.json"], "directory /nowhere/at does not exist"),
    ],
)
def test_invalid_input_is_rejected_in_one_line(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    out = tmp_path / "mine.yaml"
    assert calibrate(rows, out, *arguments) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("calibrate: ")
    assert complaint in last
    assert not out.exists()


def test_a_profile_that_could_not_be_found_again_is_rejected(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(rows, tmp_path / "mine.json", *LIMIT_ARGUMENTS) == 2
    assert "must end in .yaml" in capsys.readouterr().err
