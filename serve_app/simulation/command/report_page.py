"""The report of simulated runs: what was asked, which policy did better, and the figures of each."""

from collections.abc import Iterator, Mapping, Sequence

from serve_app.metrics.slo import Slo
from serve_app.reports.differences import FigureDifference, PairedFigure, Sample, verdict_of
from serve_app.reports.document import DifferenceTable, Origin, ReportSection, ResultReport
from serve_app.simulation.command.report_plots import ByPolicy, timeline_plots, ttft_plots
from serve_app.simulation.command.report_tables import RowsByPolicy, tables
from serve_app.simulation.command.results import FIGURES, Figure, Row, policy_of
from serve_app.simulation.run import DIRECT, RunResult, SloByLength

_BASELINES = ("fcfs", DIRECT)
# What the verdict is about: both ends of the trade between short and long prompts, and what it costs.
_DECISIVE = {
    *("short TTFT mean s", "short TTFT p99 s", "long TTFT mean s", "long TTFT p99 s"),
    *("TPOT mean ms", "goodput /s"),
}


def simulation_report(
    results: Sequence[RunResult], rows: Sequence[Row], origin: Origin, warnings: Sequence[str]
) -> ResultReport:
    """The report.

    Args:
        results: with their records, all of one trace and fleet.
        rows: the same as JSON.
    """
    by_policy: dict[str, list[RunResult]] = {}
    of_policy: dict[str, list[Row]] = {}
    for result, row in zip(results, rows, strict=True):
        by_policy.setdefault(policy_of(row), []).append(result)
        of_policy.setdefault(policy_of(row), []).append(row)
    base = _baseline(list(by_policy))
    differences = {name: _differences(of_policy, base, name) for name in of_policy if name != base}
    sample = Sample(len(of_policy[base]), "seed", "seeds", "run more of them with --seeds")
    first = results[0]
    return ResultReport(
        title=f"{' against '.join(_candidates_and(base, list(by_policy)))} on {first.workload.trace.name}",
        question=_question(base, list(by_policy), first),
        facts=list(_facts(first, list(by_policy), sample)),
        verdict=_verdict(base, differences, sample),
        notes=[*_notes(differences, first), *warnings],
        sections=list(_sections(by_policy, of_policy, base, differences)),
        origin=origin,
    )


def _baseline(policies: Sequence[str]) -> str:
    """First come, first served, where it was played; else no gateway; else the first policy named."""
    return next((name for name in _BASELINES if name in policies), policies[0])


def _candidates_and(base: str, policies: Sequence[str]) -> list[str]:
    candidates = [name for name in policies if name != base]
    return [", ".join(candidates), base] if candidates else [base]


# What was asked


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
    yield "workload", f"{trace.title}: {len(trace.requests):,} requests a run, {rate}"
    yield "source", trace.source
    pools = ", ".join(f"{count} in pool {pool}" for pool, count in settings.fleet.replicas.items())
    yield "fleet", f"{settings.fleet.profile}: {pools} ({settings.fleet.gpus:,} GPUs)"
    yield "short prompts", f"at most {settings.short_at_tokens:,} tokens; all others are long"
    yield "goodput", f"requests within all of these limits, per second: {_limits(settings.slo)}"
    left_out = f"{100 * settings.warm_up_ratio:g} %"
    yield "measured", f"{sample.text}; the first {left_out} of the requests of each run are left out"


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
        advice = "name a baseline beside it with --policy"
        return [f"{base} was simulated alone, so nothing says whether it does well: {advice}."]
    words = {figure.words for figure in FIGURES if figure.heading in _DECISIVE}
    return [
        verdict_of(base, name, [one for one in found if one.figure in words], sample)
        for name, found in differences.items()
    ]


def _notes(differences: Mapping[str, Sequence[FigureDifference]], result: RunResult) -> Iterator[str]:
    if differences:
        yield (
            "The verdict is about figures that were chosen beforehand; all others are below. Every policy "
            "met the same requests, so intervals are those of differences seed by seed (Student's t, 95 %)."
        )
        yield "Each interval stands alone: of twenty figures that do not differ, one may look as if it did."
    if any("not deployable" in name for name in differences):
        yield "A policy that is not deployable knows the length of every answer: it bounds what is possible."
    yield f"Engines are simulated with the step times of {result.settings.fleet.profile}."


# Differences


def _differences(rows: RowsByPolicy, base: str, name: str) -> list[FigureDifference]:
    found = (_difference(figure, rows[base], rows[name]) for figure in _comparable(base, name))
    return [one for one in found if one is not None]


def _comparable(*policies: str) -> list[Figure]:
    """Without a gateway there is no queue, so nothing to compare a wait in it with."""
    return [figure for figure in FIGURES if DIRECT not in policies or "wait" not in figure.heading]


def _difference(figure: Figure, base: Sequence[Row], other: Sequence[Row]) -> FigureDifference | None:
    unit = figure.heading.rpartition(" ")[2]
    return PairedFigure(
        figure=figure.words,
        base=[figure.of(row) for row in base],
        other=[figure.of(row) for row in other],
        lower_is_better=figure.lower_is_better,
        decimals=figure.decimals,
        unit=unit,
    ).difference()


# Sections


def _sections(
    by_policy: ByPolicy, rows: RowsByPolicy, base: str, differences: Mapping[str, Sequence[FigureDifference]]
) -> Iterator[ReportSection]:
    if differences:
        yield ReportSection(
            title=f"Differences from {base}",
            intro="The bar is the 95 % interval of the change, the dot its mean, the line no change.",
            blocks=[
                DifferenceTable(caption=f"{name} against {base}", base=base, other=name, differences=found)
                for name, found in differences.items()
            ],
        )
    yield ReportSection(
        title="Time to first token",
        intro="From the arrival of a request to the first token of its answer, all seeds together.",
        blocks=list(ttft_plots(by_policy, base)),
    )
    yield ReportSection(
        title="Over time",
        intro="Requests that have arrived and have no token yet, wherever they wait; the first seed's run.",
        blocks=list(timeline_plots(by_policy, base)),
    )
    yield ReportSection(title="Figures", blocks=list(tables(rows)))
