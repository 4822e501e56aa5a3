"""Output of a plan: JSON, a table, a verdict in one sentence, and a report."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.core.metrics.confidence import ConfidenceInterval
from serve_app.lab.planning.fleets import PAGED, POOLS, WORST_CASE
from serve_app.lab.planning.plan import Candidate, Plan, PlanResult, SizedFleet
from serve_app.lab.planning.verification import Verification, at_full_size
from serve_app.lab.reports.document import (
    Cell,
    LineStyle,
    Origin,
    Plot,
    PlotAxis,
    ReportSection,
    ReportTable,
    ResultReport,
    Series,
    Unit,
    interval_cell,
    number_cell,
)


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
        "fleets": [_fleet(one, result) for one in chosen_fleets(result)],
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


_COLOURS = {WORST_CASE: 1, PAGED: 0, POOLS: 2}


def chosen_fleets(result: PlanResult) -> list[SizedFleet]:
    """Return the smallest fleet of each kind that meets the limits, if any."""
    return [one for one in (result.worst_case, result.paged, result.pools) if one is not None]


def boundary_plots(result: PlanResult) -> Iterator[Plot]:
    """Yield plots of GPUs and cost against the boundary between the pools."""
    positions = sorted({one.plan.b_short_tokens for one in result.modelled} | _simulated_borders(result))
    for title, unit, of_model, of_fleet in (
        ("GPUs", Unit.COUNT, lambda one: float(one.plan.gpus(one.counts)), lambda one: float(one.gpus)),
        ("US dollars per hour", Unit.DOLLARS, lambda one: one.usd_per_hour, lambda one: one.usd_per_hour),
    ):
        modelled = {one.plan.b_short_tokens: of_model(one) for one in result.modelled}
        baselines = [one for one in (result.paged, result.worst_case) if one is not None]
        series = [
            Series(
                name="two pools, by the model",
                values=[modelled.get(place) for place in positions],
                style=LineStyle.DASHED,
                colour=3,
            ),
            Series(
                name="two pools, simulated",
                values=_at_borders(result, positions, of_fleet),
                style=LineStyle.POINTS,
                colour=_COLOURS[POOLS],
            ),
            *(_level(one, len(positions), of_fleet(one)) for one in baselines),
        ]
        yield Plot(
            title=title,
            reading="Lower is better. The horizontal lines are the simulated fleets of one pool.",
            x=PlotAxis(label="B_short, tokens", unit=Unit.COUNT, logarithmic=True, base=2),
            y=PlotAxis(label=title, unit=unit, logarithmic=None),
            positions=[float(place) for place in positions],
            series=series,
        )


def _simulated_borders(result: PlanResult) -> set[int]:
    return {one.plan.b_short_tokens for one in result.simulated if one.plan.name == POOLS}


def _at_borders(
    result: PlanResult, positions: Sequence[int], of: Callable[[SizedFleet], float]
) -> list[float | None]:
    """Return the smallest simulated pair of pools at each boundary; None where there is none."""
    return [
        min(
            (
                of(one)
                for one in result.simulated
                if one.plan.name == POOLS and one.plan.b_short_tokens == place
            ),
            default=None,
        )
        for place in positions
    ]


def _level(one: SizedFleet, count: int, value: float) -> Series:
    style = LineStyle.BASELINE if one.plan.name == PAGED else LineStyle.LINE
    return Series(name=one.plan.name, values=[value] * count, style=style, colour=_COLOURS[one.plan.name])


def tail_plots(plan: Plan) -> Iterator[Plot]:
    """Yield plots of the tail latencies of every simulated size."""
    slo = plan.demand.slo
    tails: tuple[tuple[str, Callable[[Verification], ConfidenceInterval | None], float | None], ...] = (
        ("P99 TTFT", lambda one: one.ttft, slo.ttft_s),
        ("P99 TPOT", lambda one: one.tpot, slo.tpot_s),
    )
    chosen = {one.plan.name: one.plan for one in chosen_fleets(plan.result)}
    measured = [one for one in plan.verifier.measured if one.plan == chosen.get(one.plan.name)]
    positions = sorted({_gpus(plan, one) for one in measured})
    for title, of, limit in tails:
        series = [
            Series(
                name=f"{name}, {'meets' if meets else 'misses'} the limits",
                values=_tails_at(plan, positions, of, [one for one in measured if _is(one, name, meets)]),
                style=LineStyle.POINTS,
                colour=_COLOURS[name] + (0 if meets else 4),
            )
            for name in chosen
            for meets in (True, False)
            if any(_is(one, name, meets) for one in measured)
        ]
        if limit is not None:
            series.append(Series(name="limit", values=[limit] * len(positions), style=LineStyle.BASELINE))
        yield Plot(
            title=f"{title} against the number of GPUs",
            reading="A fleet must be below the limit. The maximum "
            "of fleets with the same number of GPUs is shown.",
            x=PlotAxis(label="GPUs", unit=Unit.COUNT, logarithmic=None),
            y=PlotAxis(label=title, unit=Unit.SECONDS, logarithmic=title == "P99 TTFT"),
            positions=[float(place) for place in positions],
            series=series,
        )


def _is(one: Verification, name: str, meets: bool) -> bool:
    return one.plan.name == name and one.meets is meets


def _gpus(plan: Plan, one: Verification) -> int:
    share = plan.verifier.share
    return one.plan.gpus({pool: at_full_size(count, share) for pool, count in one.counts.items()})


def _tails_at(
    plan: Plan,
    positions: Sequence[int],
    of: Callable[[Verification], ConfidenceInterval | None],
    measured: Sequence[Verification],
) -> list[float | None]:
    highest: dict[int, float] = {}
    for one in measured:
        interval = of(one)
        if interval is not None:
            place = _gpus(plan, one)
            highest[place] = max(interval.mean, highest.get(place, interval.mean))
    return [highest.get(place) for place in positions]


def plan_report(plan: Plan, origin: Origin, warnings: Sequence[str]) -> ResultReport:
    """Return the report."""
    trace, rate = plan.workload.trace, f"{plan.demand.rate_per_s:g} requests/s"
    return ResultReport(
        title=f"A fleet for {trace.name} at {rate}",
        question=f"What is the smallest fleet for {trace.title} at {rate}, and does it pay to split it into "
        "a short and a long pool?",
        facts=list(_facts(plan)),
        verdict=[verdict(plan.result)],
        notes=[*_notes(plan), *warnings],
        sections=list(_sections(plan)),
        origin=origin,
    )


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    demand, trace = plan.demand, plan.workload.trace
    yield (
        "workload",
        f"{trace.title} at {demand.rate_per_s:g} requests/s, {demand.trace.requests:,} requests per run",
    )
    yield "source", trace.source
    yield "limits", f"P99 TTFT at most {demand.slo.ttft_s:g} s and P99 TPOT at most {demand.slo.tpot_s:g} s"
    yield "compared", ", ".join(f"{name}: {text}" for name, text in _KINDS.items())
    yield "scheduler", f"policy {demand.policy}, the same for every fleet"
    size = "full size" if plan.verifier.share == 1 else f"{plan.verifier.share:.3g} of its size"
    yield "simulated at", f"{size}, {len(_seeds(plan.result))} seeds"


_KINDS = {
    WORST_CASE: "batches sized for the longest context",
    PAGED: "one pool, the baseline",
    POOLS: "a short and a long pool",
}


def _seeds(result: PlanResult) -> set[int]:
    return {run.seed for one in chosen_fleets(result) for run in one.verification.runs}


def _notes(plan: Plan) -> Iterator[str]:
    yield (
        "A fleet meets its limits when, with every seed, all requests complete and both P99 are within them. "
        "Sizes are whole replicas, so savings below one replica's share are not significant."
    )
    if plan.verifier.share < 1:
        yield "Fleets were scaled down for the simulation, with their rate, and the results scaled up."


# -- sections ----------------------------------------------------------------------------------------------


def _sections(plan: Plan) -> Iterator[ReportSection]:
    result = plan.result
    if chosen_fleets(result):
        yield ReportSection(
            title="Smallest fleets that meet the limits",
            intro="Latencies are means over seeds ± 95 % interval.",
            blocks=[fleets_table(chosen_fleets(result), result, mark_chosen=False), *_pools(result)],
        )
    yield ReportSection(
        title="Size against B_short",
        intro="B_short is the maximum token budget of a request whose home pool is the short one.",
        blocks=list(boundary_plots(result)),
    )
    yield ReportSection(
        title="Tail latency against size",
        intro="All sizes that were simulated in the search for the chosen fleets.",
        blocks=list(tail_plots(plan)),
    )
    if result.simulated:
        yield ReportSection(
            title="All fleets that were sized by simulation", blocks=[fleets_table(result.simulated, result)]
        )


def fleets_table(
    fleets: Sequence[SizedFleet], result: PlanResult, *, mark_chosen: bool = True
) -> ReportTable:
    """Return a table of fleets with sizes and tail latencies, marking the smallest of each kind with >."""
    chosen = chosen_fleets(result) if mark_chosen else []
    return ReportTable(
        caption="Fleets, with savings against one paged pool",
        head=[
            *("fleet", "settings", "B_short", "replicas", "by the model", "GPUs", "$/hour", "saves"),
            *("P99 TTFT s", "P99 TTFT of long s", "P99 TPOT ms", "preempted ‰"),
        ],
        rows=[
            _fleet_row(one, result, mark="> " if any(one is best for best in chosen) else "")
            for one in fleets
        ],
        text_columns=2,
    )


def _fleet_row(one: SizedFleet, result: PlanResult, mark: str) -> list[str | Cell]:
    found = one.verification
    saved: str | Cell = "-"
    if result.paged is not None and one is not result.paged:
        ratio = saving(one, result.paged).ratio
        saved = Cell(f"{ratio:+.1%}", ratio)
    return [
        mark + one.plan.name,
        "; ".join(dict.fromkeys(str(pool) for pool in one.plan.pools.values())),
        number_cell(one.plan.b_short_tokens) if len(one.plan.pools) > 1 else "-",
        " + ".join(f"{count:,} {pool}" for pool, count in one.counts.items()),
        " + ".join(f"{count:,}" for count in one.candidate.counts.values()),
        number_cell(one.gpus),
        number_cell(one.usd_per_hour, 2),
        saved,
        interval_cell(found.ttft, 2),
        interval_cell(found.long_ttft, 2),
        interval_cell(found.tpot, 1, 1_000),
        number_cell(found.preemptions_per_mille, 2),
    ]


def _pools(result: PlanResult) -> Iterator[ReportTable]:
    pools = result.pools
    if pools is None:
        return
    rows: list[list[str | Cell]] = []
    for pool in pools.plan.pools:
        figures = pools.verification.pool_figures(pool)
        rows.append(
            [
                pool,
                number_cell(pools.counts[pool]),
                number_cell(pools.usd_by_pool[pool], 2),
                _share(figures["request_ratio"]),
                _share(figures["token_ratio"]),
                number_cell(figures["p99_ttft_s"], 2),
                number_cell(figures["p99_tpot_s"], 1, 1_000),
            ]
        )
    yield ReportTable(
        caption="The two pools: shares of requests and tokens, and tail latencies, means over seeds",
        head=["pool", "replicas", "$/hour", "requests", "tokens", "P99 TTFT s", "P99 TPOT ms"],
        rows=rows,
    )


def _share(value: float | None) -> Cell:
    return Cell("-") if value is None else Cell(f"{value:.1%}", value)
