"""Gauges and sums of a scheduler that are read from its core at each scrape.

- `core_figures`, `queue_figures` and others: the figures of one moment, collected on the event loop; a thread
  renders them as metric families. Labels whose values depend on traffic are bounded in number
  (`BoundedNames`).
- `PersistentCosts`: cost attribution, accumulated over all schedulers of a model. A core counts from its own
  start. The sums of its predecessors are stored here, and persisted with learned state. Metrics use the
  core's counts alone: Prometheus handles counters that restart with a process.
"""

import heapq
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import astuple
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from serve_app.core import Scheduler
from serve_app.core.accounting.costs import OTHERS, TenantTotals
from serve_app.core.accounting.waits import current_cause
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.core.routing.snapshot import Amount
from serve_app.request import PriorityClass

# As in a core, for label values and for persisted costs, whose file must not grow over the years.
_MAX_TENANTS = 1_000


class CostRow(msgspec.Struct, frozen=True):
    """Accumulated seconds of a tenant's requests of one class in a pool."""

    pool: str
    priority: str = msgspec.field(name="class")
    tenant: str
    seconds: Amount


class PersistentCosts(msgspec.Struct, frozen=True):
    """Accumulated costs of earlier schedulers since a time in seconds since the epoch.

    They are engine time, and the delay imposed on requests of other tenants.
    """

    since: Amount
    used: tuple[CostRow, ...]
    imposed: tuple[CostRow, ...]

    def plus(self, core: Scheduler) -> "PersistentCosts":
        """Return these costs plus those counted by a scheduler so far."""
        used, imposed = core.in_flight.engine_time.used, core.waits.imposed
        return PersistentCosts(self.since, _sum(self.used, used), _sum(self.imposed, imposed))

    def document(self, gpus: Mapping[str, float]) -> dict[str, Any]:
        """Return each tenant's costs by pool and class, highest first; `gpus` are those of one replica."""
        used = {astuple(row)[:3]: row.seconds for row in self.used}
        imposed = {astuple(row)[:3]: row.seconds for row in self.imposed}
        worked_s = sum(used.values())
        rows = [
            {
                "pool": pool,
                "class": priority,
                "tenant": tenant,
                "engine_seconds": seconds,
                "gpu_seconds": seconds * gpus[pool] if gpus.get(pool) else None,
                "share": seconds / worked_s if worked_s else 0.0,
                "imposed_delay_seconds": imposed.get((pool, priority, tenant), 0.0),
            }
            for (pool, priority, tenant), seconds in sorted(
                (dict.fromkeys(imposed, 0.0) | used).items(), key=lambda each: -each[1]
            )
        ]
        counted_s = max(0.0, time.time() - self.since)
        return {"since": self.since, "counted_s": counted_s, "engine_seconds": worked_s, "rows": rows}


def _sum(earlier: tuple[CostRow, ...], own: TenantTotals) -> tuple[CostRow, ...]:
    """Add up costs by pool, class and tenant; beyond the limit, the smallest are merged under one name."""
    sums = defaultdict[tuple[str, str, str], float](float)
    for row in earlier:
        sums[row.pool, row.priority, row.tenant] += row.seconds
    for (pool, priority, tenant), seconds in own.items():
        sums[pool, priority.value, tenant] += seconds
    if len(sums) > _MAX_TENANTS:
        for key in sorted(sums, key=lambda each: -sums[each])[_MAX_TENANTS:]:
            sums[(*key[:2], OTHERS)] += sums.pop(key)
    return tuple(CostRow(*key, seconds) for key, seconds in sums.items())


# Each learned partition has new names.
_MAX_LENGTH_QUEUES = 100


class BoundedNames:
    """Bounded set of label values: the first `most` names are used as they are, later ones become `other`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, name: str) -> str:
        """Return the label value for a name."""
        if name in self._known:
            return name
        if len(self._known) >= self._most:
            return OTHERS
        self._known.add(name)
        return name


@dataclass(frozen=True, slots=True)
class Names:
    """Label values of one model, consistent across all metrics."""

    of_tenants: BoundedNames = field(default_factory=lambda: BoundedNames(_MAX_TENANTS))
    of_length_queues: BoundedNames = field(default_factory=lambda: BoundedNames(_MAX_LENGTH_QUEUES))


_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
SUM = CounterMetricFamily
"""Family of a figure that only rises."""


class Figures(defaultdict[tuple[str, ...], float]):
    """One metric at one moment: values by label values, without the label `model`; missing ones are 0."""

    def __init__(self, name: str, text: str, *labels: str, family: _Family = GaugeMetricFamily) -> None:
        super().__init__(float)
        self.name, self._text, self._labels, self._family = name, text, labels, family

    def of_model(self, model: str) -> Metric:
        """Return the metric family."""
        family = self._family(self.name, self._text, labels=("model", *self._labels))
        for labels, value in self.items():
            family.add_metric((model, *labels), value)
        return family


def figure(name: str, text: str, value: float | None, family: _Family = GaugeMetricFamily) -> Figures:
    """Return a metric without labels; it has no sample if the value is None."""
    found = Figures(name, text, family=family)
    if value is not None:
        found[()] = value
    return found


def replica_figures(
    core: Scheduler, reports: Mapping[str, tuple[ReplicaSpec, ReplicaReport | None]]
) -> list[Figures]:
    """Return the figures of each replica."""
    labels = ("pool", "replica")
    sent = Figures("ewsjf_requests_in_flight", "Requests in flight on a replica.", *labels)
    text = "Share of the KV cache in use, as last reported."
    kv_usage = Figures("ewsjf_replica_kv_usage_ratio", text, *labels)
    text = "Requests in the engine's own queue, as last reported."
    waiting = Figures("ewsjf_replica_waiting", text, *labels)
    for replica_id, (spec, report) in reports.items():
        key = spec.pool, replica_id
        state = core.ledger.get(replica_id)
        sent[key] = 0 if state is None else state.in_flight
        if report is not None and report.kv_usage_ratio is not None:
            kv_usage[key] = report.kv_usage_ratio
        if report is not None and report.waiting is not None:
            waiting[key] = report.waiting
    return [sent, kv_usage, waiting]


def core_figures(core: Scheduler) -> Iterator[Figures]:
    """Yield the scheduler's own estimates, and figures of programs."""
    admission, programs = core.admission, core.programs
    errors = admission.predictor.errors
    text = "Estimated tokens dispatched per second while requests waited."
    yield figure("ewsjf_queue_drain_tokens_per_second", text, admission.predictor.drain.tokens_per_s)
    text = "Rejected requests whose retry is expected."
    yield figure("ewsjf_retry_reservations", text, len(admission.retry_reservations))
    text = "Token budget up to which the first pool is a request's home pool."
    yield figure("ewsjf_b_short_tokens", text, core.settings.routing.b_short_tokens)
    text = "Predicted minus actual queue time, mean of about the last fifty requests."
    yield figure("ewsjf_queue_wait_prediction_error_mean_seconds", text, errors.mean_s)
    text = "Absolute difference of predicted and actual queue time, mean of about the last fifty requests."
    yield figure("ewsjf_queue_wait_prediction_error_absolute_mean_seconds", text, errors.mean_absolute_s)
    text = "Requests that were admitted because they were predicted to be served in time, and expired."
    yield figure("ewsjf_queue_wait_mispredictions", text, errors.expired, SUM)
    yield figure("ewsjf_program_known", "Known agent programs.", programs.table.program_count)
    text = "Turns of programs that wait for room in the KV caches."
    yield figure("ewsjf_program_turns_waiting", text, len(programs.parked))
    yield figure("ewsjf_program_turns", "Turns of programs that have ended.", programs.turns, SUM)
    text = "Prompt tokens of these turns that were cached, as estimated."
    yield figure("ewsjf_program_saved_tokens", text, programs.saved_tokens, SUM)
    yield figure("ewsjf_program_moves", "Turns that left the replica of their context.", programs.moved, SUM)
    text = "Turns that were admitted at their starvation bound, without room."
    yield figure("ewsjf_program_forced_turns", text, programs.forced, SUM)


def queued_figures(core: Scheduler) -> list[Figures]:
    """Return the number and the size of queued requests."""
    requests = Figures("ewsjf_requests_waiting", "Queued requests.", "class")
    tokens = Figures("ewsjf_queued_tokens", "Expected tokens of queued requests.", "class")
    text = "Bytes of the prompts of queued requests: texts, and definitions of tools."
    size = Figures("ewsjf_queued_bytes", text, "class")
    classes: list[tuple[str, ...]] = [(priority.value,) for priority in PriorityClass]
    for each in (requests, tokens, size):
        each.update(dict.fromkeys(classes, 0.0))
    for scheduled in core.requests.values():
        if scheduled.queued:
            key = classes[scheduled.request.priority.rank]
            shape = scheduled.request.shape
            requests[key] += 1
            tokens[key] += scheduled.estimate.expected_tokens
            size[key] += shape.text_bytes + shape.tool_bytes
    return [requests, tokens, size]


# The heads with the longest waits show the problem; examining all would take too long.
_MAX_HEADS = 100


def queue_figures(core: Scheduler, now: float, names: Names) -> list[Figures]:
    """Return the figures of the queue at `now`."""
    labels = ("class", "length_queue")
    text = "Queued requests by length queue."
    waiting = Figures("ewsjf_length_queue_requests_waiting", text, *labels)
    text = "Queue time so far of the oldest head of a length queue."
    oldest_s = Figures("ewsjf_length_queue_oldest_wait_seconds", text, *labels)
    text = "Heads of sub-queues by home pool and wait cause, of the hundred oldest."
    blocked = Figures("ewsjf_blocked_heads", text, "pool", "cause")
    text = "Queued requests by tenant; after 1,000 tenants, further ones share the label `other`."
    tenants = Figures("ewsjf_tenant_requests_waiting", text, "tenant")
    text = "Lead of a tenant over the one with the least service, as a share of all leads in its class."
    leads = Figures("ewsjf_tenant_lead_ratio", text, "class", "tenant")
    heads: list[ScheduledRequest] = []
    for head, count in core.queue.sub_queue_heads():
        heads.append(head)
        request = head.request
        key = request.priority.value, names.of_length_queues(head.length_queue)
        waiting[key] += count
        tenants[names.of_tenants(request.tenant),] += count
        oldest_s[key] = max(oldest_s[key], now - request.arrived_at)
    for head in heapq.nsmallest(_MAX_HEADS, heads, key=lambda each: each.request.arrived_at):
        blocked[head.pools[0], current_cause(head).value] += 1
    for priority, shares in core.queue.shares.items():
        counters = shares.counters()
        least = min(counters.values(), default=0.0)
        total = sum(counters.values()) - least * len(counters)
        if total > 0:
            for tenant, value in counters.items():
                leads[priority.value, names.of_tenants(tenant)] += (value - least) / total
    return [waiting, oldest_s, blocked, tenants, leads]


STATES = ("open", "saturated", "stale", "draining", "suspended")
"""States of a replica in the scheduler; only open ones receive requests."""


def pool_figures(core: Scheduler, now: float) -> list[Figures]:
    """Return the figures of every pool at `now`."""
    text = "Replicas by state: open, saturated, stale, draining or suspended."
    replicas = Figures("ewsjf_pool_replicas", text, "pool", "state")
    text = "Share of a pool's open and saturated replicas that are saturated."
    saturation = Figures("ewsjf_pool_saturation_ratio", text, "pool")
    text = "In-flight requests of a pool over the concurrency of its engines."
    capacity = Figures("ewsjf_pool_capacity_ratio", text, "pool")
    text = "Share of a pool's KV cache at the forecast peak; absent if its engines do not report the size."
    reserved = Figures("ewsjf_pool_kv_reserved_ratio", text, "pool")
    for pool in core.settings.routing.pools:
        members = [state for state in core.ledger.of_pool(pool) if state.joined]
        counts = Counter(state_of(state, core, now) for state in members)
        for state in STATES:
            replicas[pool, state] = counts[state]
        if working := counts["open"] + counts["saturated"]:
            saturation[pool,] = counts["saturated"] / working
        if sequences := sum(each.likely_num_seqs for each in members):
            capacity[pool,] = sum(each.in_flight for each in members) / sequences
        sized = [each for each in members if each.spec.kv_tokens is not None]
        if kv_tokens := sum(each.kv_budget for each in sized):
            reserved[pool,] = sum(each.peak_tokens for each in sized) / kv_tokens
    return [replicas, saturation, capacity, reserved]


def state_of(state: ReplicaState, core: Scheduler, now: float) -> str:
    """Return the state of a connected replica, one of `STATES`; a lost one is never open."""
    if state.report is not None and state.report.draining:
        return "draining"
    if not state.is_alive:
        return "stale"
    if not state.is_usable:
        return "suspended"
    is_open = core.ledger.open.is_open(state, now) and state.free_tokens > 0
    return "open" if is_open else "saturated"


def cost_figures(core: Scheduler, names: Names) -> list[Figures]:
    """Return the accumulated engine time and imposed delay."""
    labels = ("pool", "class", "tenant")
    text = "Engine time of a tenant's requests that have ended in an engine."
    used = Figures("ewsjf_tenant_engine_seconds", text, *labels, family=SUM)
    text = "Delay that a tenant's requests imposed on other tenants, summed over the delayed requests."
    imposed = Figures("ewsjf_tenant_imposed_delay_seconds", text, *labels, family=SUM)
    for sums, totals in ((used, core.in_flight.engine_time.used), (imposed, core.waits.imposed)):
        for (pool, priority, tenant), seconds in totals.items():
            sums[pool, priority.value, names.of_tenants(tenant)] += seconds
    return [used, imposed]
