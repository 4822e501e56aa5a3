"""Output of a run: raw records, JSON and a table."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.slo import slo_attainment_ratio
from serve_app.core.metrics.summary import Distribution, Summary, SummaryRules
from serve_app.lab.bench.load import LATE_AFTER_S, LoadResult
from serve_app.lab.tables import number_text, table_text


def from_zero(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return the records by arrival, on a clock that starts with the first arrival."""
    if not records:
        return []
    start = min(record.arrived_at for record in records)

    def moved(at: float | None) -> float | None:
        return None if at is None else at - start

    return [
        msgspec.structs.replace(
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
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(msgspec.structs.asdict(record)) + "\n")


def table(summary: Summary) -> str:
    """Return the figures of the run, and its latencies, for a terminal."""
    head = ["latency, ms", "prompts", *_STATISTICS]
    latencies = table_text(head, list(_latencies(summary)), text_columns=2, key_columns=2)
    return f"{table_text(['figure', 'value'], _whole(summary))}\n\n{latencies}"


_LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end", "queue_wait_s": "queue time"}
_STATISTICS = ("mean", "p50", "p95", "p99", "max")


def _whole(summary: Summary) -> list[tuple[str, str]]:
    return [
        *((f"requests {outcome}", number_text(count)) for outcome, count in summary.outcomes.items()),
        ("makespan, s", number_text(summary.makespan_s, 2)),
        ("tokens/s", number_text(summary.throughput_tokens_per_s, 1)),
        ("output tokens/s", number_text(summary.output_tokens_per_s, 1)),
        ("goodput (requests within their limits), /s", number_text(summary.goodput_per_s, 2)),
        ("preemptions", number_text(summary.preemptions)),
        ("Jain's index of tenants", number_text(summary.jain_tenants, 3)),
    ]


def _latencies(summary: Summary) -> Iterator[list[str]]:
    for latency, title in _LATENCIES.items():
        for size in ("all", "short", "long"):
            found: Distribution = getattr(getattr(summary, latency), size)
            if found.mean is not None:
                yield [title, size, *(number_text(getattr(found, name), 2, 1_000) for name in _STATISTICS)]
