"""The report of a run against one endpoint: what it was asked, how it answered, and how sure that is."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from serve_app.bench import arguments
from serve_app.bench.load import LoadResult
from serve_app.bench.pages.run_intervals import PARTS, latency_intervals
from serve_app.metrics.confidence import ConfidenceInterval
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.slo import slo_attainment_ratio
from serve_app.metrics.summary import Summary
from serve_app.reports.document import (
    Cell,
    Origin,
    ReportSection,
    ReportTable,
    ResultReport,
    interval_cell,
    number_cell,
)
from serve_app.reports.latency_plots import (
    distribution_plot,
    length_plots,
    ttft_over_time_plot,
    waiting_plot,
)
from serve_app.workloads.trace import Trace

_LATENCIES: Mapping[str, Callable[[RequestRecord], float | None]] = {
    "ttft_s": lambda record: record.ttft_s,
    "tpot_s": lambda record: record.tpot_s,
    "e2e_s": lambda record: record.e2e_s,
    "queue_wait_s": lambda record: record.queue_wait_s,
}
_NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end", "queue_wait_s": "wait in the queue"}
_MOST_TENANTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One run, after its warm-up."""

    args: argparse.Namespace
    trace: Trace
    load: LoadResult
    summary: Summary


def bench_report(run: BenchRun, origin: Origin, warnings: Sequence[str]) -> ResultReport:
    """The report of one run."""
    intervals = _intervals(run)
    return ResultReport(
        title=f"{run.args.label}: {run.trace.name} at {run.args.url}",
        question=f"How does {run.args.url} serve {run.trace.title}{_at_rate(run.trace)}?",
        facts=list(_facts(run)),
        verdict=list(_verdict(run, intervals)),
        notes=[
            f"Intervals are at 95 %, from {PARTS} parts of the run that are resampled whole.",
            "A queue that lasts longer than such a part makes them too narrow.",
            "Latencies count from the time at which a request was due, as a client would meet them.",
            *warnings,
        ],
        sections=list(_sections(run, intervals)),
        origin=origin,
    )


def _at_rate(trace: Trace) -> str:
    return "" if trace.rate_per_s is None else f" at {trace.rate_per_s:.2f} requests/s"


_Intervals = Mapping[tuple[str, str], Mapping[str, ConfidenceInterval]]


def _by_size(run: BenchRun) -> dict[str, list[RequestRecord]]:
    short_at, done = run.args.short_at, [record for record in run.load.records if record.completed]
    return {
        "all": done,
        "short": [record for record in done if record.prompt_tokens <= short_at],
        "long": [record for record in done if record.prompt_tokens > short_at],
    }


def _intervals(run: BenchRun) -> dict[tuple[str, str], dict[str, ConfidenceInterval]]:
    """The intervals of each latency, by its name and the size of prompts."""
    return {
        (latency, size): latency_intervals(records, value_of)
        for latency, value_of in _LATENCIES.items()
        for size, records in _by_size(run).items()
    }


# What was asked, and the answer


def _facts(run: BenchRun) -> Iterator[tuple[str, str]]:
    args, trace = run.args, run.trace
    yield "endpoint", args.url
    yield "workload", f"{trace.title}: {len(trace.requests):,} requests{_at_rate(trace)}"
    yield "source", trace.source
    yield (
        "requests",
        f"{args.endpoint}, {'whole answers' if args.no_stream else 'streamed'}, body {args.body}",
    )
    yield "warm-up", f"{args.warm_up_s:g} s left out" if args.warm_up_s else "none left out"
    yield "short prompts", f"at most {args.short_at:,} tokens; all others are long"
    yield "within limits", f"TTFT at most {args.slo_ttft_s:g} s and TPOT at most {args.slo_tpot_s:g} s"


def _verdict(run: BenchRun, intervals: _Intervals) -> Iterator[str]:
    requests = sum(run.summary.outcomes.values())
    kept = slo_attainment_ratio(run.load.records, arguments.rules(run.args).slo)
    share = run.summary.completed / requests if requests else 0.0
    within = "" if kept is None else f"; {100 * kept:.1f} % of all requests were within their limits"
    yield f"{100 * share:.1f} % of {requests:,} requests were completed{within}."
    ttft = intervals["ttft_s", "all"]
    if ttft:
        named = {"p50": "median", "p99": "P99"}
        yield f"TTFT: {', '.join(f'{name} {_seconds(ttft[each])}' for each, name in named.items())}."
    yield (
        "One endpoint alone cannot be called fast or slow: --compare puts a second one beside it, with the "
        "same requests."
    )


def _seconds(interval: ConfidenceInterval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.mean:.3f} s"
    return f"{interval.mean:.3f} s (95 %: {max(0.0, interval.low):.3f} to {interval.high:.3f} s)"


# Sections


def _sections(run: BenchRun, intervals: _Intervals) -> Iterator[ReportSection]:
    sizes = _by_size(run)
    yield ReportSection(
        title="Time to first token",
        intro="From the time at which a request was due to the first token of its answer.",
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
                "Waiting for a first token",
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
    yield ReportTable(
        caption="Latencies in milliseconds ± 95 % interval; the longest is one request, so it has none",
        head=["latency", "prompts", "mean", "p50", "p95", "p99", "max"],
        rows=[
            [
                _NAMES[latency],
                size,
                *(interval_cell(found[name], 2, 1_000) for name in ("mean", "p50", "p95", "p99")),
                number_cell(getattr(getattr(summary, latency), size).max, 2, 1_000),
            ]
            for (latency, size), found in intervals.items()
            if found
        ],
        text_columns=2,
    )
    yield ReportTable(caption="The whole run", head=["figure", "value"], rows=list(_whole(summary)))
    if len(summary.tenants) > 1:
        yield _tenants(summary)


def _whole(summary: Summary) -> Iterator[list[str | Cell]]:
    for outcome, count in summary.outcomes.items():
        yield [f"requests {outcome}", number_cell(count)]
    yield ["makespan, s", number_cell(summary.makespan_s, 2)]
    yield ["tokens/s", number_cell(summary.throughput_tokens_per_s, 1)]
    yield ["output tokens/s", number_cell(summary.output_tokens_per_s, 1)]
    yield ["goodput: requests within their limits, /s", number_cell(summary.goodput_per_s, 2)]
    yield ["preemptions", number_cell(summary.preemptions)]
    yield ["Jain's index over tenants", number_cell(summary.jain_tenants, 3)]


def _tenants(summary: Summary) -> ReportTable:
    names = sorted(summary.tenants, key=lambda name: -summary.tenants[name].requests)[:_MOST_TENANTS]
    return ReportTable(
        caption=f"TTFT of tenants in milliseconds: {len(names)} of {len(summary.tenants):,}, those with most "
        "requests",
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
