"""Output of simulated runs: JSON, and a table over seeds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from serve_app.core.metrics.summary import interval_95
from serve_app.lab.simulation.run import ORACLE, RunResult
from serve_app.lab.simulation.simulation import partition_as_json
from serve_app.lab.tables import interval_text, number_text, table_text, value_at

Row = Mapping[str, Any]
"""A run as JSON."""


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


def equal_seeds(rows: Sequence[Row]) -> list[str]:
    """Return the policies whose runs are equal for all of their seeds."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(row["policy"], []).append(row["whole_run"])
    return [policy for policy, found in runs.items() if found[1:] and all(each == found[0] for each in found)]


def _counts(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items())


# Path of each figure in a row, its decimals and its factor.
_COLUMNS = {
    "short TTFT mean s": ("metrics.ttft_s.short.mean", 3, 1),
    "short TTFT p99 s": ("metrics.ttft_s.short.p99", 3, 1),
    "long TTFT mean s": ("metrics.ttft_s.long.mean", 3, 1),
    "long TTFT p99 s": ("metrics.ttft_s.long.p99", 2, 1),
    "longest wait s": ("metrics.queue_wait_s.all.max", 2, 1),
    "TPOT mean ms": ("metrics.tpot_s.all.mean", 1, 1_000),
    "goodput /s": ("metrics.goodput_per_s", 2, 1),
    "tokens/s": ("whole_run.throughput_tokens_per_s", 0, 1),
}


def policies_table(rows: Iterable[Row]) -> str:
    """Return the figures of every policy: means over seeds with half the width of their 95 % interval."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        name = row["policy"] if row["deployable"] else f"{row['policy']} (not deployable)"
        groups.setdefault(name, []).append(row)
    return table_text(
        ["policy", "seeds", *_COLUMNS],
        [
            [name, number_text(len(group)), *(_over_seeds(group, *column) for column in _COLUMNS.values())]
            for name, group in groups.items()
        ],
    )


def _over_seeds(rows: Sequence[Row], path: str, decimals: int, scale: float) -> str:
    values = [value for row in rows if (value := value_at(row, path)) is not None]
    if len(set(values)) == 1:
        # An interval of no width would claim a precision that equal runs do not show.
        values = values[:1]
    return interval_text(interval_95(values) if values else None, decimals, scale)
