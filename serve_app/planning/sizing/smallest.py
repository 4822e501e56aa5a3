"""The search for the smallest fleet that meets the limits, with few simulations.

One pool: gallop from the first guess, then bisect, since more replicas never raise a latency.

Two pools depend on each other through spill, so their numbers are searched in turn. First the pool that
misses its limits grows, until both meet them. Then each pool shrinks as far as it can, the more expensive one
first, until neither can lose a replica. The result has no replica too many, but need not be the cheapest of
all.
"""

from collections.abc import Callable, Sequence

from serve_app.metrics.slo import Slo
from serve_app.planning.sizing.costs import CostTable
from serve_app.planning.sizing.fleets import Counts, FleetPlan
from serve_app.planning.sizing.verification import RunFigures, Verification, Verifier

# Largest multiple of the first guess: a fleet that still misses its limits misses them for another reason.
_MOST_OF_GUESS = 4
# First step of the gallop, as a share of the pool.
_STEP = 0.1


def smallest_count(meets: Callable[[int], bool], guess: int, *, most: int) -> int | None:
    """The smallest number from 1 to `most` for which `meets` holds; None when it fails for `most`.

    Args:
        meets: monotone: it holds for every larger number.
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
    verifier: Verifier, plan: FleetPlan, guess: Counts, *, costs: CostTable, seeds: Sequence[int]
) -> Verification | None:
    """The smallest fleet of a plan that meets the limits with all seeds.

    The search uses the first seed. Its result is verified with all seeds, and grows where they need more.

    Returns:
        None when even a much larger fleet than the guess misses the limits.
    """
    counts = _settle(verifier, plan, guess, costs, seeds[:1])
    while counts is not None:
        confirmed = verifier.measure(plan, counts, seeds)
        if confirmed.meets:
            return confirmed
        counts = _grown(counts, confirmed, guess)
    return None


def _settle(
    verifier: Verifier, plan: FleetPlan, guess: Counts, costs: CostTable, seeds: Sequence[int]
) -> Counts | None:
    def meets(counts: Counts) -> bool:
        return verifier.measure(plan, counts, seeds).meets

    if len(plan.pools) == 1:
        (pool,) = plan.pools
        most = _MOST_OF_GUESS * guess[pool]
        found = smallest_count(lambda count: meets({pool: count}), guess[pool], most=most)
        return None if found is None else {pool: found}
    counts: Counts | None = dict(guess)
    while counts is not None and not (last := verifier.measure(plan, counts, seeds)).meets:
        counts = _grown(counts, last, guess)
    if counts is None:
        return None
    by_cost = sorted(plan.pools, key=lambda pool: -costs.usd_per_hour(plan.pools[pool].profile))
    return _shrunk(meets, counts, by_cost)


def _shrunk(meets: Callable[[Counts], bool], counts: Counts, order: Sequence[str]) -> Counts:
    """Remove replicas, pool by pool, until no pool can lose one."""
    while True:
        before = counts
        for pool in order:
            others = counts

            def with_count(count: int, pool: str = pool, others: Counts = others) -> bool:
                return meets({**others, pool: count})

            counts = {**counts, pool: _down(with_count, counts[pool])}
        if counts == before:
            return counts


def _grown(counts: Counts, last: Verification, guess: Counts) -> Counts | None:
    """Add replicas to the pool that misses its limits by most; None beyond the multiple of the guess."""
    pool = max(counts, key=lambda name: max(_excess(run, name, last.demand.slo) for run in last.runs))
    if counts[pool] >= _MOST_OF_GUESS * guess[pool] + 1:
        return None
    stride = _stride(counts[pool])
    # With all seeds the fleet is nearly large enough.
    return {**counts, pool: counts[pool] + (stride if len(last.runs) == 1 else max(1, stride // 2))}


def _excess(run: RunFigures, pool: str, slo: Slo) -> float:
    """The factor by which a pool's own tail latencies exceed the limits."""
    figures = run.by_pool.get(pool)
    if figures is None:
        return 0.0
    tails = ((figures.p99_ttft_s, slo.ttft_s), (figures.p99_tpot_s, slo.tpot_s))
    return max((tail / limit for tail, limit in tails if tail is not None and limit is not None), default=0.0)


def _down(meets: Callable[[int], bool], high: int) -> int:
    """The smallest number that meets, at most `high`, which meets."""
    stride = _stride(high)
    while high > 1:
        low = max(1, high - stride)
        if not meets(low):
            return _bisect(meets, low, high)
        high, stride = low, 2 * stride
    return high


def _bisect(meets: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest number that meets, above `low`, which does not, and at most `high`, which does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def _stride(count: int) -> int:
    return max(1, round(_STEP * count))
