"""Faults of metrics, traces and logs while requests are served."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.engines.engine import Scope, Send
from serve_app.serving.gateway.request_log import RequestLog
from serve_app.serving.gateway.telemetry import Telemetry
from serve_app.serving.gateway.tracing.tracer import SampledTrace
from serve_app.serving.metric_cells import HistogramCell

from .builders import Engine, chat, error_json, reply_json
from .fleet import fleet_of
from .tracing.collector import Collector, collecting

CHAT = "/v1/chat/completions"
OBSERVERS = [
    *(
        (Telemetry, name)
        for name in ("on_arrival", "on_grant", "on_departure", "on_conclusion", "on_put_back")
    ),
    (Telemetry, "itl_histogram"),
    *((SampledTrace, name) for name in ("begin_attempt", "end")),
    (RequestLog, "add"),
    (HistogramCell, "observe"),
]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.mark.parametrize(("observer", "name"), OBSERVERS, ids=lambda each: getattr(each, "__name__", each))
async def test_a_fault_of_an_observer_changes_no_answer(
    observer: type,
    name: str,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def faulty(*_args: object, **_options: object) -> None:
        raise ZeroDivisionError("a fault")

    first, second = Engine(), Engine()

    async def busy(_scope: Scope, _parsed: dict[str, Any], send: Send) -> None:
        await reply_json(send, 503, error_json("busy", 503))

    first.answers.append(busy)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    async with fleet_of([first, second], tracing=True) as fleet, asyncio.timeout(30):
        monkeypatch.setattr(observer, name, faulty)
        with caplog.at_level(logging.ERROR, "ray.serve"):
            answers = await asyncio.gather(
                *(fleet.http.post(CHAT, json=chat(stream=bool(number % 2))) for number in range(20))
            )
        assert [answer.status_code for answer in answers] == [200] * 20
        assert all(b"w0" in answer.content for answer in answers)
        failed = [record.getMessage() for record in caplog.records if "observer_failed" in record.msg]
        assert len(failed) == len(set(failed))
        assert "event=gateway_error" not in caplog.text
        # Nothing remains open, and the gateway can drain.
        assert len(fleet.core) == 0
        assert fleet.gateway.open_requests == 0
