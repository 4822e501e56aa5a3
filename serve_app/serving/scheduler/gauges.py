"""Gauges and sums of a scheduler that are read from its core at each scrape; reading changes nothing.

A `look_at_...` function takes the figures of one moment on the event loop, and a collector writes them as
metric families in a thread. Labels whose values come from traffic are bounded in number (`BoundedNames`).
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_app.core import Scheduler
from serve_app.core.accounting.waits import waits_for
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica_state import ReplicaState

OTHERS = "other"
_MOST_TENANTS = 1_000
# Queues that are learned anew have new names.
_MOST_LENGTH_QUEUES = 100


class BoundedNames:
    """The first so many names as they are; all that come later are `other`.

    Args:
        most: how many names there may be besides `other`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, name: str) -> str:
        """The label for a name."""
        if name in self._known:
            return name
        if len(self._known) >= self._most:
            return OTHERS
        self._known.add(name)
        return name


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one model in metrics: each means the same in all of them."""

    of_tenants: BoundedNames = field(default_factory=lambda: BoundedNames(_MOST_TENANTS))
    of_length_queues: BoundedNames = field(default_factory=lambda: BoundedNames(_MOST_LENGTH_QUEUES))


# The heads that have waited longest show what is wrong; asking after all would take the scheduler's time.
_MOST_HEADS = 100


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """The queue at one moment.

    Attributes:
        waiting: requests, by class and length queue.
        oldest_s: wait of the head that came first, by class and length queue.
        blocked: heads of sub-queues, by their home pool and what they wait for.
        tenants_waiting: requests, by tenant.
        served: each tenant's share of the service of its class so far, weights taken into account.
    """

    waiting: dict[tuple[str, str], int] = field(default_factory=dict)
    oldest_s: dict[tuple[str, str], float] = field(default_factory=dict)
    blocked: dict[tuple[str, str], int] = field(default_factory=dict)
    tenants_waiting: dict[str, int] = field(default_factory=dict)
    served: dict[tuple[str, str], float] = field(default_factory=dict)


def look_at_queue(core: Scheduler, now: float) -> QueueFigures:
    """The figures at `now`; changes nothing."""
    figures = QueueFigures()
    heads: list[ScheduledRequest] = []
    waiting, tenants = Counter[tuple[str, str]](), Counter[str]()
    for head, count in core.queue.sub_queue_heads():
        heads.append(head)
        key = head.request.priority.value, head.length_queue
        waiting[key] += count
        tenants[head.request.tenant] += count
        figures.oldest_s[key] = max(figures.oldest_s.get(key, 0.0), now - head.request.arrived_at)
    figures.waiting.update(waiting)
    figures.tenants_waiting.update(tenants)
    blocked = Counter[tuple[str, str]]()
    for head in heapq.nsmallest(_MOST_HEADS, heads, key=lambda each: each.request.arrived_at):
        blocked[head.pools[0], waits_for(head).value] += 1
    figures.blocked.update(blocked)
    for priority, shares in core.queue.shares.items():
        counters = shares.counters()
        least = min(counters.values(), default=0.0)
        total = sum(counters.values()) - least * len(counters)
        if total > 0:
            figures.served.update(
                ((priority.value, tenant), (value - least) / total) for tenant, value in counters.items()
            )
    return figures


class QueueGauges(Collector):
    """The queue as it was last looked at."""

    def __init__(self, model: str, names: Names) -> None:
        self._model = model
        self.figures = QueueFigures()
        self._queues, self._tenants = names.of_length_queues, names.of_tenants

    def __repr__(self) -> str:
        return f"<QueueGauges {self._model}>"

    def collect(self) -> Iterator[Metric]:
        """Yield the families; prometheus_client asks for them at each page."""
        figures = self.figures
        labels = ("model", "class", "length_queue")
        text = "Requests in a length queue."
        waiting = GaugeMetricFamily("ewsjf_length_queue_requests_waiting", text, labels=labels)
        counts = Counter[tuple[str, str]]()
        for (priority, name), count in figures.waiting.items():
            counts[priority, self._queues(name)] += count
        for key, count in counts.items():
            waiting.add_metric((self._model, *key), count)
        yield waiting
        text = "How long the oldest head of a length queue has waited."
        oldest = GaugeMetricFamily("ewsjf_length_queue_oldest_wait_seconds", text, labels=labels)
        ages: dict[tuple[str, str], float] = {}
        for (priority, name), age_s in figures.oldest_s.items():
            key = priority, self._queues(name)
            ages[key] = max(ages.get(key, 0.0), age_s)
        for key, age_s in ages.items():
            oldest.add_metric((self._model, *key), age_s)
        yield oldest
        yield self._blocked()
        yield from self._of_tenants()

    def _blocked(self) -> Metric:
        text = "Heads of sub-queues by home pool and what they wait for, of the hundred that came first."
        blocked = GaugeMetricFamily("ewsjf_blocked_heads", text, labels=("model", "pool", "cause"))
        for (pool, cause), count in self.figures.blocked.items():
            blocked.add_metric((self._model, pool, cause), count)
        return blocked

    def _of_tenants(self) -> Iterator[Metric]:
        text = "Requests in the queue, by tenant; after 1,000 tenants, further ones share the label `other`."
        waiting = GaugeMetricFamily("ewsjf_tenant_requests_waiting", text, labels=("model", "tenant"))
        counts = Counter[str]()
        for tenant, count in self.figures.tenants_waiting.items():
            counts[self._tenants(tenant)] += count
        for tenant, count in counts.items():
            waiting.add_metric((self._model, tenant), count)
        yield waiting
        text = "Service that a tenant is ahead of the one with least, as a share of that of its class."
        labels = ("model", "class", "tenant")
        ahead = GaugeMetricFamily("ewsjf_tenant_lead_ratio", text, labels=labels)
        shares: dict[tuple[str, str], float] = {}
        for (priority, tenant), share in self.figures.served.items():
            key = priority, self._tenants(tenant)
            shares[key] = shares.get(key, 0.0) + share
        for key, share in shares.items():
            ahead.add_metric((self._model, *key), share)
        yield ahead


STATES = ("open", "saturated", "stale", "draining", "suspended")
"""What a replica can be to the scheduler; only an open one is sent requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """A pool at one moment.

    Attributes:
        replicas: connected ones, by state.
        in_flight: requests sent.
        sequences: requests that its engines run at once, as stated, learned or assumed.
        kv_tokens: KV tokens that may be reserved; 0 where no engine tells the size of its cache.
        reserved_tokens: reserved of these.
    """

    replicas: dict[str, int]
    in_flight: int
    sequences: int
    kv_tokens: int
    reserved_tokens: int

    @property
    def saturation_ratio(self) -> float | None:
        """Share of the replicas that work and take nothing more; None without any that works."""
        works = self.replicas["open"] + self.replicas["saturated"]
        return self.replicas["saturated"] / works if works else None


def look_at_pools(core: Scheduler, now: float) -> dict[str, PoolLoad]:
    """The figures of every pool at `now`; changes nothing."""
    return {
        pool: _figures([state for state in core.ledger.of_pool(pool) if state.joined], core, now)
        for pool in core.settings.routing.pools
    }


def _figures(members: list[ReplicaState], core: Scheduler, now: float) -> PoolLoad:
    replicas = dict.fromkeys(STATES, 0)
    for state in members:
        replicas[_state_of(state, core, now)] += 1
    telling = [state for state in members if state.spec.kv_tokens is not None]
    return PoolLoad(
        replicas=replicas,
        in_flight=sum(state.in_flight for state in members),
        sequences=sum(state.likely_num_seqs for state in members),
        kv_tokens=sum(state.kv_budget for state in telling),
        reserved_tokens=sum(state.held_tokens for state in telling),
    )


def _state_of(state: ReplicaState, core: Scheduler, now: float) -> str:
    if state.report is not None and state.report.draining:
        return "draining"
    if state.stale or state.report is None:
        return "stale"
    if not state.is_usable:
        return "suspended"
    is_open = core.ledger.open.is_open(state, now) and state.free_tokens > 0
    return "open" if is_open else "saturated"


class PoolGauges(Collector):
    """The pools as they were last looked at."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.pools: dict[str, PoolLoad] = {}

    def __repr__(self) -> str:
        return f"<PoolGauges {self._model}>"

    def collect(self) -> Iterator[Metric]:
        """Yield the families; prometheus_client asks for them at each page."""
        labels = ("model", "pool")
        text = "Replicas by what they are to the scheduler: open, saturated, stale, draining or suspended."
        replicas = GaugeMetricFamily("ewsjf_pool_replicas", text, labels=(*labels, "state"))
        text = "Share of the working replicas of a pool that take nothing more."
        saturation = GaugeMetricFamily("ewsjf_pool_saturation_ratio", text, labels=labels)
        text = "Requests sent to a pool, over those that its engines run at once."
        capacity = GaugeMetricFamily("ewsjf_pool_capacity_ratio", text, labels=labels)
        text = "KV cache of a pool that is reserved for requests; none where engines do not tell its size."
        reserved = GaugeMetricFamily("ewsjf_pool_kv_reserved_ratio", text, labels=labels)
        for pool, figures in self.pools.items():
            values = (self._model, pool)
            for state, count in figures.replicas.items():
                replicas.add_metric((*values, state), count)
            if (ratio := figures.saturation_ratio) is not None:
                saturation.add_metric(values, ratio)
            if figures.sequences:
                capacity.add_metric(values, figures.in_flight / figures.sequences)
            if figures.kv_tokens:
                reserved.add_metric(values, figures.reserved_tokens / figures.kv_tokens)
        yield from (replicas, saturation, capacity, reserved)


Row = tuple[str, str, str, float]
"""Pool, class, tenant, and seconds so far."""


@dataclass(frozen=True, slots=True)
class CostFigures:
    """The sums at one moment.

    Attributes:
        used: time of engines.
        imposed: delay of other tenants' requests.
    """

    used: tuple[Row, ...] = ()
    imposed: tuple[Row, ...] = ()


def look_at_costs(core: Scheduler) -> CostFigures:
    """The sums as they are now; changes nothing."""
    used, imposed = (
        tuple((pool, priority.value, tenant, seconds) for pool, priority, tenant, seconds in totals)
        for totals in (core.in_flight.engine_time.used, core.waits.imposed)
    )
    return CostFigures(used, imposed)


class CostCounters(Collector):
    """The sums as they were last looked at."""

    def __init__(self, model: str, names: Names) -> None:
        self._model = model
        self._tenants = names.of_tenants
        self.figures = CostFigures()

    def __repr__(self) -> str:
        return f"<CostCounters {self._model}>"

    def collect(self) -> Iterator[Metric]:
        """Yield both families; prometheus_client asks for them at each page."""
        text = "Time that engines worked on the requests of a tenant that have left them."
        yield self._family("ewsjf_tenant_engine_seconds", text, self.figures.used)
        text = "Time for which requests of a tenant kept those of others waiting, summed over these."
        yield self._family("ewsjf_tenant_imposed_delay_seconds", text, self.figures.imposed)

    def _family(self, name: str, text: str, rows: tuple[Row, ...]) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model", "pool", "class", "tenant"))
        sums = defaultdict[tuple[str, str, str], float](float)
        for pool, priority, tenant, seconds in rows:
            sums[pool, priority, self._tenants(tenant)] += seconds
        for key, seconds in sums.items():
            family.add_metric((self._model, *key), seconds)
        return family


class TunerFigures(Collector):
    """The tuner's counts as it last told them.

    Attributes:
        shown: what it told, see `ParameterLoop.document`; empty without a tuner.
        frozen: nothing may be tried.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.shown: Mapping[str, Any] = {}
        self.frozen = False

    def __repr__(self) -> str:
        return f"<TunerFigures {self._model}>"

    def collect(self) -> Iterator[Metric]:
        """Yield the families; prometheus_client asks for them at each page."""
        counts: Mapping[str, Any] = self.shown.get("counts", {})
        text = "Searches of the tuner that ended."
        searches = CounterMetricFamily("ewsjf_tuner_searches", text, labels=("model",))
        text = "Candidates that the tuner tried in its twin."
        trials = CounterMetricFamily("ewsjf_tuner_trials", text, labels=("model",))
        text = "Decisions of the tuner about values that it tried in production."
        decisions = CounterMetricFamily("ewsjf_tuner_decisions", text, labels=("model", "decision"))
        text = "1 while the tuner may try nothing, by command or because it failed."
        frozen = GaugeMetricFamily("ewsjf_tuner_frozen", text, labels=("model",))
        if counts:
            searches.add_metric((self._model,), counts["searches"])
            trials.add_metric((self._model,), counts["trials"])
            for decision, count in counts["decisions"].items():
                decisions.add_metric((self._model, decision), count)
            frozen.add_metric((self._model,), self.frozen)
        yield from (searches, trials, decisions, frozen)
