"""The output of a plan: JSON, a table, and a verdict in one sentence."""

from dataclasses import dataclass
from typing import Any

from serve_app.metrics.confidence import ConfidenceInterval
from serve_app.planning.model.closed_form import ClosedForm
from serve_app.planning.sizing.candidates import Candidate, PlanResult, SizedFleet
from serve_app.planning.sizing.fleets import WORST_CASE
from serve_app.tables import shown_table


@dataclass(frozen=True, slots=True)
class Saving:
    """One fleet's cost against another's.

    Attributes:
        ratio: share of the other's cost that is saved; negative when it costs more.
        resolution: share of the other's cost of the finest step: one replica, or a quarter of a stand-in's.
    """

    ratio: float
    resolution: float


def saving(of: SizedFleet, against: SizedFleet) -> Saving:
    """The saving of a fleet against another."""
    steps = [
        (0.25 if one.share < 1 and one.plan.name != WORST_CASE else 1.0)
        * one.usd_per_hour
        / sum(one.verification.counts.values())
        / against.usd_per_hour
        for one in (of, against)
    ]
    return Saving(1 - of.usd_per_hour / against.usd_per_hour, max(steps))


def plan_as_json(result: PlanResult) -> dict[str, Any]:
    """The chosen fleets with their verification, the verdict, the closed forms, and the search."""
    found = [one for one in (result.worst_case, result.paged, result.pools) if one is not None]
    return {
        "fleets": [_fleet(one, result) for one in found],
        "verdict": verdict(result),
        "closed_forms": {
            "against-worst-case-homogeneous": _terms(result.against_worst_case),
            "against-paged-homogeneous": _terms(result.against_paged),
        },
        "simulated": [_simulated(one) for one in result.simulated],
        "modelled": [_modelled(one) for one in result.modelled],
    }


def _fleet(one: SizedFleet, result: PlanResult) -> dict[str, Any]:
    """The saving is against one pool with paged KV; that pool's own is against the worst case."""
    verification = one.verification
    closed_form, simulated = None, None
    against: dict[str, Any] = {}
    for baseline, terms in (
        (result.worst_case, result.against_worst_case),
        (result.paged, result.against_paged),
    ):
        if baseline is None or baseline is one:
            continue
        measured = saving(one, baseline)
        own_terms = terms if one is result.pools else None
        against[baseline.plan.name] = {
            "simulated": measured.ratio,
            "resolution": measured.resolution,
            "closed_form": None if own_terms is None else own_terms.as_json(),
        }
        simulated = measured.ratio
        closed_form = None if own_terms is None else own_terms.by_work
    return {
        "name": one.plan.name,
        "replicas": sum(one.counts.values()),
        "per_pool": {pool: _pool(one, pool) for pool in one.plan.pools},
        "gpus": one.gpus,
        "usd_per_hour": one.usd_per_hour,
        "p99_ttft_s": None if verification.ttft is None else verification.ttft.mean,
        "p99_tpot_s": None if verification.tpot is None else verification.tpot.mean,
        "preemptions": sum(run.preemptions for run in verification.runs),
        "closed_form_saving": closed_form,
        "simulated_saving": simulated,
        "savings": against,
        "simulated_share": one.share,
        "headroom": one.headroom,
        "verification": verification.as_json(),
        "model_replicas": one.candidate.counts,
    } | one.plan.as_json()


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


def _terms(terms: ClosedForm | None) -> dict[str, float] | None:
    return None if terms is None else terms.as_json()


def table(result: PlanResult) -> str:
    """A table with a line for every fleet that was sized by simulation."""
    head = (
        *("fleet", "B_short", "replicas", "model", "GPUs", "$/hour"),
        *("P99 TTFT s", "long s", "P99 TPOT ms", "preempted ‰", "settings"),
    )
    chosen = (result.worst_case, result.paged, result.pools)
    lines = [
        (
            ("> " if any(one is best for best in chosen) else "  ") + one.plan.name,
            f"{one.plan.b_short_tokens:,}" if len(one.plan.pools) > 1 else "-",
            " + ".join(f"{count:,}" for count in one.counts.values()),
            " + ".join(f"{count:,}" for count in one.candidate.counts.values()),
            f"{one.gpus:,}",
            f"{one.usd_per_hour:,.2f}",
            _cell(one.verification.ttft, 2),
            _cell(one.verification.long_ttft, 2),
            _cell(one.verification.tpot, 1, scale=1_000),
            f"{one.verification.preemptions_per_mille:.2f}",
            "; ".join(dict.fromkeys(str(pool) for pool in one.plan.pools.values())),
        )
        for one in result.simulated
    ]
    return shown_table(head, lines, text_columns=len(head))


def verdict(result: PlanResult) -> str:
    """Whether splitting pays, in one sentence."""
    paged, pools = result.paged, result.pools
    if paged is None:
        return "No single pool with paged KV meets the limits: relax them, or choose another profile."
    baseline = f"one paged pool (${paged.usd_per_hour:,.2f} an hour, {paged.gpus:,} GPUs)"
    if pools is None:
        return (
            f"Splitting does not pay: no pair of pools that was simulated meets the limits; {baseline} does."
        )
    measured = saving(pools, paged)
    split = (
        f"a short and a long pool with B_short = {pools.plan.b_short_tokens:,} "
        f"(${pools.usd_per_hour:,.2f} an hour, {pools.gpus:,} GPUs)"
    )
    exact = f"sizes are exact to {measured.resolution:.1%}, {len(pools.verification.runs)} seeds"
    if measured.ratio <= 0:
        more = f"costs {-measured.ratio:.1%} more than" if measured.ratio else "costs the same as"
        return f"Splitting does not pay: {split} {more} {baseline}; {exact}."
    pays = "pays" if measured.ratio > measured.resolution else "hardly pays"
    return f"Splitting {pays}: {split} costs {measured.ratio:.1%} less than {baseline}; {exact}."


def _cell(interval: ConfidenceInterval | None, decimals: int, *, scale: float = 1.0) -> str:
    return "-" if interval is None else interval.as_text(decimals, scale)
