"""Span export: a collector that is gone or rejects spans harms no request; impossible settings fail early."""

import asyncio
import logging
import subprocess
import sys
import time

import pytest

from serve_app.errors import SettingsError
from serve_app.serving.gateway.tracing.request_trace import check_tracing, make_tracer
from tests.serving.channel.harness import wait_until

from ..builders import Engine, FakeDispatcher, chat, gateway
from ..fleet import fleet_of
from .collector import Collector

CHAT = "/v1/chat/completions"


async def test_a_collector_that_is_gone_costs_nothing_but_its_spans(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.2")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    # The exporter retries until its timeout.
    collector.status = 503
    async with fleet_of([Engine()], tracing=True) as fleet:
        for _ in range(20):
            answer = await fleet.http.post(CHAT, json=chat(stream=True))
            assert answer.text.endswith("data: [DONE]\n\n")
        await wait_until(lambda: "event=traces_lost" in caplog.text)
        collector.status = 200
        # On a busy machine, a collector that is back may still exceed the exporter's timeout.
        async with asyncio.timeout(30):
            while "event=traces_exported" not in caplog.text:
                await fleet.http.post(CHAT, json=chat())
                await asyncio.sleep(0.05)
    assert caplog.text.count("event=traces_lost") == 1


async def test_a_gateway_ends_in_time_without_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    app = gateway(FakeDispatcher([1]), tracing=True)
    began = time.monotonic()
    app.close()
    assert time.monotonic() - began < 4.0


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "TRUE"), ("OTEL_TRACES_EXPORTER", "none")])
def test_the_environment_switches_tracing_off(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert make_tracer("g") is None


def test_an_unknown_protocol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")
    with pytest.raises(SettingsError, match="OTLP_PROTOCOL is 'carrier-pigeon': use http/protobuf"):
        check_tracing()


def test_grpc_is_there_with_its_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    check_tracing()


def test_without_tracing_a_gateway_needs_no_opentelemetry() -> None:
    code = "import sys, serve_app.serving.gateway.app; print('opentelemetry.sdk.trace' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
