"""The summary of a run, computed from its request records; the same for simulator, live run and benchmark."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from serve_app.metrics.fairness import jain_of_tenants
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.slo import Slo
from serve_app.metrics.statistics import Distribution

JsonValue = float | int | str | None | Mapping[str, "JsonValue"]

SHORT_AT_TOKENS = 256
"""A prompt of at most this many tokens is a short one, unless the caller says otherwise."""

MOST_TENANTS = 100
"""A summary names no more tenants than these, so that it stays readable however many there are."""


@dataclass(frozen=True, slots=True)
class BySize:
    """One latency of completed requests: of all, of short prompts and of long ones, in seconds."""

    all: Distribution
    short: Distribution
    long: Distribution


@dataclass(frozen=True, slots=True)
class Spread:
    """Three figures of a latency, in seconds."""

    mean: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """What one tenant met.

    Attributes:
        requests: all of them, whatever their outcome.
        ttft_s: of those completed.
        service_tokens: prompt and output tokens of those completed.
    """

    requests: int
    ttft_s: Spread
    service_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a run. Latencies are of completed requests; `outcomes` counts all of them.

    Attributes:
        completed: requests with their whole answer.
        throughput_tokens_per_s: prompt and output tokens of completed requests, per second of makespan.
        goodput_per_s: requests that kept every limit of the SLO, per second of makespan.
        makespan_s: from the first arrival to the last completion.
        preemptions: in the engines; None when the observer does not see them.
        jain_tenants: Jain's index over what each tenant got of its fair share, see `fairness`.
        tenants: figures of each tenant, of the `MOST_TENANTS` with most requests.
        outcomes: number of requests by outcome.
        output_tokens_per_s: output tokens of completed requests alone, per second of makespan.
    """

    completed: int
    throughput_tokens_per_s: float
    goodput_per_s: float
    makespan_s: float
    preemptions: int | None
    ttft_s: BySize
    tpot_s: BySize
    e2e_s: BySize
    queue_wait_s: BySize
    jain_tenants: float | None
    tenants: Mapping[str, TenantFigures] = field(default_factory=dict)
    outcomes: Mapping[str, int] = field(default_factory=dict)
    output_tokens_per_s: float = 0.0

    def as_json(self) -> dict[str, JsonValue]:
        """The `metrics` object of the command line: these names are a contract with other programs."""
        figures = asdict(self)
        del figures["outcomes"], figures["output_tokens_per_s"]
        return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRules:
    """How records are read.

    Attributes:
        slo: limits that count for goodput.
        short_at_tokens: longest prompt that counts as short.
        weights: fair-share weights by tenant, 1 for those not named.
    """

    slo: Slo = field(default_factory=Slo)
    short_at_tokens: int = SHORT_AT_TOKENS
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.short_at_tokens < 1:
            raise ValueError(f"short_at_tokens must be at least 1, got {self.short_at_tokens}")
        for tenant, weight in self.weights.items():
            if not weight > 0:
                raise ValueError(f"weight of tenant {tenant!r} must be positive, got {weight}")


_BY_DEFAULT = SummaryRules()


def summarise(
    records: Sequence[RequestRecord], rules: SummaryRules = _BY_DEFAULT, *, preemptions_known: bool = True
) -> Summary:
    """Compute the figures of a run from its records.

    Args:
        records: every request of the run exactly once, in any order.
        rules: SLO, the longest short prompt, tenant weights.
        preemptions_known: False when the observer does not see the engines; the figure is None then.
    """
    done = [record for record in records if record.completed]
    makespan_s = _makespan_s(records, done)
    output_tokens = sum(record.output_tokens for record in done)
    total_tokens = output_tokens + sum(record.prompt_tokens for record in done)
    return Summary(
        completed=len(done),
        throughput_tokens_per_s=_per_s(total_tokens, makespan_s),
        goodput_per_s=_per_s(sum(rules.slo.met_by(record) for record in done), makespan_s),
        makespan_s=makespan_s,
        preemptions=sum(record.preemptions for record in records) if preemptions_known else None,
        ttft_s=_by_size(done, rules, lambda record: record.ttft_s),
        tpot_s=_by_size(done, rules, lambda record: record.tpot_s),
        e2e_s=_by_size(done, rules, lambda record: record.e2e_s),
        queue_wait_s=_by_size(done, rules, lambda record: record.queue_wait_s),
        jain_tenants=jain_of_tenants(records, rules.weights),
        tenants=_by_tenant(records),
        outcomes=dict(sorted(Counter(str(record.outcome) for record in records).items())),
        output_tokens_per_s=_per_s(output_tokens, makespan_s),
    )


def _by_tenant(records: Sequence[RequestRecord]) -> dict[str, TenantFigures]:
    requests = Counter(record.tenant for record in records)
    of_tenant: dict[str, list[RequestRecord]] = {name: [] for name, _ in requests.most_common(MOST_TENANTS)}
    for record in records:
        if record.completed and record.tenant in of_tenant:
            of_tenant[record.tenant].append(record)
    return {name: _tenant_figures(requests[name], done) for name, done in of_tenant.items()}


def _tenant_figures(requests: int, done: Sequence[RequestRecord]) -> TenantFigures:
    ttft = Distribution.of(record.ttft_s for record in done if record.ttft_s is not None)
    tokens = sum(record.prompt_tokens + record.output_tokens for record in done)
    return TenantFigures(requests, Spread(ttft.mean, ttft.p99, ttft.max), tokens)


def _makespan_s(records: Sequence[RequestRecord], done: Sequence[RequestRecord]) -> float:
    if not done:
        return 0.0
    return max(record.finished_at for record in done) - min(record.arrived_at for record in records)


def _per_s(amount: float, span_s: float) -> float:
    return amount / span_s if span_s > 0 else 0.0


def _by_size(
    done: Sequence[RequestRecord], rules: SummaryRules, latency_of: Callable[[RequestRecord], float | None]
) -> BySize:
    short: list[float] = []
    long: list[float] = []
    for record in done:
        latency_s = latency_of(record)
        if latency_s is not None:
            (short if record.prompt_tokens <= rules.short_at_tokens else long).append(latency_s)
    return BySize(Distribution.of(short + long), Distribution.of(short), Distribution.of(long))
