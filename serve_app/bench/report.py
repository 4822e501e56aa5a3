"""Output of a run: raw records, JSON, and a table."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from serve_app.bench.load import LATE_AFTER_S, LoadResult
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.slo import slo_attainment_ratio
from serve_app.metrics.statistics import Distribution
from serve_app.metrics.summary import BySize, Summary, SummaryRules

_FIGURES = ("mean", "p50", "p95", "p99", "max")


def from_zero(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The records in order of arrival, on a clock that starts with the first arrival."""
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


def run_as_json(summary: Summary, load: LoadResult, rules: SummaryRules, cpu_s: float) -> dict[str, object]:
    """Metrics and outcomes of a run, with the figures of the client itself."""
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
    """The summary as aligned columns."""
    latencies = {
        "TTFT ms": summary.ttft_s,
        "TPOT ms": summary.tpot_s,
        "E2E ms": summary.e2e_s,
        "queue wait ms": summary.queue_wait_s,
    }
    header = f"{'':24}" + "".join(f"{name:>10}" for name in _FIGURES)
    rows = [line for name, by_size in latencies.items() for line in _rows(name, by_size)]
    return "\n".join((*_head(summary), "", header, *rows))


def _head(summary: Summary) -> list[str]:
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in summary.outcomes.items())
    preemptions = "unknown" if summary.preemptions is None else f"{summary.preemptions:,}"
    jain = "-" if summary.jain_tenants is None else f"{summary.jain_tenants:.3f}"
    return [
        f"{'requests':24}{outcomes}",
        f"{'makespan':24}{summary.makespan_s:.2f} s",
        f"{'throughput':24}{summary.throughput_tokens_per_s:,.1f} tokens/s",
        f"{'of these output':24}{summary.output_tokens_per_s:,.1f} tokens/s",
        f"{'goodput':24}{summary.goodput_per_s:.2f} requests/s within the SLO",
        f"{'preemptions':24}{preemptions}",
        f"{'Jain index of tenants':24}{jain}",
    ]


def _rows(name: str, by_size: BySize) -> list[str]:
    sizes = {"all": by_size.all, "short": by_size.short, "long": by_size.long}
    return [
        f"{name + ' ' + size:24}" + "".join(_cell(getattr(figures, figure)) for figure in _FIGURES)
        for size, figures in sizes.items()
        if figures.mean is not None
    ]


def _cell(seconds: float | None) -> str:
    return f"{'-':>10}" if seconds is None else f"{seconds * 1000:>10,.2f}"
