"""`calibrate` on what `bench --records` writes."""

import json
from pathlib import Path

import pytest

from serve_app.calibration.measurements import CalibrationError, read_measurements
from serve_app.cli import main
from serve_app.engine_model.profiles import load_profile
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from tests.bench.live import emulated_endpoint
from tests.calibration.builders import as_record, measured_request


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
    assert "13 requests that were not fitted (of 40)" in shown.out
    assert "the timestamps are a client's" in shown.err


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
        ({"finished_at": "late"}, "finished_at is missing or no number"),
    ],
)
def test_records_that_tell_nothing_are_counted_with_their_reason(
    changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    request = measured_request()
    path = write_records(tmp_path / "records.jsonl", as_record(request), as_record(request, **changes))
    assert read_measurements(path).skipped == {reason: 1}


def test_a_profile_is_fitted_to_one_replica(tmp_path: Path) -> None:
    request = measured_request()
    rows = [as_record(request), as_record(request, replica="l1"), as_record(request)]
    path = write_records(tmp_path / "records.jsonl", *rows)
    with pytest.raises(CalibrationError, match=r"of 2 replicas.*--replica one of s1 \(2 requests\), l1 \(1"):
        read_measurements(path)
    assert len(read_measurements(path, "s1").requests) == 2
    with pytest.raises(CalibrationError, match=r"no requests of replica 's9', but of s1"):
        read_measurements(path, "s9")
