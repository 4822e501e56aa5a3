"""The report of two endpoints that served the same requests in turns."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from serve_app.bench.compare_report import outcomes
from serve_app.bench.comparison import EndpointComparison, PairedDifference
from serve_app.bench.interleave import Interleaved
from serve_app.metrics.record import RequestRecord
from serve_app.reports.curves import Curves, ttfts
from serve_app.reports.differences import FigureDifference, Sample, verdict_of
from serve_app.reports.document import (
    DifferenceTable,
    Origin,
    Plot,
    PlotAxis,
    ReportSection,
    ReportTable,
    ResultReport,
    Unit,
    number_cell,
)
from serve_app.reports.latency_plots import distribution_plot, length_plots
from serve_app.workloads.trace import Trace

_A, _B = "A", "B"
_LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}
_FIGURES = {"mean": "mean", "p50": "median", "p99": "P99"}
_ERRORS = "share of errors"
# What the verdict is about.
_DECISIVE = {"mean TTFT", "P99 TTFT", "mean TPOT", "mean end to end", _ERRORS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A comparison: its figures, and the pairs that they come from."""

    args: argparse.Namespace
    trace: Trace
    found: EndpointComparison
    played: Interleaved


def comparison_report(run: ComparedRun, origin: Origin, warnings: Sequence[str]) -> ResultReport:
    """The report of a comparison."""
    args, trace, found = run.args, run.trace, run.found
    differences = list(_differences(found))
    sample = Sample(found.slices, "slice", "slices", "raise --duration or lower --slice-s")
    decisive = [one for one in differences if one.figure in _DECISIVE]
    return ResultReport(
        title=f"{args.compare} against {args.url} on {trace.name}",
        question=f"Does B, {args.compare}, serve {trace.title} better than A, {args.url}?",
        facts=list(_facts(run)),
        verdict=[verdict_of(_A, _B, decisive, sample)],
        notes=[
            "Both served the same requests in turns, slice by slice; each was idle while the other worked.",
            "Intervals are at 95 %, from slices that are resampled whole.",
            "Latencies are of the requests that both have completed. Each interval stands alone.",
            *warnings,
        ],
        sections=list(_sections(run, differences)),
        origin=origin,
    )


def _facts(run: ComparedRun) -> Iterator[tuple[str, str]]:
    args, trace, found = run.args, run.trace, run.found
    rate = "" if trace.rate_per_s is None else f" at {trace.rate_per_s:.2f} requests/s"
    yield "A, the baseline", args.url
    yield "B", args.compare
    yield "workload", f"{trace.title}: {len(trace.requests):,} requests{rate}"
    yield "source", trace.source
    yield (
        "measured",
        (
            f"{found.pairs:,} requests to each in {found.slices:,} slices of {args.slice_s:g} s, "
            f"{found.completed_by_both:,} completed by both"
        ),
    )


def _differences(found: EndpointComparison) -> Iterator[FigureDifference]:
    for latency, figures in found.latencies.items():
        for name, each in figures.items():
            yield _difference(f"{_FIGURES[name]} {_LATENCIES[latency]}", each, 1_000, "ms")
    yield _difference(_ERRORS, found.errors, 100, "%")


def _difference(figure: str, each: PairedDifference, scale: float, unit: str) -> FigureDifference:
    return FigureDifference(
        figure=figure,
        base=each.base,
        other=each.other,
        difference=each.difference,
        low=each.low,
        high=each.high,
        scale=scale,
        unit=unit,
    )


def _sections(run: ComparedRun, differences: Sequence[FigureDifference]) -> Iterator[ReportSection]:
    found, played = run.found, run.played
    yield ReportSection(
        title="Differences from A",
        intro="The bar is the 95 % interval of the change, the dot its mean, the line no change.",
        blocks=[
            DifferenceTable(
                caption=f"B against A, {found.slices:,} slices", base=_A, other=_B, differences=differences
            )
        ],
    )
    both = [pair for pair in played.pairs if pair.base.completed and pair.other.completed]
    records: dict[str, list[RequestRecord]] = {
        _A: [pair.base for pair in both],
        _B: [pair.other for pair in both],
    }
    yield ReportSection(
        title="Time to first token",
        intro="From the time at which a request was due to the first token of its answer.",
        blocks=[
            distribution_plot("Distribution", records, _A),
            _by_slice(played),
            *length_plots(records, _A),
        ],
    )
    yield ReportSection(title="Figures", blocks=[_outcomes(played)])


def _by_slice(played: Interleaved) -> Plot:
    numbers = sorted({pair.slice_number for pair in played.pairs})
    lines: dict[str, list[float | None]] = {_A: [], _B: []}
    for number in numbers:
        pairs = [pair for pair in played.pairs if pair.slice_number == number]
        for name, records in ((_A, [pair.base for pair in pairs]), (_B, [pair.other for pair in pairs])):
            values = ttfts(records)
            lines[name].append(float(np.mean(values)) if values else None)
    curves = Curves([float(number) for number in numbers], lines)
    return Plot(
        title="Mean TTFT of each slice",
        reading="Lower is better. Both lines move together where the workload does; the gap between them is "
        "the difference.",
        x=PlotAxis(label="slice of the trace", unit=Unit.COUNT, logarithmic=None),
        y=PlotAxis(label="mean TTFT", unit=Unit.SECONDS),
        places=curves.places,
        series=curves.series(_A),
    )


def _outcomes(played: Interleaved) -> ReportTable:
    ended = outcomes(played)
    names = sorted(set().union(*ended))
    return ReportTable(
        caption="How the requests ended",
        head=["endpoint", *names],
        rows=[
            [label, *(number_cell(counts[name]) for name in names)]
            for label, counts in zip((_A, _B), ended, strict=True)
        ],
    )
