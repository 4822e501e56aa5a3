"""Rows of `results.jsonl`: one measurement per line, with everything needed to judge and repeat it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from experiments.common.provenance import Machine, TraceSource
from serve_app.core.settings_base import settings
from serve_app.errors import SettingsError

Key = Mapping[str, str | int | float | bool]
ANY = object()
"""Matches any value when rows are selected by their key."""
_DIGITS = 6


@settings
class Row:
    """One line.

    Attributes:
        key: identifies the row in its experiment.
        seeds: of its runs; figures that are lists have one value for each.
        settings: resolved values of the run.
        commit: of the code, with `+changes` if tracked code differed; None outside a checkout.
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
    """Return all rows of a file; none if it does not exist.

    Raises:
        SettingsError: a line is not a row.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_row_of(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def read_whole_rows(path: Path) -> list[Row]:
    """Return the complete rows of a file whose writer was interrupted: the last line may be cut."""
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(_row_of(line, str(path)))
        except SettingsError:
            break
    return rows


def line_of(row: Row) -> str:
    """Return the row as one line of JSON.

    Raises:
        ValueError: a figure is infinite or NaN, which JSON cannot represent.
    """
    return json.dumps(asdict(row), allow_nan=False, ensure_ascii=False)


def where(rows: Sequence[Row], **key: object) -> list[Row]:
    """Return the rows with these values in their key; a tuple matches any member, `ANY` any value."""
    return [row for row in rows if all(_has(row.key, name, value) for name, value in key.items())]


def rounded(figures: Any) -> Any:
    """Round figures to six significant digits: more is noise, and doubles the size of files."""
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
