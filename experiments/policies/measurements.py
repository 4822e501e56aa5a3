"""Plays a grid of policies: one row for each cell, with the figures of all seeds."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from experiments.common.experiment import Context, Measurement
from experiments.common.provenance import trace_sources
from experiments.common.rows import Key
from experiments.policies.grid import PolicyGrid, cells_of, planned
from serve_app.command import progress_bar, warn
from serve_app.simulation.batch import run_all
from serve_app.simulation.command.results import run_as_json, settings_as_json, unequal_work
from serve_app.simulation.run import RunResult


def play_grid(grid: PolicyGrid, context: Context) -> Iterator[Measurement]:
    """Every cell that there is no row of yet."""
    cells = [cell for cell in cells_of(grid) if not context.has(cell.key)]
    plan = planned(grid, cells, jobs=context.jobs)
    results = run_all([run for runs in plan for run in runs], jobs=context.jobs)
    with progress_bar("policies", len(cells)) as advance:
        for cell, runs in zip(cells, plan, strict=True):
            yield measurement_of(cell.key, cell.case.trace, list(islice(results, len(runs))))
            advance()


def measurement_of(key: Key, trace: str, results: Sequence[RunResult]) -> Measurement:
    """The row of a cell, with the figures of all its seeds."""
    rows = [run_as_json(result) for result in results]
    for line in unequal_work(rows):
        warn(f"not the same work: {dict(key)}: {line}")
    columns = [_figures(row) for row in rows]
    return Measurement(
        key=key,
        seeds=[result.settings.seed for result in results],
        traces=trace_sources(trace),
        figures={name: [one[name] for one in columns] for name in columns[0]}
        | {"deployable": all(row["deployable"] for row in rows)},
        settings=_settings(results[0]),
    )


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    metrics, whole = row["metrics"], row["whole_run"]
    return {
        "rate_per_s": row["rate_per_s"],
        "requests": whole["requests"],
        "completed": whole["completed"],
        **{
            f"{size}_ttft_{name}_s": metrics["ttft_s"][size][name]
            for size in ("short", "long")
            for name in ("mean", "p50", "p99")
        },
        "queue_wait_max_s": metrics["queue_wait_s"]["all"]["max"],
        "tpot_mean_s": metrics["tpot_s"]["all"]["mean"],
        "goodput_per_s": metrics["goodput_per_s"],
        "tokens_per_s": whole["throughput_tokens_per_s"],
        "preemptions": whole["preemptions"],
    }


def _settings(result: RunResult) -> dict[str, Any]:
    """All settings of the cell's runs; what differs from seed to seed stands among the figures."""
    settings = settings_as_json(result)
    for of_seed in ("seed", "rate_per_s"):
        del settings[of_seed]
    # The pool's engines are alike.
    settings["engines"] = settings["engines"][:1]
    return settings
