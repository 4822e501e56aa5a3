"""What the pools of a model hold, and what they could still take: gauges, drawn at each scrape."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_app.routing.replica_state import ReplicaState
from serve_app.scheduling import Scheduler

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
