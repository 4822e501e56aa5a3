"""Export of the gateway's server metrics by OTLP, with OpenTelemetry's SDK on its own thread."""

import threading
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

from serve_app.serving.gateway.gen_ai import INSTRUMENTS, Instrument
from serve_app.serving.gateway.tracing import names
from serve_app.serving.gateway.tracing.tracer import service_resource


class OtlpMetrics:
    """Export over HTTP, as the standard environment variables configure; see `gen_ai.MetricExport`."""

    def __init__(self, gateway_id: str) -> None:
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        self._provider = MeterProvider([reader], service_resource(gateway_id), shutdown_on_exit=False)
        meter = self._provider.get_meter(names.SCOPE)
        self._histograms = {
            each: meter.create_histogram(
                each.name, "s", each.text, explicit_bucket_boundaries_advisory=each.bounds_s
            )
            for each in INSTRUMENTS
        }

    def record(self, instrument: Instrument, seconds: float, attributes: Mapping[str, str]) -> None:
        """Add a measurement."""
        self._histograms[instrument].record(seconds, attributes)

    def close(self, within_s: float) -> None:
        """Export the last measurements; block for at most `within_s` seconds, even without a collector."""
        ending = threading.Thread(target=self._provider.shutdown, name="end of metrics", daemon=True)
        ending.start()
        ending.join(within_s)
