"""Output of a plan: JSON, a table, and a verdict in one sentence."""

from dataclasses import dataclass
from typing import Any

from serve_app.lab.planning.fleets import WORST_CASE
from serve_app.lab.planning.plan import Candidate, PlanResult, SizedFleet
from serve_app.lab.tables import interval_text, number_text, table_text


@dataclass(frozen=True, slots=True)
class Saving:
    """Cost of one fleet compared with another.

    Attributes:
        ratio: share of the other's cost that is saved; negative if it costs more.
        resolution: finest step as a share of the other's cost: one replica, or a quarter if scaled down.
    """

    ratio: float
    resolution: float


def saving(of: SizedFleet, against: SizedFleet) -> Saving:
    """Return the saving of a fleet against another."""
    steps = [
        (0.25 if one.share < 1 and one.plan.name != WORST_CASE else 1.0)
        * one.usd_per_hour
        / sum(one.verification.counts.values())
        / against.usd_per_hour
        for one in (of, against)
    ]
    return Saving(1 - of.usd_per_hour / against.usd_per_hour, max(steps))


def plan_as_json(result: PlanResult) -> dict[str, Any]:
    """Return the chosen fleets with their verification and saving, the verdict, and the search."""
    return {
        "fleets": [_fleet(one, result) for one in result.chosen],
        "verdict": verdict(result),
        "simulated": [_simulated(one) for one in result.simulated],
        "modelled": [_modelled(one) for one in result.modelled],
    }


def _fleet(one: SizedFleet, result: PlanResult) -> dict[str, Any]:
    verification = one.verification
    savings: dict[str, Any] = {}
    for baseline in (result.worst_case, result.paged):
        if baseline is not None and baseline is not one:
            measured = saving(one, baseline)
            savings[baseline.plan.name] = {"simulated": measured.ratio, "resolution": measured.resolution}
    return _simulated(one) | {
        "replicas": sum(one.counts.values()),
        "per_pool": {pool: _pool(one, pool) for pool in one.plan.pools},
        "p99_ttft_s": None if verification.ttft is None else verification.ttft.mean,
        "p99_tpot_s": None if verification.tpot is None else verification.tpot.mean,
        "preemptions": sum(run.preemptions for run in verification.runs),
        "savings": savings,
        "simulated_share": one.share,
    }


def _pool(one: SizedFleet, pool: str) -> dict[str, Any]:
    return {
        "replicas": one.counts[pool],
        "profile": one.plan.pools[pool].profile,
        **one.verification.pool_figures(pool),
    }


def _simulated(one: SizedFleet) -> dict[str, Any]:
    return {
        "name": one.plan.name,
        "replicas": dict(one.counts),
        "gpus": one.gpus,
        "usd_per_hour": one.usd_per_hour,
        "headroom": one.headroom,
        "model_replicas": one.candidate.counts,
        "verification": one.verification.as_json(),
    } | one.plan.as_json()


def _modelled(one: Candidate) -> dict[str, Any]:
    return {
        "replicas": one.counts,
        "usd_per_hour": one.usd_per_hour,
        "within_limits": {pool: sized.within_limits for pool, sized in one.pools.items()},
    } | one.plan.as_json()


def verdict(result: PlanResult) -> str:
    """Return whether splitting pays, in one sentence."""
    paged, pools = result.paged, result.pools
    if paged is None:
        return "No single pool with paged KV meets the limits: relax the limits, or choose another profile."
    baseline = f"one paged pool (${paged.usd_per_hour:,.2f} per hour, {paged.gpus:,} GPUs)"
    if pools is None:
        return f"Splitting does not pay: no simulated pair of pools meets the limits; {baseline} does."
    measured = saving(pools, paged)
    split = (
        f"a short and a long pool with B_short = {pools.plan.b_short_tokens:,} "
        f"(${pools.usd_per_hour:,.2f} per hour, {pools.gpus:,} GPUs)"
    )
    exact = f"sizes are exact to {measured.resolution:.1%}, {len(pools.verification.runs)} seeds"
    if measured.ratio <= 0:
        more = f"costs {-measured.ratio:.1%} more than" if measured.ratio else "costs the same as"
        return f"Splitting does not pay: {split} {more} {baseline}; {exact}."
    pays = "pays" if measured.ratio > measured.resolution else "hardly pays"
    return f"Splitting {pays}: {split} costs {measured.ratio:.1%} less than {baseline}; {exact}."


def fleets_table(result: PlanResult) -> str:
    """Return all simulated fleets with sizes and tail latencies; > marks the fleet to choose."""
    head = [
        *("fleet", "settings", "B_short", "replicas", "by the model", "GPUs", "$/hour", "saves"),
        *("P99 TTFT s", "P99 TTFT of long s", "P99 TPOT ms", "preempted ‰"),
    ]
    rows = [_fleet_row(one, result) for one in result.simulated]
    return table_text(head, rows, text_columns=2, key_columns=2)


def _fleet_row(one: SizedFleet, result: PlanResult) -> list[str]:
    found = one.verification
    mark = "> " if one is result.best else ""
    saved = None
    if result.paged is not None and one is not result.paged:
        saved = saving(one, result.paged).ratio
    return [
        mark + one.plan.name,
        "; ".join(dict.fromkeys(str(pool) for pool in one.plan.pools.values())),
        number_text(one.plan.b_short_tokens if len(one.plan.pools) > 1 else None),
        " + ".join(f"{count:,} {pool}" for pool, count in one.counts.items()),
        " + ".join(f"{count:,}" for count in one.candidate.counts.values()),
        number_text(one.gpus),
        number_text(one.usd_per_hour, 2),
        "-" if saved is None else f"{saved:+.1%}",
        interval_text(found.ttft, 2),
        interval_text(found.long_ttft, 2),
        interval_text(found.tpot, 1, 1_000),
        number_text(found.preemptions_per_mille, 2),
    ]
