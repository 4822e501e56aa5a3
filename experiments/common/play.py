"""Plays an experiment into a file: each row is on disk once measured, and the file is replaced at the end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.common.config import as_json
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import code_commit, now_utc, this_machine
from experiments.common.rows import Row, line_of, read_rows, read_whole_rows, rounded


def partial_of(out: Path) -> Path:
    """Where rows are until the last one is measured."""
    return out.with_name(f"{out.name}.partial")


def play(
    name: str, experiment: Experiment[Any], settings: object, out: Path, *, jobs: int, resume: bool = False
) -> list[Row]:
    """Measure, and replace `out` by the rows once all are there.

    Args:
        resume: keep the rows of an interrupted play or, when there was none, of `out`; add what is missing.
    """
    partial = partial_of(out)
    rows = _kept(out, partial) if resume else []
    keys = [row.key for row in rows]
    out.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(f"{line_of(row)}\n")
        for row in _measured(name, experiment, settings, Context(jobs, tuple(keys))):
            if row.key in keys:
                continue
            rows.append(row)
            # At once: an experiment may be interrupted.
            file.write(f"{line_of(row)}\n")
            file.flush()
    partial.replace(out)
    return rows


def _kept(out: Path, partial: Path) -> list[Row]:
    return read_whole_rows(partial) if partial.exists() else read_rows(out)


def _measured(name: str, experiment: Experiment[Any], settings: object, context: Context) -> Iterator[Row]:
    commit, resolved = code_commit(), as_json(settings)
    for one in experiment.play(settings, context):
        yield _row(name, one, commit, resolved)


def _row(name: str, one: Measurement, commit: str | None, settings: dict[str, Any]) -> Row:
    return Row(
        experiment=name,
        key=one.key,
        figures=rounded(one.figures),
        seeds=tuple(one.seeds),
        traces=tuple(one.traces),
        settings=settings if one.settings is None else one.settings,
        commit=commit,
        machine=this_machine(),
        measured_at=now_utc(),
    )
