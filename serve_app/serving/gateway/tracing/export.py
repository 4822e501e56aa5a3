"""Where spans go: an OTLP collector, as the standard variables of the environment name it.

OpenTelemetry's batch processor holds spans and sends them on a thread of its own; when a collector is slow or
gone, it drops the ones that its queue cannot hold. Requests never wait for it.
"""

import logging
import os
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from serve_app.errors import SettingsError

logger = logging.getLogger("ray.serve")

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def otlp_exporter() -> SpanExporter:
    """The exporter that the environment asks for; OTLP over HTTP where it says nothing.

    Raises:
        SettingsError: it asks for a protocol that is not there.
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
    """Tells the log once when a collector cannot be reached, and once when it can again."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; on the processor's thread."""
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - whatever it is, requests have nothing to do with it
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
        """Send nothing any more."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send what it holds."""
        return self._exporter.force_flush(timeout_millis)
