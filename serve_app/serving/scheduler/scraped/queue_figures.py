"""Who waits in the queue, where, for how long, and what keeps the heads: gauges, drawn at each scrape."""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_app.scheduling import Scheduler
from serve_app.scheduling.request import ScheduledRequest
from serve_app.scheduling.waits.accounts import waits_for
from serve_app.serving.scheduler.scraped.labels import Names

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
