"""Fixtures for tracing tests: a collector, and an environment that exports spans to it."""

from collections.abc import Iterator

import pytest

from .collector import Collector, collecting


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        # Only the end of a tracer exports spans.
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
        yield made
