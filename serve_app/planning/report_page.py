"""The report of a plan: the fleets that meet the limits, what they cost, and how that depends on size."""

from collections.abc import Iterator, Sequence

from serve_app.planning.plan import Plan
from serve_app.planning.report_plots import border_plots, chosen_fleets, tail_plots
from serve_app.planning.results import saving, verdict
from serve_app.planning.sizing.candidates import PlanResult, SizedFleet
from serve_app.planning.sizing.fleets import PAGED, POOLS, WORST_CASE
from serve_app.reports.document import (
    Cell,
    Origin,
    ReportSection,
    ReportTable,
    ResultReport,
    interval_cell,
    number_cell,
)


def plan_report(plan: Plan, origin: Origin, warnings: Sequence[str]) -> ResultReport:
    """The report."""
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
        f"{trace.title} at {demand.rate_per_s:g} requests/s, {demand.trace.requests:,} requests a run",
    )
    yield "source", trace.source
    yield "limits", f"P99 TTFT at most {demand.slo.ttft_s:g} s and P99 TPOT at most {demand.slo.tpot_s:g} s"
    yield "compared", ", ".join(f"{name}: {text}" for name, text in _KINDS.items())
    yield "scheduler", f"policy {demand.policy}, the same for every fleet"
    size = "its full size" if plan.verifier.share == 1 else f"{plan.verifier.share:.3g} of its size"
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
        "Sizes are whole replicas, so savings below one replica's share mean nothing."
    )
    if plan.verifier.share < 1:
        yield "Fleets were simulated as stand-ins at a share of the rate, and their numbers scaled up."


# Sections


def _sections(plan: Plan) -> Iterator[ReportSection]:
    result = plan.result
    if chosen_fleets(result):
        yield ReportSection(
            title="The smallest fleets that meet the limits",
            intro="Latencies are means over seeds ± 95 % interval.",
            blocks=[_fleets(chosen_fleets(result), result), *_pools(result)],
        )
    yield ReportSection(
        title="Size against B_short",
        intro="B_short is the largest token budget of a request that belongs to the short pool.",
        blocks=list(border_plots(result)),
    )
    yield ReportSection(
        title="Tail latency against size",
        intro="Every size that was simulated on the way to the chosen fleets.",
        blocks=list(tail_plots(plan)),
    )
    if result.simulated:
        yield ReportSection(
            title="Everything that was sized by simulation", blocks=[_fleets(result.simulated, result)]
        )


def _fleets(fleets: Sequence[SizedFleet], result: PlanResult) -> ReportTable:
    return ReportTable(
        caption="Fleets, with what they save against one paged pool",
        head=[
            *("fleet", "settings", "B_short", "replicas", "GPUs", "$/hour", "saves"),
            *("P99 TTFT s", "P99 TTFT of long s", "P99 TPOT ms", "preempted ‰"),
        ],
        rows=[_fleet(one, result) for one in fleets],
        text_columns=2,
    )


def _fleet(one: SizedFleet, result: PlanResult) -> list[str | Cell]:
    found = one.verification
    saved: str | Cell = "-"
    if result.paged is not None and one is not result.paged:
        ratio = saving(one, result.paged).ratio
        saved = Cell(f"{ratio:+.1%}", ratio)
    return [
        one.plan.name,
        "; ".join(dict.fromkeys(str(pool) for pool in one.plan.pools.values())),
        number_cell(one.plan.b_short_tokens) if len(one.plan.pools) > 1 else "-",
        " + ".join(f"{count:,} {pool}" for pool, count in one.counts.items()),
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
        caption="The two pools: their parts of requests and tokens, and their tails, means over seeds",
        head=["pool", "replicas", "$/hour", "requests", "tokens", "P99 TTFT s", "P99 TPOT ms"],
        rows=rows,
    )


def _share(value: float | None) -> Cell:
    return Cell("-") if value is None else Cell(f"{value:.1%}", value)
