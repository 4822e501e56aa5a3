"""`bench --report`: the page agrees with the JSON output, for one endpoint and for two."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import main
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from tests.lab.bench.live import emulated_endpoint
from tests.lab.reports.parsed import ParsedReport

TENANTS = "<i>search</i>=3,chat=1"
LOAD = ("--trace", "paper-mix", "--requests", "120", "--rate", "60", "--tenants", TENANTS)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with emulated_endpoint(EmulatedEngineSettings(served_model_names=("small-model",))) as url:
        yield url


def bench(tmp_path: Path, *arguments: str) -> tuple[ParsedReport, dict[str, Any]]:
    page, out = tmp_path / "r.html", tmp_path / "r.json"
    assert main(["bench", *LOAD, *arguments, "--report", str(page), "--json", str(out)]) == 0
    return ParsedReport(page.read_text()), json.loads(out.read_text())


def test_the_figures_of_an_endpoint_are_those_of_the_json_output(url: str, tmp_path: Path) -> None:
    page, found = bench(tmp_path, "--url", url, "--api-key", "hush")
    (run,) = found["runs"]
    table = page.table("Latencies in milliseconds")
    rows = {(row[0], row[1]): number for number, row in enumerate(table.texts)}
    for name, latency in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("end to end", "e2e_s")):
        for size in ("all", "short", "long"):
            texts, values = table.texts[rows[name, size]], table.values[rows[name, size]]
            expected = run["metrics"][latency][size]
            assert values[2:] == [
                pytest.approx(expected[each]) for each in ("mean", "p50", "p95", "p99", "max")
            ]
            if size == "all":
                # 120 requests suffice for an interval of every figure but the maximum.
                assert ["±" in text for text in texts[2:]] == [True, True, True, True, False]
    assert page.table("Whole run").column("value")["requests completed"] == 120
    assert page.table("TTFT of tenants").column("requests")["<i>search</i>"] == pytest.approx(90, abs=25)
    assert (
        f"100.0 % of 120 requests were completed; {100 * run['slo']['attainment_ratio']:.1f} %" in page.text
    )
    assert "Use --compare to compare the endpoint" in page.text


def test_a_key_is_nowhere_in_a_report(url: str, tmp_path: Path) -> None:
    page, found = bench(tmp_path, "--url", url, "--api-k", "hush", "--compare-api-key=whisper")
    assert "--api-k ... --compare-api-key=..." in page.text
    for secret in ("hush", "whisper"):
        assert secret not in (tmp_path / "r.html").read_text()
        assert secret not in json.dumps(found)


def test_too_few_requests_have_no_interval(url: str, tmp_path: Path) -> None:
    page, _ = bench(tmp_path, "--url", url, "--requests", "8")
    assert not any("±" in text for row in page.table("Latencies in milliseconds").texts for text in row)


@pytest.mark.slow
def test_two_endpoints_are_compared_by_their_differences(url: str, tmp_path: Path) -> None:
    slow = EmulatedEngineSettings(served_model_names=("small-model",), speed_up=0.4)
    with emulated_endpoint(slow) as other:
        page, found = bench(tmp_path, "--url", url, "--compare", other, "--slice-s", "0.25")
    differences = page.table("B against A")
    ttft = found["comparison"]["latencies"]["ttft_s"]
    for name, shown in (("mean", "mean"), ("p50", "median"), ("p99", "P99")):
        figures = ttft[name]
        for heading, key in (("A", "base"), ("B", "other"), ("difference", "difference")):
            assert differences.column(heading)[f"{shown} TTFT"] == pytest.approx(figures[key])
    (tpot,) = [row for row in differences.texts if row[0] == "mean TPOT"]
    assert tpot[1] == "worse"
    assert found["comparison"]["latencies"]["tpot_s"]["mean"]["is_clear"]
    assert "B against A is worse in" in page.text
    assert other in page.text
    assert page.table("Outcomes of the requests").column("completed") == {"A": 120.0, "B": 120.0}


@pytest.mark.slow
def test_an_endpoint_compared_with_itself_is_not_called_better_or_worse(url: str, tmp_path: Path) -> None:
    page, found = bench(tmp_path, "--url", url, "--compare", url, "--slice-s", "0.25")
    clear = {
        name
        for latency in found["comparison"]["latencies"].values()
        for name, each in latency.items()
        if each["is_clear"]
    }
    judged = {row[1] for row in page.table("B against A").texts[1:]}
    assert judged <= {"no clear difference", "better", "worse"}
    # One in twenty figures may look clear by chance; the verdict must match the figures.
    assert bool(clear) == bool(judged & {"better", "worse"})
