"""Verification of fleets in the simulator, with the production scheduler.

A fleet meets its limits if, with every seed, all requests complete, and the P99 TTFT and the P99 TPOT after
the warm-up are within them. Arrivals are Poisson by default, because a trace that is scaled to a high rate
would compress its peak minutes to instants.

A large fleet is scaled down: a smaller one is simulated at the same share of the rate. This is conservative,
because fewer replicas balance load less well. A larger fleet at the same rate per replica is at least as
fast; `Verifier.at_double_scale` checks it.

The search for the smallest fleet needs few simulations. For one pool it gallops from the first guess, then
bisects, because more replicas never raise a latency. Two pools depend on each other through spill, so their
numbers are searched in turn. First the pool that misses its limits grows, until both meet them. Then each
pool shrinks as far as it can, the more expensive one first, until neither can lose a replica. The result has
no superfluous replica, but is not necessarily the cheapest of all.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import ConfidenceInterval, Slo, interval_95, percentile
from serve_app.lab.planning.queueing import CostTable, FleetPlan, ReplicaCounts
from serve_app.lab.simulation.run import Disclosure, RunResult, RunSettings, run_all
from serve_app.lab.workloads import TraceChoice

LONG_ABOVE_TOKENS = 4_096
"""Requests with more tokens, prompt and output, count as long in the figures."""
# Halvings of one replica's share of the rate.
_HEADROOM_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests that a fleet must serve, and its latency limits.

    Attributes:
        trace: its requests; `requests` in it is the number per run.
        rate_per_s: rate of the whole fleet.
        slo: P99 limits.
        output_known: whether requests state the length of their output in `max_tokens`.
        policy: scheduling policy.
        scheduler: scheduler settings that differ from the defaults, by dotted path.
    """

    trace: TraceChoice
    rate_per_s: float
    slo: Slo
    output_known: bool = False
    policy: str = "ewsjf"
    scheduler: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rate_per_s > 0:
            raise ValueError(f"rate_per_s must be positive, got {self.rate_per_s}")

    def scaled(self, share: float) -> "Workload":
        """Return the same requests at a share of the rate."""
        return replace(self, rate_per_s=share * self.rate_per_s)


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """One pool in a run: its shares of requests and tokens, and its tail latencies."""

    request_ratio: float
    token_ratio: float
    p99_ttft_s: float | None
    p99_tpot_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Figures of one run; a tail latency is None if no request has it.

    Attributes:
        lost: requests that did not complete.
        preemptions: in the whole run, over all `requests`.
        long_p99_ttft_s: of long requests only.
        by_pool: figures of each pool.
    """

    seed: int
    requests: int
    lost: int
    preemptions: int
    p99_ttft_s: float | None
    p99_tpot_s: float | None
    long_p99_ttft_s: float | None
    by_pool: Mapping[str, PoolFigures]

    def meets(self, slo: Slo) -> bool:
        """Return whether every request completed, within the limits."""
        return not self.lost and _within(self.p99_ttft_s, slo.ttft_s) and _within(self.p99_tpot_s, slo.tpot_s)


@dataclass(frozen=True, slots=True)
class Verification:
    """Figures of a fleet of one size with one workload, over seeds."""

    plan: FleetPlan
    counts: ReplicaCounts
    demand: Workload
    runs: tuple[RunFigures, ...]

    @property
    def meets(self) -> bool:
        """True if the limits hold with every seed."""
        return all(run.meets(self.demand.slo) for run in self.runs)

    @property
    def ttft(self) -> ConfidenceInterval | None:
        """P99 TTFT over seeds, in seconds."""
        return _interval([run.p99_ttft_s for run in self.runs])

    @property
    def tpot(self) -> ConfidenceInterval | None:
        """P99 TPOT over seeds, in seconds."""
        return _interval([run.p99_tpot_s for run in self.runs])

    @property
    def long_ttft(self) -> ConfidenceInterval | None:
        """P99 TTFT of long requests over seeds, in seconds: the price of the other requests' tails."""
        return _interval([run.long_p99_ttft_s for run in self.runs])

    @property
    def preemptions_per_mille(self) -> float:
        """Preemptions per thousand requests, all seeds together."""
        return 1_000 * sum(run.preemptions for run in self.runs) / sum(run.requests for run in self.runs)

    def pool_figures(self, pool: str) -> dict[str, float | None]:
        """Return the means over seeds of a pool's figures."""
        runs = [run.by_pool[pool] for run in self.runs if pool in run.by_pool]
        names = PoolFigures.__slots__
        return {name: _mean([getattr(run, name) for run in runs]) for name in names}

    def as_json(self) -> dict[str, Any]:
        """Return size, workload, and figures with their intervals."""
        return {
            "replicas": dict(self.counts),
            "rate_per_s": self.demand.rate_per_s,
            "meets": self.meets,
            "seeds": [run.seed for run in self.runs],
            "requests": [run.requests for run in self.runs],
            "lost": [run.lost for run in self.runs],
            "p99_ttft_s": None if self.ttft is None else self.ttft.as_json(),
            "p99_tpot_s": None if self.tpot is None else self.tpot.as_json(),
            "long_p99_ttft_s": None if self.long_ttft is None else self.long_ttft.as_json(),
            "preemptions_per_mille": self.preemptions_per_mille,
        }


class Verifier:
    """Simulator of fleets with one workload, which simulates each fleet at most once.

    Args:
        demand: workload at full size.
        share: share of it that is simulated, at most 1; the fleets passed to `measure` have that size.
    """

    def __init__(self, demand: Workload, *, share: float = 1.0, jobs: int = 1) -> None:
        self.demand = demand
        self.share = share
        self._jobs = jobs
        self._runs: dict[str, RunFigures] = {}

    @property
    def played(self) -> int:
        """Number of runs so far."""
        return len(self._runs)

    def measure(self, plan: FleetPlan, counts: ReplicaCounts, seeds: Sequence[int]) -> Verification:
        """Measure the fleet of that size with its share of the workload and these seeds."""
        return self._measure(plan, counts, seeds, self.demand.scaled(self.share))

    def headroom(self, plan: FleetPlan, counts: ReplicaCounts, seeds: Sequence[int]) -> float:
        """Return the factor, at least 1, by which the rate can grow before a fleet misses its limits.

        A scaled-down fleet of few replicas is a coarse size: the factor shows the part of its last replica
        that it does not need. It is searched up to one replica's share of the rate, to a quarter of that.
        """
        share = 1 / sum(counts.values())
        low, high = 0.0, share
        for _ in range(_HEADROOM_STEPS):
            middle = (low + high) / 2
            demand = self.demand.scaled(self.share * (1 + middle))
            meets = self._measure(plan, counts, seeds, demand).meets
            low, high = (middle, high) if meets else (low, middle)
        return 1 + low

    def at_double_scale(self, plan: FleetPlan, counts: ReplicaCounts, seeds: Sequence[int]) -> Verification:
        """Measure the same fleet with twice the replicas and twice the rate, for the same duration."""
        demand = self.demand.scaled(2 * self.share)
        if demand.trace.requests is not None:
            demand = replace(demand, trace=replace(demand.trace, requests=2 * demand.trace.requests))
        twice = {pool: 2 * count for pool, count in counts.items()}
        return self._measure(plan, twice, seeds, demand)

    def _measure(
        self, plan: FleetPlan, counts: ReplicaCounts, seeds: Sequence[int], demand: Workload
    ) -> Verification:
        settings = plan.settings(counts)
        runs = [
            RunSettings(
                policy=demand.policy,
                fleet=settings,
                trace=demand.trace,
                seed=seed,
                rate_per_s=demand.rate_per_s,
                disclosure=Disclosure(output_known=demand.output_known),
                scheduler=demand.scheduler,
                slo=demand.slo,
            )
            for seed in seeds
        ]
        missing = [run for run in runs if repr(run) not in self._runs]
        for result in run_all(missing, jobs=self._jobs, keep_records=True):
            self._runs[repr(result.settings)] = _figures(result)
        return Verification(plan, dict(counts), demand, tuple(self._runs[repr(run)] for run in runs))


def scale_share(replicas: int, most_replicas: int) -> float:
    """Return the share of a fleet that has at most `most_replicas`."""
    return min(1.0, most_replicas / replicas)


def at_full_size(count: int, share: float, headroom: float = 1.0) -> int:
    """Return the replicas of the whole fleet for those of the scaled-down one, rounded up."""
    return math.ceil(count / share / headroom - 1e-9)


def _figures(result: RunResult) -> RunFigures:
    records = result.measured
    pools = sorted({record.pool for record in records if record.pool})
    tokens = sum(record.prompt_tokens + record.output_tokens for record in records)
    by_pool = {}
    for pool in pools:
        own = [record for record in records if record.pool == pool]
        own_tokens = sum(record.prompt_tokens + record.output_tokens for record in own)
        by_pool[pool] = PoolFigures(len(own) / len(records), own_tokens / tokens, *_tails(own))
    ttft_s, tpot_s = _tails(records)
    long = [record for record in records if record.prompt_tokens + record.output_tokens > LONG_ABOVE_TOKENS]
    whole = result.whole
    return RunFigures(
        seed=result.settings.seed,
        requests=sum(whole.outcomes.values()),
        lost=sum(whole.outcomes.values()) - whole.completed,
        preemptions=whole.preemptions or 0,
        p99_ttft_s=ttft_s,
        p99_tpot_s=tpot_s,
        long_p99_ttft_s=_tails(long)[0],
        by_pool=by_pool,
    )


def _tails(records: Sequence[RequestRecord]) -> tuple[float | None, float | None]:
    done = [record for record in records if record.completed]
    return (
        _p99([value for record in done if (value := record.ttft_s) is not None]),
        _p99([value for record in done if (value := record.tpot_s) is not None]),
    )


def _p99(values: list[float]) -> float | None:
    return percentile(sorted(values), 99) if values else None


def _within(value: float | None, limit: float | None) -> bool:
    return value is None or limit is None or value <= limit


def _interval(values: Sequence[float | None]) -> ConfidenceInterval | None:
    known = [value for value in values if value is not None]
    return interval_95(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    interval = _interval(values)
    return None if interval is None else interval.mean


# Limit as a multiple of the first guess: a fleet that still misses its limits does so for another reason.
_MAX_OVER_GUESS = 4
# First step of the gallop, as a share of the pool.
_STEP = 0.1


def smallest_count(meets: Callable[[int], bool], guess: int, *, most: int) -> int | None:
    """Return the smallest number from 1 to `most` for which `meets` holds; None if it fails for `most`.

    Args:
        meets: monotone: if it holds for a number, it holds for every larger one.
        guess: the first number to try.
    """
    if meets(guess):
        return _down(meets, guess)
    low, high, stride = guess, guess, _stride(guess)
    while not meets(high):
        if high >= most:
            return None
        low, high, stride = high, min(most, high + stride), 2 * stride
    return _bisect(meets, low, high)


def smallest_fleet(
    verifier: Verifier, plan: FleetPlan, guess: ReplicaCounts, *, costs: CostTable, seeds: Sequence[int]
) -> Verification | None:
    """Return the smallest fleet of a plan that meets the limits with all seeds.

    The search uses the first seed. Its result is verified with all seeds, and grows if they need more.

    Returns:
        None if even a much larger fleet than the guess misses the limits.
    """
    counts = _settle(verifier, plan, guess, costs, seeds[:1])
    while counts is not None:
        confirmed = verifier.measure(plan, counts, seeds)
        if confirmed.meets:
            return confirmed
        counts = _grown(counts, confirmed, guess)
    return None


def _settle(
    verifier: Verifier, plan: FleetPlan, guess: ReplicaCounts, costs: CostTable, seeds: Sequence[int]
) -> ReplicaCounts | None:
    def meets(counts: ReplicaCounts) -> bool:
        return verifier.measure(plan, counts, seeds).meets

    if len(plan.pools) == 1:
        (pool,) = plan.pools
        most = _MAX_OVER_GUESS * guess[pool]
        found = smallest_count(lambda count: meets({pool: count}), guess[pool], most=most)
        return None if found is None else {pool: found}
    counts: ReplicaCounts | None = dict(guess)
    while counts is not None and not (last := verifier.measure(plan, counts, seeds)).meets:
        counts = _grown(counts, last, guess)
    if counts is None:
        return None
    by_cost = sorted(plan.pools, key=lambda pool: -costs.usd_per_hour(plan.pools[pool].profile))
    return _shrunk(meets, counts, by_cost)


def _shrunk(
    meets: Callable[[ReplicaCounts], bool], counts: ReplicaCounts, order: Sequence[str]
) -> ReplicaCounts:
    """Remove replicas, pool by pool, until no pool can lose one."""
    while True:
        before = counts
        for pool in order:
            others = counts

            def with_count(count: int, pool: str = pool, others: ReplicaCounts = others) -> bool:
                return meets({**others, pool: count})

            counts = {**counts, pool: _down(with_count, counts[pool])}
        if counts == before:
            return counts


def _grown(counts: ReplicaCounts, last: Verification, guess: ReplicaCounts) -> ReplicaCounts | None:
    """Add replicas to the pool that makes the fleet miss a limit; None beyond the multiple of the guess."""
    slo = last.demand.slo
    missing = [run for run in last.runs if not run.meets(slo)]
    pool = max(counts, key=lambda name: max(_excess(run, name, slo) for run in missing))
    if counts[pool] >= _MAX_OVER_GUESS * guess[pool] + 1:
        return None
    stride = _stride(counts[pool])
    # With all seeds the fleet is nearly large enough.
    return {**counts, pool: counts[pool] + (stride if len(last.runs) == 1 else max(1, stride // 2))}


def _excess(run: RunFigures, pool: str, slo: Slo) -> float:
    """Return the factor by which a pool's own tails exceed the limits that the whole run misses.

    A pool of few requests may exceed a limit by far that the fleet meets. A run that only loses requests
    misses none, and then all limits count.
    """
    figures = run.by_pool.get(pool)
    if figures is None:
        return 0.0
    tails = (
        (figures.p99_ttft_s, run.p99_ttft_s, slo.ttft_s),
        (figures.p99_tpot_s, run.p99_tpot_s, slo.tpot_s),
    )
    missed = [each for each in tails if not _within(each[1], each[2])] or tails
    return max(
        (own / limit for own, _, limit in missed if own is not None and limit is not None), default=0.0
    )


def _down(meets: Callable[[int], bool], high: int) -> int:
    """Return the smallest number that meets, at most `high`, which meets."""
    stride = _stride(high)
    while high > 1:
        low = max(1, high - stride)
        if not meets(low):
            return _bisect(meets, low, high)
        high, stride = low, 2 * stride
    return high


def _bisect(meets: Callable[[int], bool], low: int, high: int) -> int:
    """Return the smallest number that meets, above `low`, which does not, and at most `high`, which does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def _stride(count: int) -> int:
    return max(1, round(_STEP * count))
