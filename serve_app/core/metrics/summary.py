"""Figures of many requests, the same for simulator, live run and load test. The input is their records.

- `Slo`, `slo_attainment_ratio`: limits on a request's latencies, and the share of requests within them.
- `interval_95`: Student-t confidence intervals of figures measured over a few seeds.
- `jain_of_tenants`: fairness among tenants.
- `summarise`: the summary of a run. Distributions have five figures: mean, three percentiles and maximum.
- `ClassTargets`: SLOs by priority class, and the reasons why a request missed them. The tuner's objective and
  the gateways' metric of SLO attainment use the same targets.

`jain_of_tenants`. Jain's fairness index compares the service of each tenant with its max-min fair share.
Served tokens alone are not meaningful, because a tenant with little demand is served little. A tenant with
less demand than its part has its demand as its share, and the others divide the rest by weight. The index is
1 if each tenant got exactly its share, and 1/n if one of n got everything. Only the time span in which
requests still arrive counts: after it the backlog drains in any order, and every tenant would appear equally
served.

Sources: Jain, Chiu, Hawe, DEC-TR-301 (1984); max-min shares by water-filling: Bertsekas and Gallager, Data
Networks, 6.5.2.
"""

import enum
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.settings_base import ADVANCED, FINITE_POSITIVE, POSITIVE, at_least, settings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass

_LIMIT = POSITIVE.hint("leave it out to set no limit")


@settings(block="slo")
class Slo:
    """Upper limits in seconds that a completed request must meet, all of them. None sets no limit.

    The defaults are those of the pool-routing papers (arXiv 2604.09613): TTFT 2 s and TPOT 80 ms.
    """

    ttft_s: Annotated[float | None, _LIMIT] = 2.0
    tpot_s: Annotated[float | None, _LIMIT] = 0.08
    e2e_s: Annotated[float | None, _LIMIT] = None

    def met_by(self, record: RequestRecord) -> bool:
        """Return whether the request completed within every limit.

        A latency that a record cannot have exceeds no limit: TPOT of a one-token answer, TTFT of an
        unstreamed one.
        """
        return self.met_with(record, self.ttft_s)

    def met_with(self, record: RequestRecord, ttft_limit_s: float | None) -> bool:
        """Return whether the request met all limits, with another limit on TTFT."""
        return (
            record.completed
            and _within(record.ttft_s, ttft_limit_s)
            and _within(record.tpot_s, self.tpot_s)
            and _within(record.e2e_s, self.e2e_s)
        )


def _within(measured_s: float | None, limit_s: float | None) -> bool:
    return limit_s is None or measured_s is None or measured_s <= limit_s


def slo_attainment_ratio(records: Iterable[RequestRecord], slo: Slo) -> float | None:
    """Return the share of all requests, including failed ones, that meet `slo`, or None without requests."""
    met = [slo.met_by(record) for record in records]
    return sum(met) / len(met) if met else None


# Two-sided 95 % points of Student's t by degrees of freedom, 1 to 30, from a table of the distribution.
_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL_95 = 1.959964


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """A mean over `n` runs and its 95 % interval. The bounds are None for a single run."""

    mean: float
    low: float | None
    high: float | None
    n: int

    def as_json(self) -> dict[str, float | int | None]:
        """Return the fields by name."""
        return asdict(self)

    def as_text(self, decimals: int, scale: float = 1.0) -> str:
        """Return `mean ± half the width`, both times `scale`, or the mean alone for a single run."""
        mean = f"{scale * self.mean:,.{decimals}f}"
        return mean if self.high is None else f"{mean} ± {scale * (self.high - self.mean):,.{decimals}f}"


def interval_95(values: Sequence[float]) -> ConfidenceInterval:
    """Return the mean of one figure over seeds with its 95 % Student-t interval."""
    if not values:
        raise ValueError("an interval needs at least one value, got none: run at least one seed")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return ConfidenceInterval(mean, None, None, 1)
    half = t_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return ConfidenceInterval(mean, mean - half, mean + half, len(values))


def t_95(degrees_of_freedom: int) -> float:
    """Return the two-sided 95 % point of Student's t; beyond the table by its series (error < 0.001)."""
    if degrees_of_freedom < 1:
        raise ValueError(f"degrees of freedom must be at least 1, got {degrees_of_freedom}")
    if degrees_of_freedom <= len(_T_95):
        return _T_95[degrees_of_freedom - 1]
    return _NORMAL_95 + (_NORMAL_95**3 + _NORMAL_95) / (4 * degrees_of_freedom)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Five figures of a sample; all None if it is empty."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution":
        """Return the figures of `values`, in any order."""
        ordered = sorted(values)
        if not ordered:
            return cls(None, None, None, None, None)
        return cls(
            math.fsum(ordered) / len(ordered),
            percentile(ordered, 50),
            percentile(ordered, 95),
            percentile(ordered, 99),
            ordered[-1],
        )

    def as_json(self) -> dict[str, float | None]:
        """Return the figures by name."""
        return asdict(self)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` of an ascending sample lie, interpolated between neighbours.

    The position is `(n - 1) * percent / 100`, numpy's default, so that figures agree with other tools.

    Raises:
        ValueError: the sample is empty, or `percent` is outside 0 to 100.
    """
    if not ordered:
        raise ValueError("percentile of an empty sample")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be within 0 and 100, got {percent}")
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def jain_index(values: Iterable[float]) -> float | None:
    """Return `(sum x)^2 / (n * sum x^2)`: 1 if all are equal, 1/n if one has all, None if all are zero."""
    sample = list(values)
    squares = sum(value * value for value in sample)
    return sum(sample) ** 2 / (len(sample) * squares) if squares else None


def jain_of_tenants(
    records: Sequence[RequestRecord], weights: Mapping[str, float] | None = None
) -> float | None:
    """Return Jain's index of the tenants' served tokens relative to their max-min fair shares.

    Args:
        records: all requests of a run, with any outcome.
        weights: weights of tenants in contended capacity; 1 for tenants not included.

    Returns:
        The index, 1.0 for one tenant, or None if nothing was served while requests arrived.
    """
    if not records:
        return None
    until = max(record.arrived_at for record in records)
    demand: dict[str, float] = defaultdict(float)
    served: dict[str, float] = defaultdict(float)
    for record in records:
        demand[record.tenant] += record.prompt_tokens + record.output_tokens
        served[record.tenant] += tokens_served(record, until)
    shares = max_min_shares(demand, sum(served.values()), weights or {})
    return jain_index(served[tenant] / share for tenant, share in shares.items() if share > 0)


def tokens_served(record: RequestRecord, until: float) -> float:
    """Return the tokens that an engine had processed for a request by the time `until`.

    The prompt counts at the first token, the output evenly from there to the end. Without a first token all
    tokens count at the end. A request without an answer counts as 0.
    """
    if record.output_tokens == 0 and not record.completed:
        return 0.0
    if until >= record.finished_at:
        return record.prompt_tokens + record.output_tokens
    if record.first_token_at is None or until < record.first_token_at:
        return 0.0
    elapsed_ratio = (until - record.first_token_at) / (record.finished_at - record.first_token_at)
    return record.prompt_tokens + record.output_tokens * elapsed_ratio


def max_min_shares(
    demand: Mapping[str, float], capacity: float, weights: Mapping[str, float]
) -> dict[str, float]:
    """Divide `capacity` by weight. Capacity that exceeds a tenant's demand is left to the others."""
    shares: dict[str, float] = {}
    left, weight_left = capacity, sum(weights.get(tenant, 1.0) for tenant in demand)
    # In ascending order of demand per weight, each tenant gets the lesser of its demand and its part.
    for tenant in sorted(demand, key=lambda name: demand[name] / weights.get(name, 1.0)):
        weight = weights.get(tenant, 1.0)
        shares[tenant] = min(demand[tenant], left * weight / weight_left)
        left -= shares[tenant]
        weight_left -= weight
    return shares


JsonValue = float | int | str | None | Mapping[str, "JsonValue"]

SHORT_AT_TOKENS = 256
"""Default of the maximum length of a short prompt, in tokens."""

MAX_TENANTS = 100
"""Maximum number of tenants in a summary, so that it stays readable."""


@dataclass(frozen=True, slots=True)
class BySize:
    """One latency of completed requests, in seconds: of all, of short prompts and of long ones."""

    all: Distribution
    short: Distribution
    long: Distribution


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, 99th percentile and maximum of a latency, in seconds."""

    mean: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """Figures of one tenant.

    Attributes:
        ttft_s: TTFT of completed requests.
        service_tokens: prompt and output tokens of completed requests.
    """

    requests: int
    ttft_s: Spread
    service_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a run. Latencies are of completed requests; `outcomes` counts all requests.

    Attributes:
        throughput_tokens_per_s: prompt and output tokens of completed requests per second of makespan.
        goodput_per_s: requests within every limit of the SLO per second of makespan.
        makespan_s: time from the first arrival to the last completion.
        preemptions: preemptions in the engines; None if the observer cannot see them.
        jain_tenants: Jain's index of service relative to the fair shares, see `jain_of_tenants`.
        tenants: figures by tenant, of the `MAX_TENANTS` tenants with most requests.
        output_tokens_per_s: output tokens of completed requests per second of makespan.
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
        """Return the `metrics` object of the command line. Other programs depend on its names."""
        figures = asdict(self)
        del figures["outcomes"], figures["output_tokens_per_s"]
        return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRules:
    """Rules for the evaluation of records.

    Attributes:
        weights: fair-share weights by tenant; 1 for tenants not included.
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
    records: Sequence[RequestRecord], rules: SummaryRules = _BY_DEFAULT, *, has_preemptions: bool = True
) -> Summary:
    """Return the figures of a run from its records.

    Args:
        records: every request of the run exactly once, in any order.
        has_preemptions: False if the observer cannot see the engines; the figure is None then.
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
        preemptions=sum(record.preemptions for record in records) if has_preemptions else None,
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
    of_tenant: dict[str, list[RequestRecord]] = {name: [] for name, _ in requests.most_common(MAX_TENANTS)}
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


def first_token_figures(firsts: Iterable[tuple[int, float]]) -> dict[str, dict[str, Any]]:
    """Return number, median and P99 of TTFT, overall and for short prompts, from (tokens, TTFT in s)."""
    known = list(firsts)
    short = [ttft_s for tokens, ttft_s in known if tokens <= SHORT_AT_TOKENS]
    return {"all": _figures([ttft_s for _, ttft_s in known]), "short": _figures(short)}


def _figures(values: list[float]) -> dict[str, Any]:
    ordered = sorted(values)
    found: dict[str, Any] = {"requests": len(ordered)}
    for name, share in (("ttft_p50_s", 0.5), ("ttft_p99_s", 0.99)):
        found[name] = round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else None
    return found


NOT_ATTRIBUTABLE = frozenset(
    {
        Outcome.REJECTED_INVALID,
        Outcome.REJECTED_UNAUTHORISED,
        Outcome.REJECTED_UNKNOWN_MODEL,
        Outcome.REJECTED_UNKNOWN_RESPONSE,
        Outcome.REJECTED_BODY_TOO_LARGE,
        Outcome.REJECTED_TOO_LONG,
        Outcome.REJECTED_RATE_LIMITED,
    }
)
"""Outcomes that no scheduling decision could have changed."""


class Miss(enum.StrEnum):
    """A reason why a request missed the targets of its class."""

    TTFT = "ttft"
    TPOT = "tpot"
    EXPIRED = "expired"
    """Its queue timeout ended."""
    REJECTED = "rejected"
    """It was rejected for lack of capacity or of a replica."""
    FAILED = "failed"
    """Its engine failed."""
    ABANDONED = "abandoned"
    """Its client disconnected after the limit for a first token."""


_MISSES = {
    Outcome.EXPIRED: Miss.EXPIRED,
    Outcome.FAILED: Miss.FAILED,
    Outcome.CANCELLED: Miss.ABANDONED,
}


@settings(block="targets")
class ClassTarget:
    """Latency limits of one priority class, in seconds.

    Attributes:
        ttft_s: time to first token of short prompts.
        long_ttft_s: time to first token of all others.
        tpot_s: time per output token after the first; None sets no limit.
    """

    ttft_s: Annotated[float, FINITE_POSITIVE] = 1.0
    long_ttft_s: Annotated[float, FINITE_POSITIVE, ADVANCED] = 10.0
    tpot_s: Annotated[float | None, FINITE_POSITIVE] = 0.1


@settings(block="targets")
class ClassTargets:
    """The targets of all priority classes.

    Attributes:
        short_at_tokens: maximum length of a short prompt.
    """

    interactive: ClassTarget = field(default_factory=ClassTarget)
    default: ClassTarget = field(default_factory=ClassTarget)
    # No user waits for batch answers; one and five minutes prevent the class from starving.
    batch: ClassTarget = field(
        default_factory=lambda: ClassTarget(ttft_s=60.0, long_ttft_s=300.0, tpot_s=None)
    )
    short_at_tokens: Annotated[int, at_least(1), ADVANCED] = SHORT_AT_TOKENS

    def is_short(self, record: RequestRecord) -> bool:
        """Return whether the prompt counts as short."""
        return record.prompt_tokens <= self.short_at_tokens

    def class_of(self, record: RequestRecord) -> str:
        """Return the name of the request's class and length, such as `default short`."""
        return f"{record.priority.value} {'short' if self.is_short(record) else 'long'}"

    def ttft_limit_s(self, record: RequestRecord) -> float:
        """Return the limit on the request's time to first token, in seconds."""
        target = self._of(record.priority)
        return target.ttft_s if self.is_short(record) else target.long_ttft_s

    def met_by(self, record: RequestRecord) -> bool:
        """Return whether the request completed within the limits of its class."""
        slo = Slo(ttft_s=self.ttft_limit_s(record), tpot_s=self._of(record.priority).tpot_s)
        return slo.met_by(record)

    def lateness(self, record: RequestRecord) -> float:
        """Return `ttft / (ttft + limit)`: 0 for an immediate answer, 0.5 at the limit, 1 without an answer.

        It is bounded, unlike seconds, so one lost request cannot outweigh a thousand. Unlike SLO attainment
        it improves with every second saved, even if all limits are met, or none.
        """
        if not record.completed or record.ttft_s is None:
            return 1.0
        return record.ttft_s / (record.ttft_s + self.ttft_limit_s(record))

    def is_attributable(self, record: RequestRecord) -> bool:
        """Return whether the scheduler is responsible for the request's latency.

        False if it was rejected for its content or its key's limit, or if its client disconnected before the
        limit for a first token.
        """
        if record.outcome in NOT_ATTRIBUTABLE:
            return False
        if record.outcome is Outcome.CANCELLED:
            waited_s = record.e2e_s if record.ttft_s is None else record.ttft_s
            return waited_s > self.ttft_limit_s(record)
        return True

    def missed_by(self, record: RequestRecord) -> tuple[Miss, ...]:
        """Return the reasons why a request missed its targets; latencies as in `Slo.met_by`."""
        if not record.completed:
            return (_MISSES.get(record.outcome, Miss.REJECTED),)
        target = self._of(record.priority)
        ttft_s = record.ttft_s
        misses: tuple[Miss, ...] = ()
        if ttft_s is None:
            return misses
        if ttft_s > self.ttft_limit_s(record):
            misses = (Miss.TTFT,)
        if target.tpot_s is not None and (tpot_s := record.tpot_s) is not None and tpot_s > target.tpot_s:
            misses = (*misses, Miss.TPOT)
        return misses

    def _of(self, priority: PriorityClass) -> ClassTarget:
        target: ClassTarget = getattr(self, priority.value)
        return target
