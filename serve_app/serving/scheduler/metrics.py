"""Prometheus metrics of one model's scheduler.

The registry is the process's own: Ray does not scrape it, a gateway's `/metrics` asks for the text over the
control channel. Gauges are set when they are asked for; only counters and histograms cost anything per event.
The text is drawn up in a thread, from a snapshot: with 1,000 replicas it takes a good part of 0.1 s.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from serve_app.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.scheduling.admission.wait_prediction import PredictionErrors
from serve_app.scheduling.commands import Conclude, Dispatch
from serve_app.scheduling.events import DispatchFailed, DispatchFailure
from serve_app.scheduling.request import ScheduledRequest
from serve_app.scheduling.waits.causes import WaitBreakdown, WaitCause
from serve_app.serving.metric_cells import CellFamily, CounterCell, HistogramCell, counters, histograms
from serve_app.serving.process_metrics import ProcessMetrics
from serve_app.serving.scheduler.scraped.cost_figures import CostCounters, CostFigures
from serve_app.serving.scheduler.scraped.ended_requests import RequestMetrics
from serve_app.serving.scheduler.scraped.honesty import HonestyMetrics
from serve_app.serving.scheduler.scraped.labels import Names
from serve_app.serving.scheduler.scraped.pool_figures import PoolGauges, PoolLoad
from serve_app.serving.scheduler.scraped.queue_figures import QueueFigures, QueueGauges
from serve_app.serving.scheduler.scraped.tuner_figures import TunerFigures

# From "there was room" to the patience of batch work.
_WAIT_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
# Predicted minus actual: below zero where requests waited longer than predicted.
_ERROR_BUCKETS_S = (-60, -30, -10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 2, 5, 10, 30, 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatus:
    """How things stand at the moment of a scrape."""

    waiting: Mapping[PriorityClass, int]
    in_flight: Mapping[str, int]
    replicas: Mapping[str, tuple[ReplicaSpec, ReplicaReport | None]]
    stale: int
    gateways: int
    learned_queues: int = 0
    partition_age_s: float | None = None
    drain_tokens_per_s: float = 0.0
    retry_reservations: int = 0
    errors: PredictionErrors = field(default_factory=PredictionErrors)
    b_short_tokens: int = 0
    queue: QueueFigures = field(default_factory=QueueFigures)
    pools: Mapping[str, PoolLoad] = field(default_factory=dict)
    costs: CostFigures = field(default_factory=CostFigures)


class _ReplicaGauges(Collector):
    """What the last snapshot says of each replica; replicas that left leave the metrics, too."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.status = SchedulerStatus(waiting={}, in_flight={}, replicas={}, stale=0, gateways=0)

    def collect(self) -> Iterator[Metric]:
        """Yield three families; prometheus_client asks for them at each page."""
        labels = ("model", "pool", "replica")
        text = "Requests sent to a replica."
        in_flight = GaugeMetricFamily("ewsjf_requests_in_flight", text, labels=labels)
        text = "KV cache in use, as last reported."
        kv_usage = GaugeMetricFamily("ewsjf_replica_kv_usage_ratio", text, labels=labels)
        text = "Requests in the engine's own queue, as last reported."
        waiting = GaugeMetricFamily("ewsjf_replica_waiting", text, labels=labels)
        for replica_id, (spec, report) in self.status.replicas.items():
            values = (self._model, spec.pool, replica_id)
            in_flight.add_metric(values, self.status.in_flight.get(replica_id, 0))
            if report is not None and report.kv_usage_ratio is not None:
                kv_usage.add_metric(values, report.kv_usage_ratio)
            if report is not None and report.waiting is not None:
                waiting.add_metric(values, report.waiting)
        yield from (in_flight, kv_usage, waiting)


class SchedulerMetrics:
    """The metrics of one scheduler.

    Attributes:
        requests: of requests that were dispatched or have ended.
        honesty: of what waiting requests were told.
        tuner: what the tuner tells of itself.
    """

    def __init__(self, model: str, incarnation: int) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._dispatch_children: dict[tuple[str, PriorityClass], tuple[CounterCell, HistogramCell]] = {}
        self._conclusion_children: dict[tuple[PriorityClass, Outcome], CounterCell] = {}
        self._error_children: dict[PriorityClass, HistogramCell] = {}
        self._make_gauges()
        self._make_counters()
        names = Names()
        self.requests = RequestMetrics(model, self._registry, names)
        self.honesty = HonestyMetrics(model, self._registry)
        self._replicas, self._pools = _ReplicaGauges(model), PoolGauges(model)
        self._queue, self.tuner = QueueGauges(model, names), TunerFigures(model)
        own = ProcessMetrics({"process": "scheduler", "model": model})
        self._costs = CostCounters(model, names)
        for collector in (self._replicas, self._queue, self._pools, self._costs, self.tuner, own):
            self._registry.register(collector)
        started = self._gauge("ewsjf_scheduler_incarnation", "Rises with every scheduler started.")
        started.labels(model).set(incarnation)

    def _make_gauges(self) -> None:
        gauge = self._gauge
        self._waiting = gauge("ewsjf_requests_waiting", "Requests in the queue.", "class")
        self._stale = gauge("ewsjf_replicas_stale", "Replicas without a fresh report.")
        self._gateways = gauge("ewsjf_gateways_connected", "Gateways connected.")
        text = "Learned length queues in force; 0 while the policy has those that it began with."
        self._learned_queues = gauge("ewsjf_length_queues", text)
        text = "Time since the length queues in force were learned."
        self._partition_age = gauge("ewsjf_partition_age_seconds", text)
        text = "Estimated tokens dispatched per second while requests waited."
        self._drain = gauge("ewsjf_queue_drain_tokens_per_second", text)
        self._bookings = gauge("ewsjf_retry_reservations", "Refused requests whose return is expected.")
        text = "Token budget up to which a request is at home in the first pool."
        self._b_short = gauge("ewsjf_b_short_tokens", text)
        self._tuned = gauge("ewsjf_tuned_value", "A setting that is tuned, as it is in force.", "setting")
        text = "Mean latency in the tuner's twin over that of the engines, less 1, as last measured."
        self._twin_error = gauge("ewsjf_twin_error_ratio", text, "latency")
        text = "Predicted minus actual wait in the queue, mean of the last fifty or so."
        self._error_mean = gauge("ewsjf_queue_wait_prediction_error_mean_seconds", text)
        text = "Size of the difference of predicted and actual wait, mean of the last fifty or so."
        self._error_size = gauge("ewsjf_queue_wait_prediction_error_absolute_mean_seconds", text)

    def _make_counters(self) -> None:
        counter = self._counter
        self._wait = histograms(
            self._registry,
            "ewsjf_queue_wait_seconds",
            "Time in the queue until dispatch.",
            ("model", "pool", "class"),
            _WAIT_BUCKETS_S,
        )
        self._error = histograms(
            self._registry,
            "ewsjf_queue_wait_prediction_error_seconds",
            "Predicted minus actual wait of requests that were dispatched and had a prediction.",
            ("model", "class"),
            _ERROR_BUCKETS_S,
        )
        self._dispatches = counter("ewsjf_dispatches", "Grants issued.", "pool")
        text = "Time in the queue, of requests that have left it, by what they waited for."
        self._wait_causes = counter("ewsjf_queue_wait_cause_seconds", text, "class", "cause")
        self._cause_children: dict[tuple[PriorityClass, WaitCause], CounterCell] = {}
        self._spills = counter("ewsjf_spills", "Grants in another pool than the request's own.", "pool")
        text = "Requests that came back before their first byte."
        self._put_backs = counter("ewsjf_put_backs", text, "failure")
        for failure in DispatchFailure:
            self._put_backs.labels(self._model, failure.value)
        text = "Requests that reached their outcome."
        self._concluded = counter("ewsjf_requests_concluded", text, "class", "outcome")
        self._stale_reports = counter("ewsjf_stale_reports", "Times a replica's report went stale.")
        text = "Times that learned length queues were put in force."
        self._partition_changes = counter("ewsjf_partition_changes", text, "reason")
        text = "Times that tuned values were put in force, trials and ends of trials among them."
        self._retunings = counter("ewsjf_retunings", text)
        self._b_short_moves = counter("ewsjf_b_short_moves", "Times that the border of the pools moved.")
        self._errors = counter("ewsjf_scheduler_errors", "Events that the core could not handle.")

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, ("model", *labels), registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> CellFamily[CounterCell]:
        family = counters(self._registry, name, text, ("model", *labels))
        if not labels:
            # A rate of what has not happened yet is 0, not nothing.
            family.labels(self._model)
        return family

    def on_dispatch(self, command: Dispatch, priority: PriorityClass, *, spilled: bool) -> None:
        """A grant was issued."""
        dispatches, wait = self._of_dispatch(command.pool, priority)
        dispatches.inc()
        wait.observe(command.queue_wait_s)
        self.requests.on_dispatch(command.length_queue, command.queue_wait_s)
        if spilled:
            self._spills.labels(self._model, command.pool).inc()
        if command.waited is not None:
            self._on_wait(command.waited, priority)

    def on_prediction(self, scheduled: ScheduledRequest) -> None:
        """A request was dispatched; how long it waited was predicted when it came, or could not be."""
        prediction, priority = scheduled.prediction, scheduled.request.priority
        if prediction is None:
            return
        errors = self._error_children.get(priority)
        if errors is None:
            errors = self._error_children[priority] = self._error.labels(self._model, priority.value)
        errors.observe(prediction.wait_s - (scheduled.dispatched_at - prediction.at))

    def put_back(self, event: DispatchFailed) -> None:
        """A grant came to nothing."""
        self._put_backs.labels(self._model, event.failure.value).inc()

    def on_conclusion(self, command: Conclude, priority: PriorityClass) -> None:
        """A request reached its outcome."""
        self._of_conclusion(priority, command.conclusion.outcome).inc()
        if command.waited is not None:
            self._on_wait(command.waited, priority)

    def on_report_stale(self) -> None:
        """A replica has not reported for too long."""
        self._stale_reports.labels(self._model).inc()

    def on_partition_change(self, reason: str) -> None:
        """Learned queues were put in force."""
        self._partition_changes.labels(self._model, reason).inc()

    def retuned(self, values: Mapping[str, float]) -> None:
        """Tuned values were put in force."""
        for path, value in values.items():
            self._tuned.labels(self._model, path).set(value)
        self._retunings.labels(self._model).inc()

    def on_twin_error(self, ttft_ratio: float, tpot_ratio: float) -> None:
        """The error of the tuner's twin was measured."""
        self._twin_error.labels(self._model, "ttft").set(ttft_ratio)
        self._twin_error.labels(self._model, "tpot").set(tpot_ratio)

    def on_b_short_change(self) -> None:
        """`B_short` has another value."""
        self._b_short_moves.labels(self._model).inc()

    def on_core_failure(self) -> None:
        """The core raised."""
        self._errors.labels(self._model).inc()

    def exposition(self, standing: SchedulerStatus) -> str:
        """Return everything in the Prometheus text format; may be called in a thread, one at a time."""
        for priority in PriorityClass:
            self._waiting.labels(self._model, priority.value).set(standing.waiting.get(priority, 0))
        self._stale.labels(self._model).set(standing.stale)
        self._gateways.labels(self._model).set(standing.gateways)
        self._learned_queues.labels(self._model).set(standing.learned_queues)
        self._drain.labels(self._model).set(standing.drain_tokens_per_s)
        self._bookings.labels(self._model).set(standing.retry_reservations)
        self._b_short.labels(self._model).set(standing.b_short_tokens)
        self._error_mean.labels(self._model).set(standing.errors.mean_s)
        self._error_size.labels(self._model).set(standing.errors.mean_absolute_s)
        if standing.partition_age_s is not None:
            self._partition_age.labels(self._model).set(standing.partition_age_s)
        self._replicas.status = standing
        self._queue.figures, self._pools.pools = standing.queue, dict(standing.pools)
        self._costs.figures = standing.costs
        return generate_latest(self._registry).decode()

    def _on_wait(self, waited: WaitBreakdown, priority: PriorityClass) -> None:
        for cause, nanoseconds in waited.causes.items():
            found = self._cause_children.get((priority, cause))
            if found is None:
                found = self._wait_causes.labels(self._model, priority.value, cause.value)
                self._cause_children[priority, cause] = found
            found.inc(nanoseconds / 1e9)

    # Looking labels up takes as long as counting, so what is counted for each request is kept.

    def _of_dispatch(self, pool: str, priority: PriorityClass) -> tuple[CounterCell, HistogramCell]:
        found = self._dispatch_children.get((pool, priority))
        if found is None:
            found = (
                self._dispatches.labels(self._model, pool),
                self._wait.labels(self._model, pool, priority.value),
            )
            self._dispatch_children[pool, priority] = found
        return found

    def _of_conclusion(self, priority: PriorityClass, outcome: Outcome) -> CounterCell:
        found = self._conclusion_children.get((priority, outcome))
        if found is None:
            found = self._concluded.labels(self._model, priority.value, outcome.value)
            self._conclusion_children[priority, outcome] = found
        return found
