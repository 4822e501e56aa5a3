"""Output of a run against one endpoint: raw records, JSON, a table and a report.

Intervals of the figures are computed from tenths of the run. Requests that are in the system together share
its queue, so they are not independent observations. The run is cut into parts of equal time, and whole parts
are resampled, as in `comparison`. Effects that last longer than a part, such as a queue that never empties,
make neighbouring parts alike, and the interval too narrow.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from serve_app.core.metrics.confidence import ConfidenceInterval
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.slo import Slo, slo_attainment_ratio
from serve_app.core.metrics.summary import Distribution, Summary, SummaryRules
from serve_app.lab.bench.comparison import LATENCIES, LATENCY_NAMES, Figures, half_widths
from serve_app.lab.bench.load import LATE_AFTER_S, LoadResult
from serve_app.lab.reports.document import (
    Cell,
    Origin,
    ReportSection,
    ReportTable,
    ResultReport,
    interval_cell,
    number_cell,
)
from serve_app.lab.reports.plots import distribution_plot, length_plots, ttft_over_time_plot, waiting_plot
from serve_app.lab.workloads.trace import Trace


def from_zero(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return the records by arrival, on a clock that starts with the first arrival."""
    if not records:
        return []
    start = min(record.arrived_at for record in records)

    def moved(at: float | None) -> float | None:
        return None if at is None else at - start

    return [
        replace(
            record,
            arrived_at=record.arrived_at - start,
            finished_at=record.finished_at - start,
            sent_at=moved(record.sent_at),
            dispatched_at=moved(record.dispatched_at),
            first_token_at=moved(record.first_token_at),
        )
        for record in sorted(records, key=lambda record: record.arrived_at)
    ]


def rules_of(args: argparse.Namespace) -> SummaryRules:
    """Return the rules of the summary."""
    return SummaryRules(
        slo=Slo(ttft_s=args.slo_ttft_s, tpot_s=args.slo_tpot_s), short_at_tokens=args.short_at
    )


def run_as_json(summary: Summary, load: LoadResult, rules: SummaryRules, cpu_s: float) -> dict[str, object]:
    """Return metrics and outcomes of a run, with the figures of the client itself."""
    lag = Distribution.of(record.schedule_lag_s for record in load.records)
    return {
        "metrics": summary.as_json(),
        "outcomes": dict(summary.outcomes),
        "output_tokens_per_s": summary.output_tokens_per_s,
        "slo": {**asdict(rules.slo), "attainment_ratio": slo_attainment_ratio(load.records, rules.slo)},
        "short_at_tokens": rules.short_at_tokens,
        "client": {
            **asdict(load.client),
            "late_after_s": LATE_AFTER_S,
            "schedule_lag_s": lag.as_json(),
            "cpu_ms_per_request": 1000 * cpu_s / max(1, len(load.records)),
        },
    }


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    """Write raw records, one JSON object per line, with the fields of `RequestRecord`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(asdict(record)) + "\n")


def table(summary: Summary) -> str:
    """Return the figures of the run and its latencies without intervals, for a terminal."""
    return f"{_whole(summary).as_text()}\n\n{_latencies(summary, {}).as_text()}"


PARTS = 10
"""Number of parts of a run."""

# With fewer requests per part, there is hardly a figure to resample.
_MIN_PER_PART = 5
_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def latency_intervals(
    records: Sequence[RequestRecord], value_of: Callable[[RequestRecord], float | None]
) -> dict[str, ConfidenceInterval]:
    """Return mean and percentiles of a latency of completed requests by name; too few have no bounds."""
    timed = [(record.arrived_at, value) for record in records if (value := value_of(record)) is not None]
    if not timed:
        return {}
    whole = Distribution.of(value for _, value in timed)
    parts = _parts(timed)
    half = half_widths(parts, _figures) if len(parts) > 1 else None
    found = {}
    for place, name in enumerate(("mean", *_QUANTILES)):
        figure = getattr(whole, name)
        low, high = (
            (None, None) if half is None else (figure - float(half[place]), figure + float(half[place]))
        )
        found[name] = ConfidenceInterval(figure, low, high, len(parts))
    return found


def _parts(timed: Sequence[tuple[float, float]]) -> list[Figures]:
    """Return the values of each part of the run as rows; a single part if there are too few."""
    if len(timed) < PARTS * _MIN_PER_PART:
        return [np.array([[value for _, value in timed]])]
    first = min(at for at, _ in timed)
    width = (max(at for at, _ in timed) - first) / PARTS
    parts: dict[int, list[float]] = {}
    for at, value in timed:
        parts.setdefault(min(PARTS - 1, int((at - first) / width)) if width > 0 else 0, []).append(value)
    return [np.array([values]) for _, values in sorted(parts.items())]


def _figures(values: Figures) -> Figures:
    row = values[0]
    figures: Figures = np.array([row.mean(), *np.quantile(row, list(_QUANTILES.values()))])
    return figures


_LATENCIES: Mapping[str, Callable[[RequestRecord], float | None]] = {
    **LATENCIES,
    "queue_wait_s": lambda record: record.queue_wait_s,
}
_NAMES = {**LATENCY_NAMES, "queue_wait_s": "queue time"}
_MAX_TENANTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """A run without its warm-up."""

    args: argparse.Namespace
    trace: Trace
    load: LoadResult
    summary: Summary


def bench_report(run: BenchRun, origin: Origin, warnings: Sequence[str]) -> ResultReport:
    """Return the report of one run."""
    intervals = _intervals(run)
    return ResultReport(
        title=f"{run.trace.name} at {run.args.url}",
        question=f"How does {run.args.url} serve {run.trace.title} {run.trace.pace}?",
        facts=list(_facts(run)),
        verdict=list(_verdict(run, intervals)),
        notes=[
            f"95 % confidence intervals are bootstrapped over {PARTS} parts of the run.",
            "They are too narrow if a queue lasts longer than such a part.",
            "Latencies count from the scheduled send time of a request, as a client experiences them.",
            *warnings,
        ],
        sections=list(_sections(run, intervals)),
        origin=origin,
    )


_Intervals = Mapping[tuple[str, str], Mapping[str, ConfidenceInterval]]


def _by_size(run: BenchRun) -> dict[str, list[RequestRecord]]:
    short_at, done = run.args.short_at, [record for record in run.load.records if record.completed]
    return {
        "all": done,
        "short": [record for record in done if record.prompt_tokens <= short_at],
        "long": [record for record in done if record.prompt_tokens > short_at],
    }


def _intervals(run: BenchRun) -> dict[tuple[str, str], dict[str, ConfidenceInterval]]:
    """Return the intervals of each latency, by its name and the size of prompts."""
    return {
        (latency, size): latency_intervals(records, value_of)
        for latency, value_of in _LATENCIES.items()
        for size, records in _by_size(run).items()
    }


# -- facts and verdict -------------------------------------------------------------------------------------


def _facts(run: BenchRun) -> Iterator[tuple[str, str]]:
    args, trace = run.args, run.trace
    yield "endpoint", args.url
    yield "workload", f"{trace.title}: {len(trace.requests):,} requests {trace.pace}"
    yield "source", trace.source
    yield (
        "requests",
        f"{args.endpoint}, {'not streamed' if args.no_stream else 'streamed'}, body {args.body}",
    )
    yield "warm-up", f"{args.warm_up_s:g} s excluded" if args.warm_up_s else "none excluded"
    yield "short prompts", f"at most {args.short_at:,} tokens; all others are long"
    yield "within limits", f"TTFT at most {args.slo_ttft_s:g} s and TPOT at most {args.slo_tpot_s:g} s"


def _verdict(run: BenchRun, intervals: _Intervals) -> Iterator[str]:
    requests = sum(run.summary.outcomes.values())
    kept = slo_attainment_ratio(run.load.records, rules_of(run.args).slo)
    share = run.summary.completed / requests if requests else 0.0
    within = "" if kept is None else f"; {100 * kept:.1f} % of all requests met their limits"
    yield f"{100 * share:.1f} % of {requests:,} requests were completed{within}."
    ttft = intervals["ttft_s", "all"]
    if ttft:
        named = {"p50": "median", "p99": "P99"}
        yield f"TTFT: {', '.join(f'{name} {_seconds(ttft[each])}' for each, name in named.items())}."
    yield "Use --compare to compare the endpoint with a second one under the same requests."


def _seconds(interval: ConfidenceInterval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.mean:.3f} s"
    return f"{interval.mean:.3f} s (95 %: {max(0.0, interval.low):.3f} to {interval.high:.3f} s)"


# -- sections ----------------------------------------------------------------------------------------------


def _sections(run: BenchRun, intervals: _Intervals) -> Iterator[ReportSection]:
    sizes = _by_size(run)
    yield ReportSection(
        title="Time to first token",
        intro="From the scheduled send time of a request to the first token of its response.",
        blocks=[
            distribution_plot("Distribution", sizes, None),
            *length_plots({"completed requests": sizes["all"]}, None),
        ],
    )
    short_at, records = run.args.short_at, run.load.records
    yield ReportSection(
        title="Over time",
        blocks=[
            waiting_plot(
                "Requests waiting for their first token",
                {
                    "short": [record for record in records if record.prompt_tokens <= short_at],
                    "long": [record for record in records if record.prompt_tokens > short_at],
                },
                None,
            ),
            ttft_over_time_plot(sizes, None),
        ],
    )
    yield ReportSection(title="Figures", blocks=list(_tables(run, intervals)))


def _tables(run: BenchRun, intervals: _Intervals) -> Iterator[ReportTable]:
    summary = run.summary
    yield _latencies(summary, intervals)
    yield _whole(summary)
    if len(summary.tenants) > 1:
        yield _tenants(summary)


def _latencies(summary: Summary, intervals: _Intervals) -> ReportTable:
    def cells(latency: str, size: str) -> Iterator[Cell]:
        found, known = getattr(getattr(summary, latency), size), intervals.get((latency, size))
        for name in ("mean", *_QUANTILES):
            figure = getattr(found, name)
            yield interval_cell(known[name], 2, 1_000) if known else number_cell(figure, 2, 1_000)
        yield number_cell(found.max, 2, 1_000)

    return ReportTable(
        caption="Latencies in milliseconds ± 95 % interval (none for the maximum, which is a single request)",
        head=["latency, ms", "prompts", "mean", *_QUANTILES, "max"],
        rows=[
            [title, size, *cells(latency, size)]
            for latency, title in _NAMES.items()
            for size in ("all", "short", "long")
            if getattr(getattr(summary, latency), size).mean is not None
        ],
        text_columns=2,
    )


def _whole(summary: Summary) -> ReportTable:
    figures: dict[str, Cell] = {
        **{f"requests {outcome}": number_cell(count) for outcome, count in summary.outcomes.items()},
        "makespan, s": number_cell(summary.makespan_s, 2),
        "tokens/s": number_cell(summary.throughput_tokens_per_s, 1),
        "output tokens/s": number_cell(summary.output_tokens_per_s, 1),
        "goodput (requests within their limits), /s": number_cell(summary.goodput_per_s, 2),
        "preemptions": number_cell(summary.preemptions),
        "Jain's index of tenants": number_cell(summary.jain_tenants, 3),
    }
    return ReportTable(
        caption="Whole run",
        head=["figure", "value"],
        rows=[[name, cell] for name, cell in figures.items()],
    )


def _tenants(summary: Summary) -> ReportTable:
    names = sorted(summary.tenants, key=lambda name: -summary.tenants[name].requests)[:_MAX_TENANTS]
    return ReportTable(
        caption=f"TTFT of tenants in milliseconds: {len(names)} of {len(summary.tenants):,}, those with the "
        "most requests",
        head=["tenant", "requests", "mean", "p99", "max", "tokens"],
        rows=[
            [
                name,
                number_cell(found.requests),
                *(
                    number_cell(value, 2, 1_000)
                    for value in (found.ttft_s.mean, found.ttft_s.p99, found.ttft_s.max)
                ),
                number_cell(found.service_tokens),
            ]
            for name in names
            for found in [summary.tenants[name]]
        ],
    )
