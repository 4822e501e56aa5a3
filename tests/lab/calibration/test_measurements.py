"""`calibrate` on timestamps of an engine, and on results of `vllm bench serve`."""

import json
from dataclasses import astuple
from pathlib import Path
from statistics import fmean

import pytest

from experiments.common.load_test.open_loop import BodySettings, all_completed, play_trace
from serve_app.cli import main
from serve_app.core.metrics.record import RequestRecord
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.engines.model.roofline import load_profile
from serve_app.lab.calibration import CalibrationError, MeasuredRequest, read_measurements
from serve_app.lab.workloads import WorkloadSettings, resolve
from tests.engines.emulated.endpoint import emulated_endpoint
from tests.lab.calibration.builders import as_result, as_row, measured_request, write_rows

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
    trace = resolve(WorkloadSettings(trace="paper-mix", rate_per_s=15.0, requests=40))
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
