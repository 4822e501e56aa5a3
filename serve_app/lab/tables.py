"""Tables of results: Markdown in a file or a pipe, and no wider than the window on a terminal."""

import shutil
import string
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from serve_app.core.metrics.summary import ConfidenceInterval

Line = Sequence[str]

# Minimum width of a cell, below which it is not narrowed further.
_NARROWEST_CELL = 16
_FRAME = len("|  |")
_GAP = len(" | ")


def terminal_columns() -> int | None:
    """Return the columns of the terminal, or None if standard output is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def paragraph(text: str) -> str:
    """Wrap a caption on a terminal."""
    columns = terminal_columns()
    return text if columns is None else textwrap.fill(text, columns, break_on_hyphens=False)


def table_text(head: Line, lines: Sequence[Line], *, text_columns: int = 1, key_columns: int = 1) -> str:
    """Return a table for standard output, transposed if it does not fit.

    Args:
        text_columns: see `aligned_table`.
        key_columns: number of leading columns that name a line; they head its column in a transposed table.
    """
    columns, whole = terminal_columns(), aligned_table(head, lines, text_columns=text_columns)
    if columns is None or len(whole.partition("\n")[0]) <= columns:
        return whole
    return transposed_table(head, lines, columns, key_columns=key_columns)


def documents_table(
    columns: str, documents: Iterable[Mapping[str, Any]], *, text_columns: int = 1, key_columns: int = 1
) -> str:
    """Return a table with one line per JSON object, otherwise as `table_text`.

    Args:
        columns: headings and formats of the cells below them, such as `pool: {pool} | wait: {wait_s:.1f} s`.
            Dots in a name separate the keys of nested objects, and missing values are shown as a dash.
    """
    head, cells = zip(*(column.split(": ", 1) for column in columns.split(" | ")), strict=True)
    lines = [[_CELLS.vformat(cell, (), each) for cell in cells] for each in documents]
    return table_text(head, lines, text_columns=text_columns, key_columns=key_columns)


def value_at(document: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path of keys with dots between them, or None."""
    value: Any = document
    for key in path.split("."):
        value = (value or {}).get(key)
    return value


class _Cells(string.Formatter):
    """Formats the cells of a document."""

    def get_field(
        self,
        field_name: str,
        args: object,  # noqa: ARG002 - a document has names only
        kwargs: Mapping[str, Any],
    ) -> tuple[Any, str]:
        return value_at(kwargs, field_name), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return "-" if value is None else str(format(value, format_spec))


_CELLS = _Cells()


def number_text(value: float | None, decimals: int = 0, scale: float = 1.0) -> str:
    """Return a number times `scale`, or a dash."""
    return "-" if value is None else f"{scale * value:,.{decimals}f}"


def interval_text(interval: ConfidenceInterval | None, decimals: int, scale: float = 1.0) -> str:
    """Return a mean with half the width of its interval, or a dash."""
    return "-" if interval is None else interval.as_text(decimals, scale)


def aligned_table(head: Line, lines: Sequence[Line], *, text_columns: int = 1) -> str:
    """Return a Markdown table, aligned on a terminal too: leading `text_columns` left, figures right."""
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]

    def row(cells: Line) -> str:
        padded = (
            cell.ljust(width) if column < text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = "|".join(
        "-" * (width + 2) if column < text_columns else "-" * (width + 1) + ":"
        for column, width in enumerate(widths)
    )
    return "\n".join((row(head), f"|{rule}|", *map(row, lines)))


def transposed_table(head: Line, lines: Sequence[Line], columns: int, *, key_columns: int = 1) -> str:
    """Return the transposed table, as several tables if `columns` are too few; longer text is folded."""
    title, names = ", ".join(head[:key_columns]), head[key_columns:]
    left = max(len(title), *map(len, names))
    room = columns - _FRAME - left
    tables: list[list[Line]] = []
    used = room
    for line in lines:
        folded = _folded((", ".join(line[:key_columns]), *line[key_columns:]), room - _GAP)
        width = _GAP + max(len(piece) for cell in folded for piece in cell.split("\n"))
        if used + width > room:
            tables.append([])
            used = 0
        tables[-1].append(folded)
        used += width
    return "\n\n".join(_turned((title, *names), table) for table in tables)


def _folded(cells: Line, room: int) -> list[str]:
    """Add line breaks to cells that are too long. A word that is too long is broken as well."""
    return ["\n".join(textwrap.wrap(cell, max(room, _NARROWEST_CELL))) or "" for cell in cells]


def _turned(names: Line, lines: Sequence[Line]) -> str:
    """Return a table whose columns are `lines`. A folded cell spans several rows."""
    rows: list[list[str]] = []
    for number, name in enumerate(names):
        pieces = [line[number].split("\n") for line in lines]
        for part in range(max(map(len, pieces))):
            below = [cell[part] if part < len(cell) else "" for cell in pieces]
            rows.append([name if part == 0 else "", *below])
    return aligned_table(rows[0], rows[1:], text_columns=1)
