import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import main
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from tests.core.metrics.test_summary import FIGURES, SIZES
from tests.lab.bench.live import emulated_endpoint


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with emulated_endpoint(EmulatedEngineSettings(served_model_names=("small-model",))) as url:
        yield url


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    rows = [f"{place / 50},{20 + 40 * place},{2 + place % 3},tenant-{place % 2}" for place in range(12)]
    path.write_text("\n".join(("arrival_s,prompt_tokens,output_tokens,tenant", *rows, "oops,1,1,x")))
    return str(path)


def bench(*arguments: str) -> int:
    return main(["bench", *arguments])


def test_a_run_writes_the_json_of_the_contract_with_its_provenance(
    url: str, trace: str, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "run.json"
    assert bench("--url", url, "--trace", trace, "--rate", "40", "--json", str(out), "--api-key", "hush") == 0
    document: dict[str, Any] = json.loads(out.read_text())
    (run,) = document["runs"]
    assert run["metrics"]["completed"] == 12
    for name in ("ttft_s", "tpot_s", "e2e_s", "queue_wait_s"):
        assert set(run["metrics"][name]) == SIZES
        assert set(run["metrics"][name]["all"]) == FIGURES
    assert run["metrics"]["preemptions"] == 0
    assert run["client"]["wrong_length"] == 0
    assert set(document["provenance"]) >= {"commit", "settings", "trace", "seeds", "hardware", "load_average"}
    assert document["provenance"]["trace"]["skipped_rows"] == {"arrival_s is not a number": 1}
    assert document["provenance"]["settings"]["rate"] == 40
    assert "hush" not in out.read_text()


def test_the_table_is_on_standard_output_and_omissions_on_standard_error(
    url: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--url", url, "--trace", trace) == 0
    out, err = capsys.readouterr()
    assert re.search(r"\| requests completed +\| +12 \|", out)
    assert re.search(r"\| TTFT +\| short +\|", out)
    assert "1 rows skipped: arrival_s is not a number (first: line 14)" in err


def test_records_are_written_on_demand(url: str, trace: str, tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    assert bench("--url", url, "--trace", trace, "--records", str(records)) == 0
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert len({row["request_id"] for row in rows}) == 12
    assert rows[0]["arrived_at"] == 0.0
    assert [row["prompt_tokens"] for row in rows] == [20 + 40 * place for place in range(12)]
    assert [row["tenant"] for row in rows[:2]] == ["tenant-0", "tenant-1"]


def test_text_bodies_whole_answers_and_completions_work_as_well(url: str, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    status = bench(
        *("--url", f"{url}/v1", "--trace", "paper-mix", "--requests", "5", "--rate", "50", "--body", "text"),
        *("--no-stream", "--endpoint", "completions", "--ignore-eos", "--json", str(out)),
    )
    assert status == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["metrics"]["completed"] == 5
    assert run["metrics"]["ttft_s"]["all"]["mean"] is None
    assert run["client"]["wrong_length"] == 0


def test_the_warm_up_is_sent_but_not_counted(url: str, trace: str, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    assert bench("--url", url, "--trace", trace, "--warm-up-s", "0.11", "--json", str(out)) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["metrics"]["completed"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "other"), "does not serve 'other': it serves small-model"),
        (("--max-tokens", "-5"), "max_tokens must not be negative, got -5"),
        (("--seed", "-1"), "seed must not be negative, got -1"),
        (("--tenants", "none"), "cannot parse shares 'none'"),
        (("--max-in-flight", "99999999"), "open files"),
    ],
)
def test_invalid_input_is_rejected_in_one_line_with_the_value(
    url: str, trace: str, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--url", url, "--trace", trace, *arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.splitlines()[-1].startswith("bench: ")


def test_an_endpoint_that_is_not_there_is_named(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--url", "http://127.0.0.1:1", "--trace", trace) == 2
    assert "cannot reach http://127.0.0.1:1/v1/models" in capsys.readouterr().err


def test_a_run_in_which_nothing_completes_is_no_success(url: str, tmp_path: Path) -> None:
    long = tmp_path / "long.csv"
    long.write_text("arrival_s,prompt_tokens,output_tokens\n0,900000,5\n")
    out = tmp_path / "run.json"
    assert bench("--url", url, "--trace", str(long), "--bytes-per-token", "0.25", "--json", str(out)) == 1
    (run,) = json.loads(out.read_text())["runs"]
    assert sum(run["outcomes"].values()) == 1
    assert "completed" not in run["outcomes"]
