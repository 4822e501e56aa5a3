"""`calibrate` on the output of `bench --records`."""

import json
from pathlib import Path

import pytest

from serve_app.cli import main
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.engines.model.profiles import load_profile
from serve_app.lab.calibration.measurements import CalibrationError, read_measurements
from tests.lab.bench.live import emulated_endpoint
from tests.lab.calibration.builders import as_record, as_row, measured_request, write_rows


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


def write_records(path: Path, *records: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_load_test_of_an_engine_gives_its_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records, out = tmp_path / "records.jsonl", tmp_path / "out" / "mine.yaml"
    engine = EmulatedEngineSettings(served_model_names=("m",), profile="laptop")
    with emulated_endpoint(engine) as url:
        load = ["--trace", "paper-mix", "--rate", "15", "--requests", "40", "--records", str(records)]
        assert main(["bench", "--url", url, *load]) == 0
    limits = ["--kv-tokens", "60000", "--max-model-len", "8192"]
    assert main(["calibrate", "--measurements", str(records), "--out", str(out), *limits]) == 0
    assert load_profile(str(out)).step_time.decode_base_s > 0
    shown = capsys.readouterr()
    assert "13 held-out requests (of 40)" in shown.out
    assert "the timestamps are those of a client" in shown.err


def test_the_wait_in_our_own_queue_is_left_out(tmp_path: Path) -> None:
    request = measured_request()
    path = write_records(tmp_path / "records.jsonl", as_record(request))
    assert read_measurements(path).requests == [request]
    direct = write_records(tmp_path / "direct.jsonl", as_record(request, dispatched_at=None))
    assert read_measurements(direct).requests[0].queued_at == request.queued_at - 0.5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"outcome": "expired"}, "it was not completed"),
        ({"first_token_at": None}, "it has no first token, as without streaming"),
        ({"finished_at": "late"}, "finished_at is missing or not a number"),
    ],
)
def test_unusable_records_are_counted_with_their_reason(
    changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    request = measured_request()
    path = write_records(tmp_path / "records.jsonl", as_record(request), as_record(request, **changes))
    assert read_measurements(path).skipped == {reason: 1}


def test_a_profile_is_fitted_to_one_replica(tmp_path: Path) -> None:
    request = measured_request()
    rows = [as_record(request), as_record(request, replica="l1"), as_record(request)]
    path = write_records(tmp_path / "records.jsonl", *rows)
    with pytest.raises(CalibrationError, match=r"of 2 replicas.*--replica: s1 \(2 requests\), l1 \(1"):
        read_measurements(path)
    assert len(read_measurements(path, "s1").requests) == 2
    with pytest.raises(CalibrationError, match=r"no requests of replica 's9', only of s1"):
        read_measurements(path, "s9")
