"""The results of simulated runs, as JSON and as a table over seeds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from serve_app.metrics.confidence import interval_95
from serve_app.simulation.partitions import partition_as_json
from serve_app.simulation.run import ORACLE, RunResult
from serve_app.tables import shown_table

Row = Mapping[str, Any]
"""A run as JSON."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A column of the table.

    Attributes:
        of: its value in a row.
        words: its name in a sentence.
    """

    heading: str
    of: Callable[[Row], float | None]
    decimals: int = 2
    words: str = ""
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
    """One element of `runs` in the JSON output: the figures, and the settings that they depend on."""
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
    """The settings of a run, all resolved."""
    settings = result.settings
    plain = asdict(settings)
    plain["trace"]["folder"] = None if settings.trace.folder is None else str(settings.trace.folder)
    # Infinity is no JSON.
    timeout_s = settings.disclosure.queue_timeout_s
    plain["disclosure"]["queue_timeout_s"] = None if timeout_s == float("inf") else timeout_s
    plain["engines"] = [
        {"replica": plan.replica_id, "pool": plan.pool, **asdict(plan.engine), **asdict(plan.step_time)}
        for plan in settings.fleet.plans(isolated=settings.isolates)
    ]
    return plain


def unequal_work(rows: Iterable[Row]) -> list[str]:
    """Runs that did not complete all their requests, whose figures do not compare with the others'."""
    return [
        f"{row['policy']}, seed {row['seed']}: only {row['whole_run']['completed']:,} of "
        f"{row['whole_run']['requests']:,} requests completed ({_counts(row['whole_run']['outcomes'])})"
        for row in rows
        if row["whole_run"]["completed"] != row["whole_run"]["requests"]
    ]


def seeds_table(rows: Sequence[Row], by: Sequence[str] = (), figures: Sequence[Figure] = FIGURES) -> str:
    """Means over seeds with half the width of their 95 % interval, one line for each policy.

    Args:
        by: fields of a row besides `policy` that tell lines apart, such as `load`.
        figures: the columns.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((*(row[name] for name in by), policy_of(row)), []).append(row)
    head = [*by, "policy", "n", *(figure.heading for figure in figures)]
    lines = [
        [*map(str, key), str(len(group)), *map(_cell_of(group), figures)] for key, group in groups.items()
    ]
    return shown_table(head, lines, text_columns=len(by) + 1, key_columns=len(by) + 1)


def policy_of(row: Row) -> str:
    """The name of a run's policy, which says if nobody could deploy it."""
    return str(row["policy"]) if row["deployable"] else f"{row['policy']} (not deployable)"


def _cell_of(group: Sequence[Row]) -> Callable[[Figure], str]:
    def cell(figure: Figure) -> str:
        values = [value for row in group if (value := figure.of(row)) is not None]
        return interval_95(values).as_text(figure.decimals) if values else "-"

    return cell


def _counts(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items())


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value
