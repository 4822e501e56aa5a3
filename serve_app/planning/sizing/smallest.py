"""The cheapest numbers of replicas that meet the limits, with as few simulations as may be.

One pool: gallop from the first guess, then bisect, since more replicas never hurt. Two pools: with spill they
lean on each other, so the numbers are looked for in turn: grow whichever pool misses its limits until both
hold, then shrink each as far as it goes, the dearer one first, until neither can lose a replica. That ends in
a fleet from which no single replica can be taken, which need not be the cheapest of all.
"""

from collections.abc import Callable, Sequence

from serve_app.metrics.slo import Slo
from serve_app.planning.costs import CostTable
from serve_app.planning.sizing.fleets import Counts, FleetPlan
from serve_app.planning.sizing.verification import RunFigures, Verification, Verifier

# A fleet this many times the first guess that still misses its limits misses them for another reason.
_MOST_OF_GUESS = 4
# Steps of the gallop, as a share of the pool.
_STEP = 0.1


def smallest_count(meets: Callable[[int], bool], guess: int, *, most: int) -> int | None:
    """The smallest number from 1 to `most` that meets, if more never hurts; None when `most` does not.

    Args:
        guess: where to look first.
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
    """The smallest fleet of that plan which meets the limits with all seeds.

    It is looked for with the first seed, then confirmed with all, and grown where those ask for more.

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
    """Take replicas away, pool by pool, until none can lose one."""
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
    """One step more in the pool that misses its limits by most; None when that would be absurd."""
    pool = max(counts, key=lambda name: max(_excess(run, name, last.demand.slo) for run in last.runs))
    if counts[pool] >= _MOST_OF_GUESS * guess[pool] + 1:
        return None
    stride = _stride(counts[pool])
    # With all seeds it is nearly there.
    return {**counts, pool: counts[pool] + (stride if len(last.runs) == 1 else max(1, stride // 2))}


def _excess(run: RunFigures, pool: str, slo: Slo) -> float:
    """By which factor a pool's own tails exceed the limits."""
    figures = run.by_pool.get(pool)
    if figures is None:
        return 0.0
    tails = ((figures.p99_ttft_s, slo.ttft_s), (figures.p99_tpot_s, slo.tpot_s))
    return max((tail / limit for tail, limit in tails if tail is not None and limit is not None), default=0.0)


def _down(meets: Callable[[int], bool], high: int) -> int:
    """The smallest number up to `high`, which meets."""
    stride = _stride(high)
    while high > 1:
        low = max(1, high - stride)
        if not meets(low):
            return _bisect(meets, low, high)
        high, stride = low, 2 * stride
    return high


def _bisect(meets: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest number above `low`, which does not meet, up to `high`, which does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def _stride(count: int) -> int:
    return max(1, round(_STEP * count))
