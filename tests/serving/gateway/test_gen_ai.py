"""Server metrics of OpenTelemetry's conventions for generative AI, on `/metrics` and at an OTLP collector."""

from typing import Any

import pytest
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from prometheus_client.parser import text_string_to_metric_families

from serve_app.errors import SettingsError
from serve_app.serving.gateway.request_log import INSTRUMENTS
from serve_app.serving.gateway.tracing.request_trace import check_tracing
from tests.serving.channel.harness import wait_until

from .builders import MODEL, Engine, chat, error_json, replies
from .fleet import Fleet, fleet_of
from .tracing.collector import Collector
from .tracing.conftest import collector

__all__ = ["collector"]

CHAT = "/v1/chat/completions"
OF_CHATS = {
    "gen_ai_operation_name": "chat",
    "gen_ai_provider_name": "ewsjf",
    "gen_ai_request_model": MODEL,
    "error_type": "",
}


async def counts(fleet: Fleet, **labels: str) -> dict[str, float]:
    """Return the counts of the histograms with these labels, by the end of their names."""
    found = {}
    for family in text_string_to_metric_families((await fleet.http.get("/metrics")).text):
        for sample in family.samples:
            of_gateway = {name: value for name, value in sample.labels.items() if name != "gateway"}
            if sample.name.startswith("gen_ai_server_") and of_gateway == {**OF_CHATS, **labels}:
                found[sample.name.removeprefix("gen_ai_server_")] = sample.value
    return {name: value for name, value in found.items() if name.endswith("_count")}


def failing() -> Engine:
    engine = Engine()
    engine.answers.append(replies(400, error_json("no")))
    return engine


def test_names_are_those_of_the_conventions() -> None:
    theirs = {value for value in vars(gen_ai_metrics).values() if isinstance(value, str)}
    assert {each.name for each in INSTRUMENTS} <= theirs


async def test_the_page_has_the_durations_of_streams_and_whole_answers() -> None:
    async with fleet_of([Engine()]) as fleet:
        for body in (chat(stream=True, max_tokens=3), chat(stream=True, max_tokens=1), chat()):
            assert (await fleet.http.post(CHAT, json=body)).status_code == 200
        assert await counts(fleet) == {
            "request_duration_seconds_count": 3,
            "time_to_first_token_seconds_count": 2,
            # A stream of one token has no time between tokens.
            "time_per_output_token_seconds_count": 1,
        }


async def test_an_error_is_counted_with_its_type_and_without_token_times() -> None:
    async with fleet_of([failing()]) as fleet:
        assert (await fleet.http.post(CHAT, json=chat(stream=True))).status_code == 400
        assert (await fleet.http.post(CHAT, json={"model": MODEL})).status_code == 400
        error = {"error_type": "rejected_invalid"}
        assert await counts(fleet, **error) == {"request_duration_seconds_count": 1}
        assert await counts(fleet) == {}


async def test_a_collector_receives_what_the_page_has(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "60000")
    async with fleet_of([Engine()], tracing=True) as fleet:
        for _ in range(3):
            await fleet.http.post(CHAT, json=chat(stream=True, max_tokens=3))
        await wait_until(lambda: not fleet.gateway.open_requests)
    # The end of the gateway exports them.
    attributes = {name.replace("_", ".", 2): value for name, value in OF_CHATS.items() if value}
    named = {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"}
    for instrument in INSTRUMENTS:
        key = (instrument.name, frozenset(zip(sorted(named), attributes.values(), strict=True)))
        found = collector.histograms[key]
        assert (found.count, found.bounds_s) == (3, instrument.bounds_s)
        assert found.resource["service.name"] == "ewsjf-gateway"


async def test_metrics_are_exported_only_if_a_variable_asks_for_it(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("OTEL_METRICS_EXPORTER", "none"), ("OTEL_SDK_DISABLED", "true"), ("X", "")):
        monkeypatch.setenv(name, value)
        async with fleet_of([Engine()], tracing=True) as fleet:
            await fleet.http.post(CHAT, json=chat())
        monkeypatch.delenv(name)
    assert collector.histograms == {}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OTEL_METRICS_EXPORTER": "console"}, "OTEL_METRICS_EXPORTER is 'console': use otlp or none"),
        (
            {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL is 'grpc'",
        ),
    ],
)
def test_other_exporters_fail_at_the_start(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, Any], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=message):
        check_tracing()
