"""Prometheus metrics of one model's scheduler.

The registry is the process's own: Ray does not scrape it, a gateway's `/metrics` asks for the text over the
control channel. Gauges (`gauges.py`) are read when they are asked for; only counters and histograms cost
anything per event. The text is drawn up in a thread, from the figures of one moment: with 1,000 replicas it
takes a good part of 0.1 s.

Engines count tokens; without their count an ended request shows nothing here but its tenant.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest

from serve_app.core.accounting.wait_causes import WaitBreakdown, WaitCause
from serve_app.core.commands import Dispatch, ReportStale
from serve_app.core.events import DispatchFailed, DispatchFailure, Finished
from serve_app.core.outlook.watched import VERDICTS, Honesty
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.adaptive_b_short import BShortChanged
from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from serve_app.serving.metric_cells import CellFamily, CounterCell, HistogramCell, counters, histograms
from serve_app.serving.process import ProcessMetrics
from serve_app.serving.scheduler.gauges import Figures, Moment, Names
from serve_app.serving.scheduler.journal import Entry

# From "there was room" to the patience of batch work.
_WAIT_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
# Predicted minus actual: below zero where requests waited longer than predicted.
_ERROR_BUCKETS_S = (-60, -30, -10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 2, 5, 10, 30, 60)


class SchedulerMetrics:
    """The metrics of one scheduler.

    Attributes:
        requests: of requests that were dispatched or have ended.
        honesty: of what waiting requests were told.
        names: of tenants and length queues.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._dispatch_children: dict[tuple[str, PriorityClass], tuple[CounterCell, HistogramCell]] = {}
        self._conclusion_children: dict[tuple[PriorityClass, Outcome], CounterCell] = {}
        self._error_children: dict[PriorityClass, HistogramCell] = {}
        self._make_counters()
        self.names = Names()
        self.requests = RequestMetrics(model, self._registry, self.names)
        self.honesty = HonestyMetrics(model, self._registry)
        self._moment = Moment(model)
        self._registry.register(self._moment)
        self._registry.register(ProcessMetrics({"process": "scheduler", "model": model}))

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

    def _counter(self, name: str, text: str, *labels: str) -> CellFamily[CounterCell]:
        family = counters(self._registry, name, text, ("model", *labels))
        if not labels:
            # A rate of what has not happened yet is 0, not nothing.
            family.labels(self._model)
        return family

    def on_entry(self, entry: Entry) -> None:
        """Count an event and what followed from it."""
        event, commands = entry.event, entry.commands
        self.requests.decisions.observe(entry.took_s)
        for dispatch, scheduled in entry.dispatched:
            self._on_dispatch(dispatch, scheduled)
        for conclude, request in entry.concluded:
            self._of_conclusion(request.priority, conclude.conclusion.outcome).inc()
            if conclude.waited is not None:
                self._on_wait(conclude.waited, request.priority)
        if isinstance(event, Finished):
            if entry.scheduled is not None:
                core = entry.core
                pools, b_short_tokens = core.settings.routing.pools, core.router.b_short_tokens
                self.requests.on_end(entry.scheduled, event.outcome, pools, b_short_tokens)
        elif isinstance(event, DispatchFailed):
            self._put_backs.labels(self._model, event.failure.value).inc()
        if len(commands) > len(entry.dispatched) + len(entry.concluded):
            for command in commands:
                if isinstance(command, ReportStale):
                    self._stale_reports.labels(self._model).inc()
                elif isinstance(command, BShortChanged):
                    self._b_short_moves.labels(self._model).inc()

    def on_partition_change(self, reason: str) -> None:
        """Learned queues were put in force."""
        self._partition_changes.labels(self._model, reason).inc()

    def on_retuning(self) -> None:
        """Tuned values were put in force."""
        self._retunings.labels(self._model).inc()

    def on_core_failure(self) -> None:
        """The core raised."""
        self._errors.labels(self._model).inc()

    def exposition(self, figures: Sequence[Figures]) -> str:
        """Return everything in the Prometheus text format; may be called in a thread, one at a time.

        Args:
            figures: of this moment.
        """
        self._moment.metrics = figures
        return generate_latest(self._registry).decode()

    def _on_dispatch(self, command: Dispatch, scheduled: ScheduledRequest) -> None:
        priority, prediction = scheduled.request.priority, scheduled.prediction
        dispatches, wait = self._of_dispatch(command.pool, priority)
        dispatches.inc()
        wait.observe(command.queue_wait_s)
        self.requests.on_dispatch(command.length_queue, command.queue_wait_s)
        if scheduled.pools[0] != command.pool:
            self._spills.labels(self._model, command.pool).inc()
        if command.waited is not None:
            self._on_wait(command.waited, priority)
        if prediction is not None:
            errors = self._error_children.get(priority)
            if errors is None:
                errors = self._error_children[priority] = self._error.labels(self._model, priority.value)
            errors.observe(prediction.wait_s - (scheduled.dispatched_at - prediction.at))

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


# Estimated over actual: 1 is right, 2 is twice too much.
_RATIO_BOUNDS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2, 4, 10)
# From "there was room" to the patience of batch work.
_WAIT_BOUNDS_S = (0.005, 0.02, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
# From an event that changes nothing to a queue of thousands.
_DECISION_BOUNDS_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01, 0.05, 0.25)


class RequestMetrics:
    """Counters and histograms of one model's requests.

    Args:
        names: of tenants and length queues, shared with the gauges.

    Attributes:
        decisions: where the time of each decision is counted.
    """

    def __init__(self, model: str, registry: CollectorRegistry, names: Names) -> None:
        self._model, self._names = model, names
        text = "Estimated over actual tokens of ended requests; 1 is right, above 1 was estimated too high."
        estimates = histograms(registry, "ewsjf_estimate_ratio", text, ("model", "kind"), _RATIO_BOUNDS)
        self._prompts = estimates.labels(model, "prompt")
        self._outputs = estimates.labels(model, "output")
        text = (
            "Requests whose actual tokens belonged into another pool: `long` ones that were at home in the "
            "first pool, and `short` ones that were not."
        )
        self._misroutes = counters(registry, "ewsjf_misroutes", text, ("model", "pool", "actual"))
        text = "Tokens as the engines counted them, by tenant."
        self._tokens = counters(registry, "ewsjf_tenant_tokens", text, ("model", "tenant", "kind"))
        text = "Requests that ended in an engine, by tenant."
        self._requests = counters(registry, "ewsjf_tenant_requests", text, ("model", "tenant"))
        text = "Time in the queue until dispatch, by length queue."
        name = "ewsjf_length_queue_wait_seconds"
        self._waits = histograms(registry, name, text, ("model", "length_queue"), _WAIT_BOUNDS_S)
        # Its gateways export two other stages under the same name.
        text = "What the application itself adds to a request, by stage."
        overhead = histograms(
            registry, "ewsjf_overhead_seconds", text, ("model", "stage"), _DECISION_BOUNDS_S
        )
        self.decisions = overhead.labels(model, "decide")
        self._of_tenant: dict[str, tuple[CounterCell, CounterCell, CounterCell]] = {}
        self._of_queue: dict[str, HistogramCell] = {}

    def __repr__(self) -> str:
        return f"<RequestMetrics {self._model}>"

    def on_dispatch(self, length_queue: str, wait_s: float) -> None:
        """A request leaves a length queue."""
        name = self._names.of_length_queues(length_queue)
        waits = self._of_queue.get(name)
        if waits is None:
            waits = self._of_queue[name] = self._waits.labels(self._model, name)
        waits.observe(wait_s)

    def on_end(
        self, ended: ScheduledRequest, outcome: Outcome, pools: tuple[str, ...], b_short_tokens: int
    ) -> None:
        """A request has ended in an engine.

        Args:
            pools: those of the model, the shortest first.
            b_short_tokens: up to which a request belongs into the first one.
        """
        requests, prompt, output = self._cells_of(ended.request.tenant)
        requests.inc()
        usage, estimate = ended.usage, ended.estimate
        if usage is None:
            return
        prompt.inc(usage.prompt_tokens)
        output.inc(usage.output_tokens)
        # The count of an answer that broke off says nothing of the estimate.
        if outcome is not Outcome.COMPLETED:
            return
        if usage.prompt_tokens:
            self._prompts.observe(estimate.expected_prompt_tokens / usage.prompt_tokens)
        if usage.output_tokens:
            self._outputs.observe(estimate.expected_output_tokens / usage.output_tokens)
        if len(pools) > 1:
            home, first = ended.pools[0], pools[0]
            is_long = usage.prompt_tokens + usage.output_tokens > b_short_tokens
            if is_long is (home == first):
                self._misroutes.labels(self._model, home, "long" if is_long else "short").inc()

    def _cells_of(self, tenant: str) -> tuple[CounterCell, CounterCell, CounterCell]:
        name = self._names.of_tenants(tenant)
        cells = self._of_tenant.get(name)
        if cells is None:
            cells = self._of_tenant[name] = (
                self._requests.labels(self._model, name),
                self._tokens.labels(self._model, name, "prompt"),
                self._tokens.labels(self._model, name, "output"),
            )
        return cells


# Actual minus expected: below zero where requests started sooner than told.
_ERROR_BOUNDS_S = (-60, -30, -10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 2, 5, 10, 30, 60)


class HonestyMetrics:
    """Counters and histograms of one model's estimates."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        self._model = model
        text = (
            "Estimates of their start that requests were told in the queue, the first and the last of each, "
            "by whether the start was inside the interval, before or after it."
        )
        labels = ("model", "class", "told")
        self._verdicts = counters(registry, "ewsjf_queue_estimates", text, (*labels, "verdict"))
        text = "Actual start minus the one that a waiting request was told to expect, the first and the last."
        name = "ewsjf_queue_estimate_error_seconds"
        self._errors = histograms(registry, name, text, labels, _ERROR_BOUNDS_S)
        self._cells: dict[tuple[PriorityClass, str], tuple[dict[str, CounterCell], HistogramCell]] = {}

    def __repr__(self) -> str:
        return f"<HonestyMetrics {self._model}>"

    def observe(self, honesty: Iterable[Honesty]) -> None:
        """Count what came of estimates."""
        for one in honesty:
            verdicts, errors = self._cells_of(one.priority, one.told)
            verdicts[one.verdict].inc()
            errors.observe(one.error_s)

    def _cells_of(self, priority: PriorityClass, told: str) -> tuple[dict[str, CounterCell], HistogramCell]:
        cells = self._cells.get((priority, told))
        if cells is None:
            labels = self._model, priority.value, told
            # All verdicts at once: a rate of what has not happened yet is 0, not nothing.
            verdicts = {verdict: self._verdicts.labels(*labels, verdict) for verdict in VERDICTS}
            cells = self._cells[priority, told] = verdicts, self._errors.labels(*labels)
        return cells
