"""Metrics in OpenMetrics format, as scraped for exemplars."""

import asyncio
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as read_text

from serve_app.serving.gateway.metrics_page import merge_openmetrics, prefers_openmetrics
from tests.serving.gateway.builders import Engine, chat
from tests.serving.gateway.fleet import fleet_of
from tests.serving.gateway.tracing.collector import Collector, collecting

# Sent by Prometheus 3.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TTFT = "ewsjf_gateway_time_to_first_token_seconds"
HISTOGRAMS = (TTFT, "ewsjf_gateway_e2e_seconds", "ewsjf_gateway_queue_wait_seconds")


def read_openmetrics(page: str) -> list[Metric]:
    return list(text_string_to_metric_families(page))  # type: ignore[no-untyped-call]


def samples_of(families: Any) -> dict[Any, float]:
    """Return all samples except creation times, which the two formats place in different metrics."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def test_both_formats_agree_and_exemplars_lead_to_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        async with fleet_of([Engine()], tracing=True) as fleet:
            for flags in ("01", "00"):
                headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-{flags}"}
                url, body = "/v1/chat/completions", chat(stream=True)
                assert (await fleet.http.post(url, json=body, headers=headers)).status_code == 200
            # Some metrics are counted after the client has read the answer.
            await asyncio.sleep(0.1)
            text = await fleet.http.get("/metrics", headers={"accept": "text/plain"})
            page = await fleet.http.get("/metrics", headers={"accept": PROMETHEUS})
    assert text.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert page.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert page.text.endswith("\n# EOF\n")
    families = read_openmetrics(page.text)
    as_openmetrics, as_text = samples_of(families), samples_of(read_text(text.text))
    assert as_openmetrics.keys() == as_text.keys()
    # Schedulers and gateways, counters and histograms.
    names = {key[0] for key in as_openmetrics}
    assert {"ewsjf_gateway_requests_total", "ewsjf_dispatches_total", f"{TTFT}_bucket"} <= names
    assert "# {" not in text.text
    by_name = {family.name: family for family in families}
    assert by_name["ewsjf_gateway_requests"].type == "counter"
    for name in HISTOGRAMS:
        exemplars = [sample.exemplar for sample in by_name[name].samples if sample.exemplar]
        assert [each.labels for each in exemplars] == [{"trace_id": TRACE}], name
        assert exemplars[0].value > 0
    assert collected(collector) == {TRACE}


def collected(collector: Collector) -> set[str]:
    return {kept.trace_id for kept in collector.spans}


def test_a_page_of_text_is_rewritten() -> None:
    page = (
        '# HELP hits_total Of the "door".\n# TYPE hits_total counter\nhits_total{a="x_created"} 3.0\n'
        '# HELP hits_created Of the door.\n# TYPE hits_created gauge\nhits_created{a="x_created"} 1.7e+09\n'
        "# TYPE odd counter\nodd 1\n# TYPE what untyped\nwhat 2\n\n# a remark\n# TYPE up gauge\nup 1\n"
    )
    made = merge_openmetrics("# TYPE own counter\nown_total 1.0\n", [page])
    families = {family.name: family for family in read_openmetrics(made)}
    assert {name: family.type for name, family in families.items()} == {
        "own": "counter",
        "hits": "counter",
        "odd": "unknown",
        "what": "unknown",
        "up": "gauge",
    }
    assert families["hits"].documentation == 'Of the "door".'
    assert [sample.value for sample in families["hits"].samples] == [3.0]


@pytest.mark.parametrize(
    ("accept", "does"),
    [
        (PROMETHEUS, True),
        ("application/openmetrics-text; version=1.0.0", True),
        ("Application/OpenMetrics-Text;q=0.5, */*;q=0.9", True),
        ("", False),
        ("*/*", False),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=many", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
    ],
)
def test_a_scraper_gets_its_preferred_format(accept: str, does: bool) -> None:
    assert prefers_openmetrics(accept.encode()) is does
