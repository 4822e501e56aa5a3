import json
from pathlib import Path

import pytest

from serve_app.cli import main
from serve_app.engines.model.roofline import load_profile
from tests.lab.calibration.builders import engine_run, write_rows

LIMITS = ["--kv-tokens", "20000", "--max-model-len", "4096"]


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
    assert calibrate(rows, out, *LIMITS, "--fit-first", "40", "--json", str(document)) == 0
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
        ([*LIMITS, "--fit-first", "55"], "cannot fit 55 of 60 readable requests"),
        ([*LIMITS, "--fit-first", "19"], "at least 20 are needed for the fit"),
        (["--kv-tokens", "20000", "--max-model-len", "500"], "more than max_model_len 500: raise"),
        (["--kv-tokens", "3000", "--max-model-len", "4096"], "does not fit into the KV cache"),
        ([*LIMITS, "--json", "/nowhere/at/all.json"], "directory /nowhere/at does not exist"),
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
    assert calibrate(rows, tmp_path / "mine.json", *LIMITS) == 2
    assert "must end in .yaml" in capsys.readouterr().err
