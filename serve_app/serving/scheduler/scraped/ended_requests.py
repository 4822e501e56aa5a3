"""What requests show once they have ended: errors of estimates, wrong routes, and what tenants used.

Engines count tokens; without their count a request shows nothing here but its tenant.
"""

from prometheus_client import CollectorRegistry

from serve_app.errors import Outcome
from serve_app.scheduling.request import ScheduledRequest
from serve_app.serving.metric_cells import CounterCell, HistogramCell, counters, histograms
from serve_app.serving.scheduler.scraped.labels import Names

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
