"""Results of runs of programs, as JSON and as a table."""

from collections.abc import Callable, Sequence
from typing import Any

from serve_app.lab.simulation.programs import ProgramResult
from serve_app.lab.tables import table_text


def run_as_json(result: ProgramResult) -> dict[str, Any]:
    """Return one element of `runs`; its metrics without `programs` are those of single turns."""
    settings = result.settings
    return {
        "policy": settings.name,
        "seed": settings.seed,
        "load": None,
        "metrics": {**result.summary.as_json(), "programs": result.as_json()},
        "outcomes": dict(result.summary.outcomes),
        "programs_too_long": result.programs.dropped,
        "settings": {
            "profile": settings.fleet.profile,
            "replicas": dict(settings.fleet.replicas),
            "kv_tokens": settings.fleet.engine.kv_tokens,
            "concurrency": settings.concurrency,
            "tenants": settings.tenants,
            "states_ids": settings.states_ids,
            "scheduler": dict(settings.scheduler),
        },
    }


def heading(result: ProgramResult) -> str:
    """Return the caption of the table."""
    settings, programs = result.settings, result.programs
    turns = sum(len(program.turns) for program in programs.programs)
    replicas = sum(settings.fleet.replicas.values())
    return (
        f"{programs.name}: {len(programs.programs):,} programs with {turns:,} turns, "
        f"{settings.concurrency} at a time, on {replicas} replica{'s' * (replicas != 1)} of "
        f"{settings.fleet.profile}; JCT: job completion time of a program; means over seeds"
    )


_Figure = Callable[[dict[str, Any]], float | None]
_COLUMNS: Sequence[tuple[str, _Figure, int]] = (
    ("JCT mean s", lambda of: of["programs"]["jct_s"]["mean"], 0),
    ("p50", lambda of: of["programs"]["jct_s"]["p50"], 0),
    ("p99", lambda of: of["programs"]["jct_s"]["p99"], 0),
    ("slowdown", lambda of: of["programs"]["slowdown"]["mean"], 2),
    (
        "prefill / ideal",
        lambda of: of["programs"]["prefill_tokens"] / of["programs"]["ideal_prefill_tokens"],
        2,
    ),
    ("hit ratio", lambda of: of["programs"]["hit_ratio"], 3),
    ("TTFT p50 s", lambda of: of["ttft_s"]["all"]["p50"], 2),
    ("p99", lambda of: of["ttft_s"]["all"]["p99"], 1),
    ("longest wait s", lambda of: of["programs"]["max_wait_s"], 0),
)


def programs_table(results: Sequence[ProgramResult]) -> str:
    """Return the figures of every policy."""
    by_policy: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_policy.setdefault(result.settings.name, []).append(run_as_json(result)["metrics"])
    return table_text(
        ["policy", *(name for name, _, _ in _COLUMNS)],
        [
            [policy, *(_mean([figure(one) for one in metrics], digits) for _, figure, digits in _COLUMNS)]
            for policy, metrics in by_policy.items()
        ],
    )


def _mean(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):,.{digits}f}" if known else "-"
