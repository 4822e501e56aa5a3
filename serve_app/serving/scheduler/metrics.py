"""Prometheus metrics of one model's scheduler.

- `SchedulerMetrics`: the counters and histograms.
- `DecodeStalls`: the longest gap between two pieces of each streamed answer, and its cause.
- `PrefixCheck`: cached tokens that the prefix index predicted, against those that engines reported.

`SchedulerMetrics`. The registry is separate from Ray's; a gateway's `/metrics` fetches the text over the
control channel. Gauges (`gauges.py`) are read at each scrape, so only counters and histograms cost anything
per event. The text is rendered in a thread from the figures of one moment, because with 1,000 replicas it
takes almost 0.1 s.

Engines count tokens; a request that ends without their count is only counted by tenant.

`DecodeStalls`. A gateway measures the gap and reports it with the end of the request. The scheduler knows
which prefills its replica computed at the time. Clocks are not compared: the gap's end is an age.

| cause      | meaning                                                                                  |
|------------|------------------------------------------------------------------------------------------|
| `prefill`  | a prefill was in flight beside it on its replica; the one with the most tokens counts    |
| `kv_cache` | no prefill, and the replica last reported a full KV cache: engines then preempt requests |
| `other`    | neither: a pause of the engine, the network, or work that this scheduler did not send    |

`PrefixCheck`. Prefix affinity is worth as much as its index is right. At the end of a request its engine
states how many prompt tokens it had cached. Engines that never state any, as vLLM without
`--enable-prompt-tokens-details`, are left out: their zero means unknown.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from serve_app.core.accounting.wait_causes import WaitBreakdown
from serve_app.core.commands import Conclude, Dispatch, ReportStale
from serve_app.core.events import DispatchFailed, DispatchFailure, Finished, FirstToken, ReplicaLost
from serve_app.core.outlook.watched import VERDICTS, CalibrationError
from serve_app.core.request import ScheduledRequest, TargetState
from serve_app.core.routing.prefill_cost import DecayingRate
from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from serve_app.serving.metric_cells import Cells, CounterCell, HistogramCell, counters, histograms
from serve_app.serving.process import ProcessMetrics
from serve_app.serving.scheduler.gauges import Figures, Names
from serve_app.serving.scheduler.journal import Entry, RequestHistory, Stall, StallCause

# Prefills that are remembered for each replica: about a second of short ones. Those of long prompts, which
# cause stalls, are fewer.
_REMEMBERED = 128
_FULL = 0.95
# Least share of a gap during which a prefill must have been in flight: messages take some milliseconds.
_LEAST_OVERLAP = 0.1


class _Prefill(NamedTuple):
    request_id: str
    began_at: float
    ended_at: float
    tokens: int


@dataclass(slots=True)
class _Prefills:
    """Prefills of one replica: those in flight by request, and the last that have ended."""

    open: dict[str, _Prefill] = field(default_factory=dict)
    ended: deque[_Prefill] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class DecodeStalls:
    """Observer of dispatches, first tokens and ends.

    Args:
        gaps: histogram by model, pool and cause.
    """

    def __init__(self, model: str, history: RequestHistory, gaps: Cells[HistogramCell]) -> None:
        self._model = model
        self._history = history
        self._gaps = gaps
        self._replicas: dict[str, _Prefills] = {}

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handlers of what begins and ends a prefill, and of the ends of requests."""
        return {
            Dispatch: self._on_dispatch,
            FirstToken: self._on_first_token,
            DispatchFailed: lambda entry: self._end(entry.event.replica_id, entry.event.request_id, None),
            ReplicaLost: self._on_loss,
            Conclude: self._on_conclusion,
        }

    def _on_loss(self, entry: Entry) -> None:
        assert isinstance(entry.event, ReplicaLost)
        self._replicas.pop(entry.event.replica_id, None)

    def _on_dispatch(self, entry: Entry, command: Dispatch, scheduled: ScheduledRequest) -> None:
        prefills = self._replicas.setdefault(command.replica_id, _Prefills())
        prefills.open[command.request_id] = _Prefill(
            command.request_id, entry.now, math.inf, scheduled.prefill_tokens
        )

    def _on_first_token(self, entry: Entry) -> None:
        scheduled = entry.scheduled
        if scheduled is not None and scheduled.replica_id is not None:
            self._end(scheduled.replica_id, scheduled.request.request_id, entry.now)

    def _end(self, replica_id: str, request_id: str, ended_at: float | None) -> None:
        """End a prefill; without a time, it is forgotten."""
        prefills = self._replicas.get(replica_id)
        known = None if prefills is None else prefills.open.pop(request_id, None)
        if prefills is not None and known is not None and ended_at is not None:
            prefills.ended.append(known._replace(ended_at=ended_at))

    def _on_conclusion(self, entry: Entry, command: Conclude, scheduled: ScheduledRequest) -> None:
        dispatch, event = scheduled.dispatch, entry.event
        if dispatch is None:
            return
        # An answer that is not streamed ends with its first token.
        self._end(dispatch.replica_id, command.request_id, entry.now)
        if not isinstance(event, Finished) or event.gap is None:
            return
        ended_at = entry.now - event.gap.ended_ago_s
        stall = self._stall(entry, scheduled, dispatch.replica_id, event.gap.seconds, ended_at)
        self._gaps[self._model, dispatch.pool, stall.cause].observe(stall.seconds)
        if (known := self._history.find(command.request_id)) is not None:
            known.stall = stall

    def _stall(
        self, entry: Entry, scheduled: ScheduledRequest, replica_id: str, seconds: float, ended_at: float
    ) -> Stall:
        prefills, own_id = self._replicas.get(replica_id) or _Prefills(), scheduled.request.request_id
        least_s, began_at = _LEAST_OVERLAP * seconds, ended_at - seconds
        beside = [
            each.tokens
            for each in (*prefills.open.values(), *prefills.ended)
            if min(each.ended_at, ended_at) - max(each.began_at, began_at) >= least_s
            and each.request_id != own_id
        ]
        if beside:
            return Stall(seconds, StallCause.PREFILL, max(beside))
        replica = entry.core.ledger.get(replica_id)
        report = None if replica is None else replica.report
        is_full = report is not None and (report.kv_usage_ratio or 0.0) >= _FULL
        return Stall(seconds, StallCause.KV_CACHE if is_full else StallCause.OTHER)


# Time constant of what operators see: long enough for many requests, short enough for a change of engines.
_RECENT_S = 600.0


class _RecentSums:
    """Decaying sums by key and name."""

    def __init__(self, time_constant_s: float) -> None:
        self._sums = defaultdict[str, defaultdict[str, DecayingRate]](
            lambda: defaultdict(lambda: DecayingRate(time_constant_s, 0.0))
        )

    def add(self, key: str, now: float, **amounts: float) -> None:
        """Add to the sums of a key."""
        for name, amount in amounts.items():
            self._sums[key][name].add(amount, now)

    def amounts(self, now: float) -> dict[str, dict[str, float]]:
        """Return the sums at `now`."""
        return {
            key: {name: each.amount(now) for name, each in sums.items()} for key, sums in self._sums.items()
        }


class PrefixCheck:
    """Observer of the ends of requests.

    Args:
        tokens: counter by model, pool and kind (`predicted`, `reported`).
        errors: histogram by model and pool: predicted minus reported tokens, as a share of the prompt.
    """

    def __init__(self, model: str, tokens: Cells[CounterCell], errors: Cells[HistogramCell]) -> None:
        self._model = model
        self._tokens = tokens
        self._errors = errors
        self._reporting: set[str] = set()
        self._recent = _RecentSums(_RECENT_S)

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handler of the ends of requests."""
        return {Conclude: self._on_conclusion}

    def _on_conclusion(self, entry: Entry, command: Conclude, scheduled: ScheduledRequest) -> None:
        usage, dispatch = scheduled.usage, scheduled.dispatch
        is_whole = isinstance(entry.event, Finished) and command.conclusion.outcome is Outcome.COMPLETED
        if not is_whole or usage is None or dispatch is None or not usage.prompt_tokens:
            return
        if usage.cached_tokens:
            self._reporting.add(dispatch.replica_id)
        elif dispatch.replica_id not in self._reporting:
            return
        predicted, reported = min(scheduled.cached_tokens, usage.prompt_tokens), usage.cached_tokens
        if not (predicted or reported):
            return
        self._tokens[self._model, dispatch.pool, "predicted"].inc(predicted)
        self._tokens[self._model, dispatch.pool, "reported"].inc(reported)
        self._errors[self._model, dispatch.pool].observe((predicted - reported) / usage.prompt_tokens)
        self._recent.add(
            dispatch.pool,
            entry.now,
            requests=1,
            prompt_tokens=usage.prompt_tokens,
            predicted_tokens=predicted,
            reported_tokens=reported,
        )

    def describe(self, now: float) -> dict[str, dict[str, float]]:
        """Return the requests, prompt tokens and cached tokens of about the last ten minutes, by pool."""
        return self._recent.amounts(now)


# From a dispatch without a wait to the timeouts of batch work.
_WAIT_BOUNDS_S = (0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
# Differences of predicted or estimated and actual waits, with their sign.
_ERROR_BOUNDS_S = (-60, -30, -10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 2, 5, 10, 30, 60)
# Estimated over actual: 1 is exact, 2 is twice the actual value.
_RATIO_BOUNDS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2, 4, 10)
# From an event that changes nothing to a queue of thousands.
_DECISION_BOUNDS_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01, 0.05, 0.25)
# Predicted minus reported cached tokens, as a share of the prompt.
_PREFIX_ERROR_BOUNDS = (-0.75, -0.5, -0.25, -0.1, -0.02, 0.02, 0.1, 0.25, 0.5, 0.75)


# Time constant of the errors of predictions, and the shortest wait, predicted or actual, that counts.
_RECENT_WAITS_S, _LEAST_WAIT_S = 120.0, 1.0

# Ends without a verdict on the first token: it was not observed, or not due.
_NO_VERDICT = frozenset(
    {
        Outcome.COMPLETED,
        Outcome.CANCELLED,
        Outcome.REJECTED_INVALID,
        Outcome.REJECTED_TOO_LONG,
        Outcome.REJECTED_UNKNOWN_MODEL,
        Outcome.REJECTED_RATE_LIMITED,
    }
)
# From one step of a small model to a preemption.
_GAP_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class SchedulerMetrics(Collector):
    """Metrics of one scheduler.

    Args:
        names: bounds the label values of tenants and length queues.
        more: metrics that follow on the page.
    """

    def __init__(self, model: str, names: Names | None = None, more: CollectorRegistry | None = None) -> None:
        self._model = model
        self.names = names or Names()
        self._registry = CollectorRegistry()
        self._make_counters()
        self._make_histograms()
        self._predictions = _RecentSums(_RECENT_WAITS_S)
        # Of the moment of the latest page.
        self._figures: Sequence[Figures] = ()
        self._registry.register(self)
        self._registry.register(ProcessMetrics({"process": "scheduler", "model": model}))
        if more is not None:
            self._registry.register(more)

    def __repr__(self) -> str:
        return f"<SchedulerMetrics {self._model}>"

    def _make_counters(self) -> None:
        counter, single = self._counter, self._single
        self._dispatches = counter("ewsjf_dispatches", "Requests dispatched.", "pool")
        text = "Queue time of requests that have left the queue, by cause."
        self._wait_causes = counter("ewsjf_queue_wait_cause_seconds", text, "class", "cause")
        self._spills = counter(
            "ewsjf_spills", "Requests dispatched to another pool than their home pool.", "pool"
        )
        text = "Requests put back, by failure."
        self._put_backs = counter("ewsjf_put_backs", text, "failure")
        for failure in DispatchFailure:
            self._put_backs[self._model, failure].inc(0)
        text = "Concluded requests."
        self._concluded = counter("ewsjf_requests_concluded", text, "class", "outcome")
        self._stale_reports = single(
            "ewsjf_stale_reports", "Times that the load report of a replica became stale."
        )
        text = "Changes of the learned length queues."
        self._partition_changes = counter("ewsjf_partition_changes", text, "reason")
        text = "Changes of tuned values, including the start and the end of trials."
        self._retunings = single("ewsjf_retunings", text)
        self._errors = single("ewsjf_scheduler_errors", "Events that the scheduler core failed to handle.")
        text = "Events that an observer of the scheduler, such as its receipts, failed to record."
        self._observer_errors = counter("ewsjf_observer_errors", text, "observer")
        text = (
            "Requests whose actual tokens belong to another pool: `long` ones with the first pool as home, "
            "and `short` ones with another home pool."
        )
        self._misroutes = counter("ewsjf_misroutes", text, "pool", "actual")
        text = "Cached prompt tokens of completed requests, as predicted at dispatch and as engines reported."
        self.prefix_tokens = counter("ewsjf_prefix_cached_tokens", text, "pool", "kind")
        text = (
            "Latency targets of requests that have ended, by limit (`ttft`, `tpot`) and result: `met`, "
            "`missed`, or `refused` on arrival."
        )
        self._targets = counter("ewsjf_latency_targets", text, "class", "tenant", "target", "result")
        text = "Tokens by tenant, as counted by the engines."
        self._tenant_tokens = counter("ewsjf_tenant_tokens", text, "tenant", "kind")
        text = "Requests that ended in an engine, by tenant."
        self._tenant_requests = counter("ewsjf_tenant_requests", text, "tenant")
        text = (
            "Expected starts sent to queued requests, the first and the last of each, by whether the request "
            "started inside the interval, before or after it."
        )
        self._start_verdicts = counter("ewsjf_queue_estimates", text, "class", "estimate", "verdict")

    def _make_histograms(self) -> None:
        histogram = self._histogram
        text = "Queue time until dispatch."
        self._wait = histogram("ewsjf_queue_wait_seconds", text, _WAIT_BOUNDS_S, "pool", "class")
        text = "Queue time until dispatch, by length queue."
        name = "ewsjf_length_queue_wait_seconds"
        # Starts at 5 ms, because there may be a hundred queues.
        self._length_queue_wait = histogram(name, text, _WAIT_BOUNDS_S[1:], "length_queue")
        text = "Predicted minus actual queue time of dispatched requests that had a prediction."
        name = "ewsjf_queue_wait_prediction_error_seconds"
        self._predicted_error = histogram(name, text, _ERROR_BOUNDS_S, "class")
        text = "Actual minus expected start, of the first and the last estimate sent to a queued request."
        name = "ewsjf_queue_estimate_error_seconds"
        self._start_error = histogram(name, text, _ERROR_BOUNDS_S, "class", "estimate")
        text = "Estimated over actual tokens of ended requests; 1 is exact."
        estimates = histogram("ewsjf_estimate_ratio", text, _RATIO_BOUNDS, "kind")
        self._estimates = {kind: estimates[self._model, kind] for kind in ("prompt", "output")}
        text = (
            "Predicted minus reported cached tokens of completed requests, as a share of the prompt, on "
            "engines that report them."
        )
        name = "ewsjf_prefix_prediction_error_ratio"
        self.prefix_errors = histogram(name, text, _PREFIX_ERROR_BOUNDS, "pool")
        text = "Longest gap between two pieces of a streamed answer, by cause."
        self.decode_gaps = histogram("ewsjf_longest_gap_seconds", text, _GAP_BOUNDS_S, "pool", "cause")
        # The gateways export two other stages under the same name.
        text = "Overhead of the application per request, by stage."
        overhead = histogram("ewsjf_overhead_seconds", text, _DECISION_BOUNDS_S, "stage")
        self._decisions = overhead[self._model, "decide"]

    def _counter(self, name: str, text: str, *labels: str) -> Cells[CounterCell]:
        return counters(self._registry, name, text, ("model", *labels))

    def _single(self, name: str, text: str) -> CounterCell:
        """Return a counter with the model label only; it is exported as 0 before the first event."""
        return self._counter(name, text)[(self._model,)]

    def _histogram(self, name: str, text: str, bounds: Sequence[float], *labels: str) -> Cells[HistogramCell]:
        return histograms(self._registry, name, text, ("model", *labels), bounds)

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handlers of what is counted."""
        return {
            Entry: lambda entry: self._decisions.observe(entry.took_s),
            Finished: self._on_finish,
            DispatchFailed: lambda entry: self._put_backs[self._model, entry.event.failure].inc(),
            Dispatch: self._on_dispatch,
            Conclude: self._on_conclusion,
            ReportStale: lambda *_: self._stale_reports.inc(),
        }

    def on_end(
        self, ended: ScheduledRequest, outcome: Outcome, pools: tuple[str, ...], b_short_tokens: int
    ) -> None:
        """Count a request that has ended in an engine.

        Args:
            pools: pools of the model, the shortest first.
            b_short_tokens: budget up to which the first pool is home.
        """
        model, tenant = self._model, self.names.of_tenants(ended.request.tenant)
        self._tenant_requests[model, tenant].inc()
        prompt, output = (self._tenant_tokens[model, tenant, kind] for kind in ("prompt", "output"))
        usage, estimate = ended.usage, ended.estimate
        if usage is None:
            return
        prompt.inc(usage.prompt_tokens)
        output.inc(usage.output_tokens)
        # The count of an incomplete answer does not measure the estimate.
        if outcome is not Outcome.COMPLETED:
            return
        for kind, expected, actual in (
            ("prompt", estimate.expected_prompt_tokens, usage.prompt_tokens),
            ("output", estimate.expected_output_tokens, usage.output_tokens),
        ):
            if actual:
                self._estimates[kind].observe(expected / actual)
        if len(pools) > 1:
            home, first = ended.pools[0], pools[0]
            is_long = usage.prompt_tokens + usage.output_tokens > b_short_tokens
            if is_long is (home == first):
                self._misroutes[model, home, "long" if is_long else "short"].inc()

    def on_calibration_errors(self, errors: Iterable[CalibrationError]) -> None:
        """Record the errors of estimates that waiting requests received."""
        for one in errors:
            labels = self._model, one.priority, one.estimate
            # Create all verdicts at once, so that the rate of one that never occurred is 0 instead of absent.
            verdicts = {verdict: self._start_verdicts[(*labels, verdict)] for verdict in VERDICTS}
            verdicts[one.verdict].inc()
            self._start_error[labels].observe(one.error_s)

    def on_partition_change(self, reason: str) -> None:
        """Count a change of the learned partition."""
        self._partition_changes[self._model, reason].inc()

    def on_retuning(self) -> None:
        """Count a change of tuned values."""
        self._retunings.inc()

    def on_core_failure(self) -> None:
        """Count an error of the core."""
        self._errors.inc()

    def on_observer_error(self, observer: str) -> None:
        """Count an error of an observer of the journal."""
        self._observer_errors[self._model, observer].inc()

    def exposition(self, figures: Sequence[Figures]) -> str:
        """Return all metrics in the Prometheus text format; thread-safe, but not for concurrent calls."""
        self._figures = figures
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; prometheus_client calls this for each page."""
        return (each.of_model(self._model) for each in self._figures)

    def _on_finish(self, entry: Entry) -> None:
        if entry.scheduled is not None:
            assert isinstance(entry.event, Finished)
            routing = entry.core.settings.routing
            self.on_end(entry.scheduled, entry.event.outcome, routing.pools, routing.b_short_tokens)

    def _on_conclusion(self, entry: Entry, command: Conclude, scheduled: ScheduledRequest) -> None:
        if scheduled.target is not None:
            self._on_target(entry, command.conclusion.outcome, scheduled, scheduled.target)
        priority = scheduled.request.priority
        self._concluded[self._model, priority, command.conclusion.outcome].inc()
        if command.waited is not None:
            self._on_wait(command.waited, priority)

    def _on_target(
        self, entry: Entry, outcome: Outcome, scheduled: ScheduledRequest, target: TargetState
    ) -> None:
        """Count the limits of a request that has ended, unless its client left before they were due."""
        request, limits = scheduled.request, target.limits
        found: dict[str, str] = {}
        if outcome is Outcome.REJECTED_DEADLINE_UNMEETABLE and limits.refuse:
            stated = {"ttft": limits.ttft_s, "tpot": limits.tpot_s}
            found = {name: "refused" for name, limit_s in stated.items() if limit_s is not None}
        elif target.is_met is not None:
            found["ttft"] = "met" if target.is_met else "missed"
        elif limits.ttft_s is not None and outcome not in _NO_VERDICT:
            found["ttft"] = "missed"
        times = entry.event.times if isinstance(entry.event, Finished) else None
        if limits.tpot_s is not None and times is not None and scheduled.usage is not None:
            tpot_s = times.tpot_s(scheduled.usage.output_tokens)
            if tpot_s is not None:
                found["tpot"] = "met" if tpot_s <= limits.tpot_s else "missed"
        tenant = self.names.of_tenants(request.tenant)
        for name, result in found.items():
            self._targets[self._model, request.priority, tenant, name, result].inc()

    def predictions(self, now: float) -> dict[str, dict[str, float]]:
        """Return the predicted queue times of about the last two minutes by class: number, and means."""
        found = {}
        for priority, amounts in self._predictions.amounts(now).items():
            if (count := amounts.pop("requests")) >= 1:
                means = {name: amount / count for name, amount in amounts.items()}
                found[priority] = {"requests": count, **means}
        return found

    def prediction_errors(self, now: float) -> Figures:
        """Return the errors of predicted queue times by class."""
        text = (
            "Mean absolute difference of predicted and actual queue time, over the mean actual one, of about "
            "the last two minutes. Counts requests that waited a second, or were predicted to."
        )
        ratios = Figures("ewsjf_queue_wait_prediction_error_ratio", text, "class")
        for priority, recent in self.predictions(now).items():
            if recent["waited_s"]:
                ratios[priority,] = recent["error_s"] / recent["waited_s"]
        return ratios

    def _on_dispatch(self, entry: Entry, command: Dispatch, scheduled: ScheduledRequest) -> None:
        model, priority, prediction = self._model, scheduled.request.priority, scheduled.prediction
        self._dispatches[model, command.pool].inc()
        self._wait[model, command.pool, priority].observe(command.queue_wait_s)
        length_queue = self.names.of_length_queues(command.length_queue)
        self._length_queue_wait[model, length_queue].observe(command.queue_wait_s)
        if scheduled.pools[0] != command.pool:
            self._spills[model, command.pool].inc()
        if command.waited is not None:
            self._on_wait(command.waited, priority)
        if prediction is not None:
            predicted_s, waited_s = prediction.wait_s, scheduled.dispatched_at - prediction.at
            self._predicted_error[model, priority].observe(predicted_s - waited_s)
            if max(predicted_s, waited_s) >= _LEAST_WAIT_S:
                self._predictions.add(
                    priority.value,
                    entry.now,
                    requests=1,
                    predicted_s=predicted_s,
                    waited_s=waited_s,
                    error_s=abs(predicted_s - waited_s),
                )

    def _on_wait(self, waited: WaitBreakdown, priority: PriorityClass) -> None:
        for cause, nanoseconds in waited.causes.items():
            self._wait_causes[self._model, priority, cause].inc(nanoseconds / 1e9)
