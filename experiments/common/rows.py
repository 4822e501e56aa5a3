"""The rows of `results.jsonl`: one measurement a line, with all that is needed to judge and repeat it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from experiments.common.provenance import Machine, TraceSource
from serve_app.core.settings_base import settings
from serve_app.errors import SettingsError

Key = Mapping[str, str | int | float | bool]
ANY = object()
"""Any value, where rows are chosen by their key."""
_DIGITS = 6


@settings
class Row:
    """One line.

    Attributes:
        key: what tells it from the other rows of the experiment.
        seeds: of its runs; figures that are lists have one value for each.
        settings: resolved, as they were in force.
        commit: of the code, with `+changes` where tracked code differed; None outside a checkout.
        measured_at: when the row was finished, ISO 8601 in UTC.
    """

    experiment: str
    key: Key
    figures: Mapping[str, Any]
    seeds: tuple[int, ...]
    traces: tuple[TraceSource, ...]
    settings: Mapping[str, Any]
    commit: str | None
    machine: Machine
    measured_at: str


_ROW = TypeAdapter(Row)


def read_rows(path: Path) -> list[Row]:
    """All rows of a file; none when there is no file yet.

    Raises:
        SettingsError: a line is no row.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_row_of(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def read_whole_rows(path: Path) -> list[Row]:
    """The rows of a file that was being written when its process ended: the last line may be cut off."""
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(_row_of(line, str(path)))
        except SettingsError:
            break
    return rows


def line_of(row: Row) -> str:
    """The row as one line of JSON.

    Raises:
        ValueError: a figure is infinite or no number, which JSON does not know.
    """
    return json.dumps(asdict(row), allow_nan=False, ensure_ascii=False)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace a file."""
    path.write_text("".join(f"{line_of(row)}\n" for row in rows), encoding="utf-8")


def where(rows: Sequence[Row], **key: object) -> list[Row]:
    """The rows whose key has these values; a tuple stands for any of its members, `ANY` for any value."""
    return [row for row in rows if all(_has(row.key, name, value) for name, value in key.items())]


def rounded(figures: Any) -> Any:
    """Figures to six significant digits: more is noise, and makes files twice as large."""
    if isinstance(figures, float):
        return float(f"{figures:.{_DIGITS}g}")
    if isinstance(figures, Mapping):
        return {name: rounded(value) for name, value in figures.items()}
    return [rounded(value) for value in figures] if isinstance(figures, list | tuple) else figures


def _has(key: Key, name: str, wanted: object) -> bool:
    if name not in key or wanted is ANY:
        return name in key
    return key[name] in wanted if isinstance(wanted, tuple) else key[name] == wanted


def _row_of(line: str, place: str) -> Row:
    try:
        return _ROW.validate_json(line)
    except ValidationError as error:
        raise SettingsError(f"{place} is no row of an experiment: {error}") from error
