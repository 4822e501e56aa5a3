"""Server metrics of OpenTelemetry's conventions for generative AI: on `/metrics`, and by OTLP if configured.

One table defines both forms. Prometheus' form replaces dots by underscores and appends the unit. The names
and buckets are those of the conventions (gen-ai-metrics, status Development, November 2026).
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry

from serve_app.serving.gateway.request_log import ConcludedRequest
from serve_app.serving.gateway.tracing import names
from serve_app.serving.metric_cells import Cells, HistogramCell, histograms


class Instrument(NamedTuple):
    """A histogram of the conventions; its unit is the second."""

    name: str
    text: str
    bounds_s: tuple[float, ...]


REQUEST_DURATION = Instrument(
    "gen_ai.server.request.duration",
    "Time from the arrival of a request to the end of its answer.",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
TIME_TO_FIRST_TOKEN = Instrument(
    "gen_ai.server.time_to_first_token",
    "Time from the arrival of a request to its first token, of completed streams.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN = Instrument(
    "gen_ai.server.time_per_output_token",
    "Time per output token after the first, mean of each completed stream.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
INSTRUMENTS = (REQUEST_DURATION, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN)
ATTRIBUTES = (names.OPERATION_NAME, names.PROVIDER_NAME, names.REQUEST_MODEL, names.ERROR_TYPE)


class MetricExport(Protocol):
    """Export of measurements by OTLP."""

    def record(self, instrument: Instrument, seconds: float, attributes: Mapping[str, str]) -> None:
        """Add a measurement."""
        ...

    def close(self, within_s: float) -> None:
        """Export the last measurements; block for at most `within_s` seconds."""
        ...


class GenAiMetrics:
    """The three histograms of one gateway. An absent `error.type` is an empty label on `/metrics`.

    Args:
        export: None without OTLP.
    """

    def __init__(self, gateway_id: str, registry: CollectorRegistry, export: MetricExport | None) -> None:
        self._gateway_id = gateway_id
        self._export = export
        labels = ("gateway", *(name.replace(".", "_") for name in ATTRIBUTES))
        self._cells: dict[Instrument, Cells[HistogramCell]] = {
            each: histograms(
                registry, each.name.replace(".", "_") + "_seconds", each.text, labels, each.bounds_s
            )
            for each in INSTRUMENTS
        }

    def observe(self, record: ConcludedRequest) -> None:
        """Add a request to a model that has ended."""
        operation = names.OPERATIONS.get(record.endpoint)
        if operation is None:
            return
        values = (operation, names.PROVIDER, record.model, "" if record.completed else record.outcome.value)
        self._add(REQUEST_DURATION, record.e2e_s, values)
        if not record.completed:
            return
        if (ttft_s := record.ttft_s) is not None:
            self._add(TIME_TO_FIRST_TOKEN, ttft_s, values)
        if (tpot_s := record.tpot_s) is not None:
            self._add(TIME_PER_OUTPUT_TOKEN, tpot_s, values)

    def _add(self, instrument: Instrument, seconds: float, values: tuple[str, ...]) -> None:
        self._cells[instrument][(self._gateway_id, *values)].observe(seconds)
        if self._export is not None:
            attributes = {name: value for name, value in zip(ATTRIBUTES, values, strict=True) if value}
            self._export.record(instrument, seconds, attributes)

    def close(self, within_s: float) -> None:
        """Export the last measurements."""
        if self._export is not None:
            self._export.close(within_s)
