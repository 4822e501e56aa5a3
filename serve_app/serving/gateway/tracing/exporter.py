"""Export of spans: the exporter that the environment configures, with its failures in the log."""

import logging
import os
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from serve_app.errors import SettingsError

logger = logging.getLogger("ray.serve")

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def otlp_exporter() -> SpanExporter:
    """Create the exporter that the environment configures; OTLP over HTTP by default.

    Raises:
        SettingsError: the configured protocol is not supported.
        ImportError: its package is not installed.
    """
    variable = next((name for name in _PROTOCOLS if os.environ.get(name)), "")
    protocol = os.environ.get(variable, "http/protobuf") if variable else "http/protobuf"
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

        return WatchedExporter(OTLPSpanExporter())
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter as GrpcExporter,
        )

        return WatchedExporter(GrpcExporter())
    raise SettingsError(f"{variable} is {protocol!r}: use http/protobuf or grpc")


class WatchedExporter(SpanExporter):
    """Exporter that logs once when the collector becomes unreachable, and once when it recovers."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans; runs on the processor's thread."""
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - tracing must not affect requests
            result, reason = SpanExportResult.FAILURE, repr(error)
        else:
            reason = "the collector has not taken them"
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                logger.info("event=traces_exported lost_before=%d", self._lost)
            self._lost = 0
            return result
        if not self._lost:
            logger.warning("event=traces_lost spans=%d reason=%r", len(spans), reason)
        self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Export buffered spans."""
        return self._exporter.force_flush(timeout_millis)
