import json
from pathlib import Path

import pytest

from serve_app.calibration.measurements import CalibrationError, read_measurements
from tests.calibration.builders import as_row, measured_request, write_rows


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
        ("{}", "queued_ts is missing or no number"),
        (row(first_token_ts=None), "first_token_ts is missing or no number"),
        (row(input_toks="12"), "input_toks is missing or no number"),
        (row(output_toks=True), "output_toks is missing or no number"),
        (row(output_toks=1.5), "output_toks is no whole number"),
        (row(input_toks=float("inf")), "input_toks is no whole number"),
        (row(input_toks=0), "a token count is below 1"),
        (row(queued_ts=float("nan")), "an instant is not finite"),
        (row(scheduled_ts=9.0), "its instants are out of order"),
        (row(last_token_ts=10.1), "its instants are out of order"),
        (row(last_token_ts=10.5), "it generated several tokens in no time"),
        (row(queued_ts=10**400), "int too large to convert to float"),
    ],
)
def test_a_row_that_cannot_be_read_is_counted_with_its_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [measured_request()], line, line, "")
    measurements = read_measurements(path)
    assert len(measurements.requests) == 1
    assert measurements.skipped == {reason: 2}


def test_a_file_without_one_readable_row_is_refused_with_its_reasons(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{\n[]\n")
    with pytest.raises(CalibrationError, match=r"no readable request: it is not JSON, it is not an object"):
        read_measurements(path)
    path.write_text("")
    with pytest.raises(CalibrationError, match="the file is empty"):
        read_measurements(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"cannot read .*none.jsonl: No such file"):
        read_measurements(tmp_path / "none.jsonl")
