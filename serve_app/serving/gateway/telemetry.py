"""Telemetry of a gateway: metrics, and the log line of each concluded request.

Label values are bounded by the configuration (model, class, pool, outcome). The names of unknown
objectives are bounded in number. Tenants and request ids appear in the log only. Every series has the
gateway's id, because gateways behind one address answer scrapes in turn.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from serve_app.core.events import DispatchFailure
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import ClassTargets, Miss
from serve_app.errors import Outcome
from serve_app.serving.api_keys import is_tenant_name
from serve_app.serving.gateway.answer.responses import ClientGone, RequestRejected
from serve_app.serving.gateway.path import Request
from serve_app.serving.gateway.request_log import (
    ConcludedRequest,
    GenAiMetrics,
    MetricExport,
    RequestLog,
    concluded,
    rejected,
)
from serve_app.serving.metric_cells import Cells, CounterCell, HistogramCell, counters, histograms
from serve_app.serving.process import ProcessMetrics

logger = logging.getLogger("ray.serve")

# From the first token of an idle engine to the longest generation that clients wait for.
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
# A grant takes well under a millisecond with free capacity, and up to minutes without.
_WAIT_SECONDS = (0.001, 0.005, *_SECONDS)

# One engine step, from a small model to an overloaded one; a gap of seconds is a preemption.
_TOKEN_SECONDS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# Parsing takes about 0.1 ms, more for megabytes; longer times mean a busy event loop.
_OVERHEAD_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)

_USUAL_TARGETS = ClassTargets()

# Clients choose the names of objectives.
_MAX_OBJECTIVES = 32


class _Series:
    """Cached metric cells of one (gateway, model, class, pool)."""

    __slots__ = (
        "e2e",
        "gaps",
        "misses",
        "output",
        "prompt",
        "queue_wait",
        "slo_attained",
        "slo_requests",
        "tpot",
        "ttft",
    )

    def __init__(self, metrics: "Telemetry", labels: tuple[str, str, str, str]) -> None:
        self.ttft = metrics.ttft[labels]
        self.slo_requests = metrics.slo_requests[labels]
        self.slo_attained = metrics.slo_attained[labels]
        # Create all kinds at once, so that the rate of one that never occurred is 0, not absent.
        self.misses = {miss: metrics.misses[(*labels, miss)] for miss in Miss}
        self.tpot = metrics.tpot[labels]
        self.gaps = metrics.gaps[labels]
        self.e2e = metrics.e2e[labels]
        self.queue_wait = metrics.queue_wait[labels]
        self.prompt = metrics.tokens[(*labels, "prompt")]
        self.output = metrics.tokens[(*labels, "output")]

    def count_slo(self, misses: Collection[Miss]) -> None:
        """Count a request that met its latency targets, or missed some."""
        self.slo_requests.inc()
        if not misses:
            self.slo_attained.inc()
        for miss in misses:
            self.misses[miss].inc()

    def observe(self, record: RequestRecord, trace_id: str) -> None:
        """Add the latencies and tokens of a request that was dispatched."""
        # Exemplars (trace ids) appear in the OpenMetrics format only.
        if (queue_wait_s := record.queue_wait_s) is not None:
            self.queue_wait.observe(queue_wait_s, trace_id)
        if (ttft_s := record.ttft_s) is not None:
            self.ttft.observe(ttft_s, trace_id)
        if (tpot_s := record.tpot_s) is not None:
            self.tpot.observe(tpot_s, trace_id)
        if record.completed:
            self.e2e.observe(record.e2e_s, trace_id)
        self.prompt.inc(record.prompt_tokens)
        self.output.inc(record.output_tokens)


class Telemetry:
    """Metrics and request log of one gateway.

    Args:
        gateway_id: label of every series.
        upstream_counts: returns the connections opened, and the requests repeated on a new one.
        held_body_bytes: returns the bytes of request bodies in memory.
        targets: latency targets by model name.
        export: export of the metrics of the conventions by OTLP; None without one.

    Attributes:
        log_requests: write one line per concluded request; may change at any time.
        ignored_objectives: requests by the name of an objective that is unknown, or not allowed for their
            key; a bounded number of names, and `other`.
    """

    def __init__(
        self,
        gateway_id: str,
        *,
        log_requests: bool,
        upstream_counts: Callable[[], tuple[int, int]],
        held_body_bytes: Callable[[], int],
        targets: Mapping[str, ClassTargets] = MappingProxyType({}),
        export: MetricExport | None = None,
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.in_flight: dict[str, int] = {}
        self.ignored_objectives: dict[str, int] = {}
        self._gateway_id = gateway_id
        self._log = RequestLog(logger)
        self.log_requests = log_requests
        self._upstream_counts = upstream_counts
        self._held_body_bytes = held_body_bytes
        self._targets = targets
        self._series: dict[tuple[str, str, str], _Series] = {}
        self._make_counters()
        self._make_histograms()
        self._gen_ai = GenAiMetrics(gateway_id, self.registry, export)
        self.registry.register(self)
        self.registry.register(ProcessMetrics({"process": "gateway", "gateway": gateway_id}))

    def _make_counters(self) -> None:
        labels = ("gateway", "model", "class", "pool")
        self.requests = self._counter("requests", "Concluded requests.", (*labels, "outcome"))
        self.tokens = self._counter("tokens", "Tokens as counted by the engines.", (*labels, "kind"))
        self.put_backs = self._counter(
            "put_backs",
            "Requests put back, by failure.",
            ("gateway", "model", "failure"),
        )
        text = "Headers of other gateways that were ignored, because their value is invalid or not allowed."
        self.ignored_headers = self._counter("ignored_headers", text, ("gateway", "header", "objective"))
        text = "Requests to a route that moved on to a fallback, by the reason of the rejection."
        self.fallbacks = self._counter("fallbacks", text, ("gateway", "route", "model", "fallback", "reason"))
        text = (
            "Requests that count for SLO attainment: all except invalid and rate-limited ones, and those "
            "whose client disconnected early."
        )
        self.slo_requests = self._counter("slo_requests", text, labels)
        text = "Requests that completed within the latency targets of their class."
        self.slo_attained = self._counter("slo_attained_requests", text, labels)
        text = "Missed latency targets of requests, by kind; a request may have two kinds."
        self.misses = self._counter("slo_violations", text, (*labels, "kind"))

    def _make_histograms(self) -> None:
        labels = ("gateway", "model", "class", "pool")
        self.ttft = self._histogram(
            "time_to_first_token_seconds",
            "Time from arrival to the first byte of a streamed answer.",
            labels,
            _SECONDS,
        )
        text = "Time per output token after the first, mean of each streamed answer."
        self.tpot = self._histogram("time_per_output_token_seconds", text, labels, _TOKEN_SECONDS)
        text = "Time between two pieces of a streamed answer, as received from the engine."
        self.gaps = self._histogram("inter_token_latency_seconds", text, labels, _TOKEN_SECONDS)
        self.e2e = self._histogram(
            "e2e_seconds", "Time from arrival to completion, of completed requests.", labels, _SECONDS
        )
        self.queue_wait = self._histogram(
            "queue_wait_seconds", "Time from arrival to the last grant.", labels, _WAIT_SECONDS
        )
        # The scheduler exports another stage under the same name.
        self.overhead = histograms(
            self.registry,
            "ewsjf_overhead_seconds",
            "Overhead of the application per request, by stage: `parse` (read the request), `schedule` "
            "(round trip to the scheduler without queue time) and `decide` (decision of the scheduler).",
            ("gateway", "model", "stage"),
            _OVERHEAD_SECONDS,
        )

    def on_arrival(self, model: str) -> None:
        """Count a request as in flight; `model` is empty until the body has been read."""
        self.in_flight[model] = self.in_flight.get(model, 0) + 1

    def on_departure(self, model: str) -> None:
        """Count a request as no longer in flight."""
        self.in_flight[model] -= 1

    def on_grant(self, request: Request) -> None:
        """Record the overhead of a request that has just received the first grant of a model."""
        attempt, fallbacks = request.attempt, request.fallbacks
        assert attempt is not None
        model, submitted_at = request.submission.spec.model, request.submitted_at
        # The submission of a fallback includes the wait at the models before.
        if fallbacks is None or not fallbacks.earlier:
            parse_s = submitted_at - request.body.received_at
            self.overhead[self._gateway_id, model, "parse"].observe(parse_s)
        schedule_s = attempt.granted_at - submitted_at - attempt.dispatch.queue_wait_s
        # The scheduler measures the wait on its own clock, so the difference may be slightly negative.
        self.overhead[self._gateway_id, model, "schedule"].observe(max(0.0, schedule_s))

    def itl_histogram(self, request: Request) -> HistogramCell:
        """Return the cell that records the inter-token latencies of a stream."""
        submission, attempt = request.submission, request.attempt
        assert attempt is not None
        return self._series_of(submission.spec.model, submission.priority, attempt.dispatch.pool).gaps

    def on_put_back(self, request: Request, failure: DispatchFailure) -> None:
        """Count a granted request that was put back."""
        self.put_backs[self._gateway_id, request.submission.spec.model, failure].inc()

    def on_ignored_header(self, name: bytes, objective: str) -> None:
        """Count a header of another gateway whose value is ignored; the first of each name is logged.

        Args:
            objective: the objective that it names; empty for other headers.
        """
        header, counts = name.decode(), self.ignored_objectives
        if objective:
            fits = len(counts) < _MAX_OBJECTIVES and is_tenant_name(objective)
            objective = objective if fits or objective in counts else "other"
            counts[objective] = counts.get(objective, 0) + 1
        cell = self.ignored_headers[self._gateway_id, header, objective]
        if not cell.value:
            named = f" objective={objective}" if objective else ""
            logger.warning("event=ignored_header header=%s%s reason='invalid or not allowed'", header, named)
        cell.inc()

    def on_fallback(self, request: Request, fallback: str, reason: Outcome) -> None:
        """Count a request to a route that one model rejected, and that another one receives next."""
        route = request.fallbacks.route if request.fallbacks is not None else ""
        self.fallbacks[self._gateway_id, route, request.submission.spec.model, fallback, reason].inc()

    def on_conclusion(self, request: Request) -> None:
        """Count and log a scheduled request that has reached its outcome."""
        self._conclude(concluded(request))

    def on_rejection(self, request: Request, endpoint: str, end: RequestRejected | ClientGone) -> None:
        """Count and log a request that never reached a scheduler; see `rejected`."""
        self._conclude(rejected(request, endpoint, end))

    def _conclude(self, record: ConcludedRequest) -> None:
        model, priority, pool, trace = record.model, record.priority, record.pool, record.request.trace
        self.requests[self._gateway_id, model, priority, pool, record.outcome].inc()
        targets = self._targets.get(model, _USUAL_TARGETS)
        counts_for_slo = bool(model) and targets.is_attributable(record)
        if counts_for_slo or record.dispatched_at is not None:
            series = self._series_of(model, priority, pool)
            if counts_for_slo:
                series.count_slo(targets.missed_by(record))
            if record.dispatched_at is not None:
                series.observe(record, "" if trace is None else trace.trace_id)
        if model:
            self._gen_ai.observe(record)
        if trace is not None:
            trace.end(record.request, record, record.shown_status)
        if self.log_requests and logger.isEnabledFor(logging.INFO):
            self._log.add(record)

    def flush_log(self) -> None:
        """Write the log lines of all concluded requests."""
        self._log.close()

    def close(self, within_s: float) -> None:
        """Write the log lines, and export the last measurements within a time."""
        self.flush_log()
        self._gen_ai.close(within_s)

    def exposition(self) -> str:
        """Return this gateway's metrics in the Prometheus text format."""
        return generate_latest(self.registry).decode()

    def openmetrics(self) -> str:
        """Return this gateway's metrics in the OpenMetrics format, with exemplars, without the end marker."""
        page: bytes = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]
        return page.decode().removesuffix("# EOF\n")

    def collect(self) -> Iterator[Metric]:
        """Yield metrics whose values live elsewhere; prometheus_client calls this at each scrape."""
        labels = ("gateway", "model")
        in_flight = GaugeMetricFamily(
            "ewsjf_gateway_in_flight_requests",
            "Requests waiting or running; the label `model` is empty while the body is being read.",
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
            ("stale_retries", "Requests retried because the reused connection was closed.", stale_retries),
        ):
            family = CounterMetricFamily(f"ewsjf_gateway_upstream_{name}", text, labels=("gateway",))
            family.add_metric((self._gateway_id,), value)
            yield family

    def _series_of(self, model: str, priority: str, pool: str) -> _Series:
        key = (model, priority, pool)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = _Series(self, (self._gateway_id, *key))
        return series

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Cells[CounterCell]:
        return counters(self.registry, f"ewsjf_gateway_{name}", text, labels)

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> Cells[HistogramCell]:
        return histograms(self.registry, f"ewsjf_gateway_{name}", text, labels, buckets)
