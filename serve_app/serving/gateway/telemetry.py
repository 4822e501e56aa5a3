"""Telemetry of a gateway: metrics for scrapers, one log line for each concluded request.

Labels are bounded by the configuration (model, class, pool, outcome); tenants and request ids go to the log
alone. Every series carries the gateway's id: behind one address several gateways answer a scraper in turn.
"""

import logging
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from serve_app.errors import HTTP_STATUS, Outcome
from serve_app.metrics.record import RequestRecord
from serve_app.scheduling.events import DispatchFailure
from serve_app.serving.gateway.logs.concluded import ConcludedRequest
from serve_app.serving.gateway.logs.request_log import RequestLog

logger = logging.getLogger("ray.serve")

# From an idle engine's first token to the longest generation that somebody waits for.
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
# A grant takes well under a millisecond when there is room, and minutes when there is none.
_WAIT_SECONDS = (0.001, 0.005, *_SECONDS)


class _Series:
    """Metric children of one (model, class, pool), looked up once."""

    __slots__ = ("e2e", "output", "prompt", "queue_wait", "ttft")

    def __init__(self, metrics: "Telemetry", labels: tuple[str, str, str, str]) -> None:
        self.ttft = metrics.ttft.labels(*labels)
        self.e2e = metrics.e2e.labels(*labels)
        self.queue_wait = metrics.queue_wait.labels(*labels)
        self.prompt = metrics.tokens.labels(*labels, "prompt")
        self.output = metrics.tokens.labels(*labels, "output")


class Telemetry:
    """Metrics and log of one gateway.

    Args:
        gateway_id: label of every series.
        log_requests: write a line per concluded request.
        upstream_counts: connections opened and requests repeated on a new one, so far.
        held_body_bytes: bytes of the bodies held now.

    Attributes:
        log_requests: may change at any time.
    """

    def __init__(
        self,
        gateway_id: str,
        *,
        log_requests: bool,
        upstream_counts: Callable[[], tuple[int, int]],
        held_body_bytes: Callable[[], int],
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.in_flight: dict[str, int] = {}
        self._gateway_id = gateway_id
        self._log = RequestLog(logger)
        self.log_requests = log_requests
        self._upstream_counts = upstream_counts
        self._held_body_bytes = held_body_bytes
        self._outcomes: dict[tuple[str, str, str, str], Counter] = {}
        self._series: dict[tuple[str, str, str], _Series] = {}
        labels = ("gateway", "model", "class", "pool")
        self.requests = self._counter("requests", "Concluded requests.", (*labels, "outcome"))
        self.tokens = self._counter("tokens", "Tokens as the engines counted them.", (*labels, "kind"))
        self.put_backs = self._counter(
            "put_backs",
            "Requests that came back from a replica before their first byte.",
            ("gateway", "model", "failure"),
        )
        self.ttft = self._histogram(
            "time_to_first_token_seconds",
            "Arrival to first byte of a streamed answer.",
            labels,
            _SECONDS,
        )
        self.e2e = self._histogram(
            "e2e_seconds", "Arrival to conclusion of completed requests.", labels, _SECONDS
        )
        self.queue_wait = self._histogram(
            "queue_wait_seconds", "Arrival to the last grant.", labels, _WAIT_SECONDS
        )
        self.registry.register(self)

    def on_arrival(self, model: str) -> None:
        """A request is under way; its model is empty until its body has been read."""
        self.in_flight[model] = self.in_flight.get(model, 0) + 1

    def on_departure(self, model: str) -> None:
        """It is over."""
        self.in_flight[model] -= 1

    def put_back(self, model: str, failure: DispatchFailure) -> None:
        """A granted request came back before its first byte."""
        self.put_backs.labels(self._gateway_id, model, failure).inc()

    def on_conclusion(self, concluded: ConcludedRequest) -> None:
        """Count and log a request that has reached its outcome."""
        record, model = concluded.record, concluded.model
        self._outcome_counter(model, record).inc()
        if record.dispatched_at is not None:
            self._observe(model, record, concluded.incoming.trace.trace_id)
        concluded.incoming.trace.ended(record, concluded.status or HTTP_STATUS[Outcome.CANCELLED])
        if self.log_requests and logger.isEnabledFor(logging.INFO):
            self._log.add(concluded)

    def flush_log(self) -> None:
        """Write the lines of all requests that have been concluded."""
        self._log.close()

    def exposition(self) -> str:
        """This gateway's own metrics in the Prometheus text format."""
        return generate_latest(self.registry).decode()

    def openmetrics(self) -> str:
        """The same in OpenMetrics' format, with exemplars, but for its end."""
        page: bytes = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]
        return page.decode().removesuffix("# EOF\n")

    def collect(self) -> Iterator[Metric]:
        """Figures that others keep; prometheus_client asks for them at each scrape."""
        labels = ("gateway", "model")
        in_flight = GaugeMetricFamily(
            "ewsjf_gateway_in_flight_requests",
            "Requests waiting or running; those without a model are being received.",
            labels=labels,
        )
        for model, count in self.in_flight.items():
            in_flight.add_metric((self._gateway_id, model), count)
        yield in_flight
        held = GaugeMetricFamily(
            "ewsjf_gateway_held_body_bytes", "Request bodies held in memory.", labels=("gateway",)
        )
        held.add_metric((self._gateway_id,), self._held_body_bytes())
        yield held
        connects, stale_retries = self._upstream_counts()
        for name, text, value in (
            ("connects", "Connections opened to replicas.", connects),
            ("stale_retries", "Requests repeated because a kept connection was closed.", stale_retries),
        ):
            family = CounterMetricFamily(f"ewsjf_gateway_upstream_{name}", text, labels=("gateway",))
            family.add_metric((self._gateway_id,), value)
            yield family

    def _observe(self, model: str, record: RequestRecord, trace_id: str) -> None:
        key = (model, record.priority, record.pool)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = _Series(self, (self._gateway_id, *key))
        # Shown in OpenMetrics' format alone.
        exemplar = {"trace_id": trace_id} if trace_id else None
        if (queue_wait_s := record.queue_wait_s) is not None:
            series.queue_wait.observe(queue_wait_s, exemplar)
        if (ttft_s := record.ttft_s) is not None:
            series.ttft.observe(ttft_s, exemplar)
        if record.completed:
            series.e2e.observe(record.e2e_s, exemplar)
        series.prompt.inc(record.prompt_tokens)
        series.output.inc(record.output_tokens)

    def _outcome_counter(self, model: str, record: RequestRecord) -> Counter:
        key = (model, record.priority, record.pool, record.outcome)
        counter = self._outcomes.get(key)
        if counter is None:
            counter = self._outcomes[key] = self.requests.labels(self._gateway_id, *key)
        return counter

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"ewsjf_gateway_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(f"ewsjf_gateway_{name}", text, labels, registry=self.registry, buckets=buckets)
