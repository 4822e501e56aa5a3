"""Output of simulated runs: JSON, a table over seeds, and a report with the differences of policies."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from serve_app.core.metrics.confidence import ConfidenceInterval, interval_95
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.slo import Slo
from serve_app.lab.reports.document import (
    Cell,
    DifferenceTable,
    FigureDifference,
    Origin,
    Plot,
    ReportSection,
    ReportTable,
    ResultReport,
    Sample,
    interval_cell,
    number_cell,
    paired_difference,
    verdict_of,
)
from serve_app.lab.reports.plots import distribution_plot, length_plots, waiting_plot
from serve_app.lab.simulation.partitions import partition_as_json
from serve_app.lab.simulation.run import DIRECT, ORACLE, RunResult, SloByLength

Row = Mapping[str, Any]
"""A run as JSON."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A column of the table.

    Attributes:
        value: returns its value in a row.
        name: its name in a sentence.
    """

    heading: str
    value: Callable[[Row], float | None]
    decimals: int = 2
    name: str = ""
    lower_is_better: bool = True


def _latency(name: str, size: str, figure: str) -> Callable[[Row], float | None]:
    return lambda row: row["metrics"][name][size][figure]


FIGURES = (
    Figure("short TTFT mean s", _latency("ttft_s", "short", "mean"), 3, "mean TTFT of short prompts"),
    Figure("short TTFT p99 s", _latency("ttft_s", "short", "p99"), 3, "P99 TTFT of short prompts"),
    Figure("long TTFT mean s", _latency("ttft_s", "long", "mean"), 3, "mean TTFT of long prompts"),
    Figure("long TTFT p99 s", _latency("ttft_s", "long", "p99"), 2, "P99 TTFT of long prompts"),
    Figure("longest wait s", _latency("queue_wait_s", "all", "max"), 2, "longest wait"),
    Figure(
        "TPOT mean ms", lambda row: _scaled(row["metrics"]["tpot_s"]["all"]["mean"], 1_000), 1, "mean TPOT"
    ),
    Figure("goodput /s", lambda row: row["metrics"]["goodput_per_s"], 2, "goodput", lower_is_better=False),
    Figure(
        "tokens/s",
        lambda row: row["whole_run"]["throughput_tokens_per_s"],
        0,
        "throughput",
        lower_is_better=False,
    ),
)


def run_as_json(result: RunResult) -> dict[str, Any]:
    """Return one element of `runs` in the JSON output: the figures, and the settings that they depend on."""
    settings, trace = result.settings, result.workload.trace
    whole = result.whole
    return {
        "policy": settings.name,
        "seed": settings.seed,
        "load": settings.load,
        "rate_per_s": trace.rate_per_s,
        "metrics": result.summary.as_json(),
        "outcomes": dict(result.summary.outcomes),
        "whole_run": {
            "requests": sum(whole.outcomes.values()),
            "completed": whole.completed,
            "outcomes": dict(whole.outcomes),
            "makespan_s": whole.makespan_s,
            "throughput_tokens_per_s": whole.throughput_tokens_per_s,
            "output_tokens_per_s": whole.output_tokens_per_s,
            "preemptions": whole.preemptions,
        },
        "dropped_too_long": result.workload.dropped,
        "clipped_answers": result.workload.clipped,
        "partitions": [
            {"at_s": at_s, "queues": partition_as_json(partition)} for at_s, partition in result.partitions
        ],
        "deployable": settings.policy != ORACLE,
        "simulated_requests_per_s": sum(whole.outcomes.values()) / result.wall_s,
        "settings": settings_as_json(result),
    }


def settings_as_json(result: RunResult) -> dict[str, Any]:
    """Return the settings of a run, all resolved."""
    settings = result.settings
    plain = asdict(settings)
    plain["trace"]["folder"] = None if settings.trace.folder is None else str(settings.trace.folder)
    # JSON has no infinity.
    timeout_s = settings.disclosure.queue_timeout_s
    plain["disclosure"]["queue_timeout_s"] = None if timeout_s == float("inf") else timeout_s
    plain["engines"] = [
        {"replica": plan.replica_id, "pool": plan.pool, **asdict(plan.engine), **asdict(plan.step_time)}
        for plan in settings.fleet.plans(isolated=settings.isolates)
    ]
    return plain


def unequal_work(rows: Iterable[Row]) -> list[str]:
    """Return the runs that did not complete all requests and so are not comparable with the others."""
    return [
        f"{row['policy']}, seed {row['seed']}: only {row['whole_run']['completed']:,} of "
        f"{row['whole_run']['requests']:,} requests completed ({_counts(row['whole_run']['outcomes'])})"
        for row in rows
        if row["whole_run"]["completed"] != row["whole_run"]["requests"]
    ]


def by_policy(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group the rows by policy name."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(policy_of(row), []).append(row)
    return groups


def policy_of(row: Row) -> str:
    """Return the name of a run's policy, marked if it is not deployable."""
    return str(row["policy"]) if row["deployable"] else f"{row['policy']} (not deployable)"


def _counts(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items())


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


RowsByPolicy = Mapping[str, Sequence[Row]]
"""Runs as JSON by policy name."""

_PERCENTILES = ("p50", "p95", "p99", "max")
_MAX_TENANTS = 20


def tables(rows: RowsByPolicy) -> Iterator[ReportTable]:
    """Yield the figures of every policy, its percentiles, the outcomes, and tenants."""
    yield policies_table(rows)
    over = _over(rows)
    yield ReportTable(
        caption=f"Percentiles of the TTFT in seconds: {over}",
        head=["policy", "prompts", *_PERCENTILES],
        rows=[
            [name, size, *(interval_cell(_over_seeds(group, _ttft(size, each)), 3) for each in _PERCENTILES)]
            for name, group in rows.items()
            for size in ("short", "long")
        ],
        text_columns=2,
    )
    yield _outcomes(rows)
    yield from _queues(rows)
    tenants = _tenants(rows)
    if tenants is not None:
        yield tenants


def policies_table(rows: RowsByPolicy) -> ReportTable:
    """Return the figures of every policy: means over seeds with half the width of their 95 % interval."""
    return ReportTable(
        caption=f"Every policy: {_over(rows)}",
        head=["policy", "seeds", *(figure.heading for figure in FIGURES)],
        rows=[
            [
                name,
                number_cell(len(group)),
                *(interval_cell(_over_seeds(group, figure.value), figure.decimals) for figure in FIGURES),
            ]
            for name, group in rows.items()
        ],
    )


def _over(rows: RowsByPolicy) -> str:
    count = len(next(iter(rows.values())))
    return f"means over {count} seeds ± 95 % interval" if count > 1 else "one seed, so without intervals"


def _over_seeds(rows: Sequence[Row], of: Callable[[Row], float | None]) -> ConfidenceInterval | None:
    values = [value for row in rows if (value := of(row)) is not None]
    return interval_95(values) if values else None


def _ttft(size: str, figure: str) -> Callable[[Row], float | None]:
    return lambda row: row["metrics"]["ttft_s"][size][figure]


def _outcomes(rows: RowsByPolicy) -> ReportTable:
    names = sorted(
        {name for group in rows.values() for row in group for name in row["whole_run"]["outcomes"]}
    )
    return ReportTable(
        caption="Outcomes of the requests of all runs, including the warm-up",
        head=["policy", *names, "preemptions"],
        rows=[
            [
                policy,
                *(
                    number_cell(sum(row["whole_run"]["outcomes"].get(name, 0) for row in group))
                    for name in names
                ),
                number_cell(sum(row["whole_run"]["preemptions"] or 0 for row in group)),
            ]
            for policy, group in rows.items()
        ],
    )


def _queues(rows: RowsByPolicy) -> Iterator[ReportTable]:
    """Yield the length queues that policies had learned by the end of the first seed's run."""
    lines: list[list[str | Cell]] = []
    for policy, group in rows.items():
        for found in group[0]["partitions"][-1:]:
            bounds = ", ".join(f"{queue['min']:,}-{queue['max']:,}" for queue in found["queues"])
            lines.append([policy, bounds, number_cell(len(found["queues"])), number_cell(found["at_s"], 1)])
    if lines:
        yield ReportTable(
            caption="Length queues at the end of the first seed's run, in prompt tokens",
            head=["policy", "queues", "number", "active since, s"],
            rows=lines,
            text_columns=2,
        )


def _tenants(rows: RowsByPolicy) -> ReportTable | None:
    """Return the mean TTFT of the tenants with most requests; None with a single tenant."""
    first = next(iter(rows.values()))[0]["metrics"]["tenants"]
    if len(first) < 2:
        return None
    names = sorted(first, key=lambda name: -first[name]["requests"])[:_MAX_TENANTS]
    return ReportTable(
        caption=f"Mean TTFT of tenants in seconds, means over seeds ± 95 % interval: {len(names)} of "
        f"{len(first):,}, those with the most requests",
        head=["tenant", "requests, first seed", *rows],
        rows=[
            [
                name,
                number_cell(first[name]["requests"]),
                *(interval_cell(_over_seeds(group, _tenant_ttft(name)), 3) for group in rows.values()),
            ]
            for name in names
        ],
    )


def _tenant_ttft(name: str) -> Callable[[Row], float | None]:
    def of(row: Row) -> float | None:
        figures = row["metrics"]["tenants"].get(name)
        return None if figures is None else figures["ttft_s"]["mean"]

    return of


ByPolicy = Mapping[str, Sequence[RunResult]]
"""Runs with their records by policy name."""


def ttft_plots(by_policy: ByPolicy, base: str) -> Iterator[Plot]:
    """Yield the distribution of the TTFT, of short prompts and of long ones, and the TTFT by length."""
    for title, records in _by_size(by_policy, lambda run: run.measured):
        yield distribution_plot(f"Distribution: {title}", records, base)
    yield from length_plots(
        {name: [each for run in runs for each in run.measured] for name, runs in by_policy.items()}, base
    )


def timeline_plots(by_policy: ByPolicy, base: str) -> Iterator[Plot]:
    """Yield the number of requests without a first token over time, in the first seed's run."""
    firsts = {name: runs[:1] for name, runs in by_policy.items()}
    for title, records in _by_size(firsts, lambda run: run.records):
        yield waiting_plot(f"Requests waiting for their first token: {title}", records, base)


def _by_size(
    by_policy: ByPolicy, records_of: Callable[[RunResult], Sequence[RequestRecord]]
) -> Iterator[tuple[str, dict[str, list[RequestRecord]]]]:
    """Yield the records of short and of long prompts, by policy."""
    short_at = next(iter(by_policy.values()))[0].settings.short_at_tokens
    sizes: tuple[tuple[str, Callable[[int], bool]], ...] = (
        (f"short prompts, at most {short_at:,} tokens", lambda tokens: tokens <= short_at),
        ("long prompts, all others", lambda tokens: tokens > short_at),
    )
    for title, belongs in sizes:
        yield (
            title,
            {
                name: [each for run in runs for each in records_of(run) if belongs(each.prompt_tokens)]
                for name, runs in by_policy.items()
            },
        )


_BASELINES = ("fcfs", DIRECT)
# Figures in the verdict: both ends of the trade-off between short and long prompts, and its cost.
_DECISIVE = {
    *("short TTFT mean s", "short TTFT p99 s", "long TTFT mean s", "long TTFT p99 s"),
    *("TPOT mean ms", "goodput /s"),
}


def simulation_report(
    results: Sequence[RunResult], rows: Sequence[Row], origin: Origin, warnings: Sequence[str]
) -> ResultReport:
    """Return the report.

    Args:
        results: with their records, all of one trace and fleet.
        rows: the same results as JSON.
    """
    results_of: dict[str, list[RunResult]] = {}
    for result, row in zip(results, rows, strict=True):
        results_of.setdefault(policy_of(row), []).append(result)
    of_policy = by_policy(rows)
    base = _baseline(list(of_policy))
    differences = {name: _differences(of_policy, base, name) for name in of_policy if name != base}
    sample = Sample(len(of_policy[base]), "seed", "seeds", "use more --seeds")
    first = results[0]
    return ResultReport(
        title=f"{' against '.join(_candidates_and(base, list(of_policy)))} on {first.workload.trace.name}",
        question=_question(base, list(of_policy), first),
        facts=list(_facts(first, list(of_policy), sample)),
        verdict=_verdict(base, differences, sample),
        notes=[*_notes(differences, first), *warnings],
        sections=list(_sections(results_of, of_policy, base, differences)),
        origin=origin,
    )


def _baseline(policies: Sequence[str]) -> str:
    """Return first come, first served if it was played, else no gateway, else the first policy named."""
    return next((name for name in _BASELINES if name in policies), policies[0])


def _candidates_and(base: str, policies: Sequence[str]) -> list[str]:
    candidates = [name for name in policies if name != base]
    return [", ".join(candidates), base] if candidates else [base]


# -- question and facts ------------------------------------------------------------------------------------


def _question(base: str, policies: Sequence[str], result: RunResult) -> str:
    trace, settings = result.workload.trace, result.settings
    count = sum(settings.fleet.replicas.values())
    on = f"{count} simulated replica{'' if count == 1 else 's'} of {settings.fleet.profile}"
    candidates = [name for name in policies if name != base]
    if not candidates:
        return f"How does {base} serve {trace.title} on {on}?"
    return f"Does {' or '.join(candidates)} serve {trace.title} better than {base} on {on}?"


def _facts(result: RunResult, policies: Sequence[str], sample: Sample) -> Iterator[tuple[str, str]]:
    settings, trace = result.settings, result.workload.trace
    yield "policies", ", ".join(policies)
    load = "" if settings.load is None else f", {settings.load:.3g} of the rate that saturates this fleet"
    rate = "all at once" if trace.rate_per_s is None else f"{trace.rate_per_s:.2f} requests/s{load}"
    yield "workload", f"{trace.title}: {len(trace.requests):,} requests per run, {rate}"
    yield "source", trace.source
    pools = ", ".join(f"{count} in pool {pool}" for pool, count in settings.fleet.replicas.items())
    gpus = f"{settings.fleet.gpus:,} GPU{'' if settings.fleet.gpus == 1 else 's'}"
    yield "fleet", f"{settings.fleet.profile}: {pools} ({gpus})"
    yield "short prompts", f"at most {settings.short_at_tokens:,} tokens; all others are long"
    yield "goodput", f"requests within all of these limits, per second: {_limits(settings.slo)}"
    excluded = f"{100 * settings.warm_up_ratio:g} %"
    yield "measured", f"{sample.text}; the first {excluded} of the requests of each run are excluded"


def _limits(slo: Slo) -> str:
    limits = {
        "TTFT of short prompts": slo.ttft_s,
        "TTFT of long prompts": slo.long_ttft_s if isinstance(slo, SloByLength) else None,
        "TPOT": slo.tpot_s,
        "end to end": slo.e2e_s,
    }
    return ", ".join(f"{name} {limit:g} s" for name, limit in limits.items() if limit is not None)


def _verdict(base: str, differences: Mapping[str, Sequence[FigureDifference]], sample: Sample) -> list[str]:
    if not differences:
        advice = "add a baseline with --policy"
        return [f"{base} was simulated without a baseline: {advice}."]
    names = {figure.name for figure in FIGURES if figure.heading in _DECISIVE}
    return [
        verdict_of(base, name, [one for one in found if one.figure in names], sample)
        for name, found in differences.items()
    ]


def _notes(differences: Mapping[str, Sequence[FigureDifference]], result: RunResult) -> Iterator[str]:
    if differences:
        yield (
            "The verdict covers metrics that were chosen in advance; all others are below. All policies "
            "served the same requests, so intervals are of paired differences per seed (Student's t, 95 %)."
        )
        yield "Intervals are not corrected for multiple comparisons: one of twenty may exclude 0 by chance."
    if any("not deployable" in name for name in differences):
        yield "A policy that is not deployable knows the length of every response: it is an upper bound."
    yield f"Engines are simulated with the step times of {result.settings.fleet.profile}."


# -- differences -------------------------------------------------------------------------------------------


def _differences(rows: RowsByPolicy, base: str, name: str) -> list[FigureDifference]:
    found = (_difference(figure, rows[base], rows[name]) for figure in _comparable(base, name))
    return [one for one in found if one is not None]


def _comparable(*policies: str) -> list[Figure]:
    """Return the comparable figures. Without a gateway there is no queue, and so no wait in it."""
    return [figure for figure in FIGURES if DIRECT not in policies or "wait" not in figure.heading]


def _difference(figure: Figure, base: Sequence[Row], other: Sequence[Row]) -> FigureDifference | None:
    unit = figure.heading.rpartition(" ")[2]
    return paired_difference(
        [figure.value(row) for row in base],
        [figure.value(row) for row in other],
        figure=figure.name,
        lower_is_better=figure.lower_is_better,
        decimals=figure.decimals,
        unit=unit,
    )


# -- sections ----------------------------------------------------------------------------------------------


def _sections(
    by_policy: ByPolicy, rows: RowsByPolicy, base: str, differences: Mapping[str, Sequence[FigureDifference]]
) -> Iterator[ReportSection]:
    if differences:
        yield ReportSection(
            title=f"Differences from {base}",
            intro="Bar: 95 % interval of the change; dot: its mean; line: no change.",
            blocks=[
                DifferenceTable(caption=f"{name} against {base}", base=base, other=name, differences=found)
                for name, found in differences.items()
            ],
        )
    yield ReportSection(
        title="Time to first token",
        intro="From the arrival of a request to the first token of its response, all seeds together.",
        blocks=list(ttft_plots(by_policy, base)),
    )
    yield ReportSection(
        title="Over time",
        intro="Requests that have arrived but have no token yet, in the gateway or in an engine; run of the "
        "first seed.",
        blocks=list(timeline_plots(by_policy, base)),
    )
    yield ReportSection(title="Figures", blocks=list(tables(rows)))
