"""The tables of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import ANY, Row, where
from experiments.common.tables import Table, difference, markdown, plus_minus

# Heading, figure, decimals and scale of each column.
_COLUMNS = (
    ("chat p99, s", "chat_ttft_p99_s", 2, 1.0),
    ("document p50, s", "document_ttft_p50_s", 1, 1.0),
    ("document p99, s", "document_ttft_p99_s", 1, 1.0),
    ("book p50, s", "book_ttft_p50_s", 1, 1.0),
    ("all p99, s", "all_ttft_p99_s", 1, 1.0),
    ("documents in time, %", "document_goodput_ratio", 0, 100.0),
    ("books in time, %", "book_goodput_ratio", 0, 100.0),
    ("goodput, 1/s", "goodput_per_s", 2, 1.0),
)
_HEAD = ["requests/s", "fleet", *(heading for heading, *_ in _COLUMNS)]


def _headline(rows: Sequence[Row]) -> str:
    lines = [
        [
            *_names(row),
            *(plus_minus(row.figures[name], decimals, scale=scale) for _, name, decimals, scale in _COLUMNS),
        ]
        for row in rows
    ]
    return markdown(_HEAD, lines, text_columns=2)


def _differences(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        baseline = where(rows, rate_per_s=row.key["rate_per_s"])[0]
        if row is not baseline:
            cells = [
                _difference(row, baseline, name, decimals, scale) for _, name, decimals, scale in _COLUMNS
            ]
            lines.append([*_names(row), *cells])
    return markdown(_HEAD, lines, text_columns=2)


def _names(row: Row) -> list[str]:
    return [f"{row.key['rate_per_s']:g}", str(row.key["fleet"])]


def _difference(row: Row, baseline: Row, name: str, decimals: int, scale: float) -> str:
    pairs = [
        (one, other)
        for one, other in zip(row.figures[name], baseline.figures[name], strict=True)
        if one is not None and other is not None
    ]
    if not pairs:
        return "-"
    return difference([one for one, _ in pairs], [other for _, other in pairs], decimals, scale=scale)


_NOTE = "Simulated; all fleets cost 6.70 dollars an hour. Times to first token"

TABLES = {
    "headline": Table(
        text=_headline,
        where={"rate_per_s": ANY},
        note=f"{_NOTE}. Means over seeds with their 95 % intervals",
    ),
    "differences": Table(
        text=_differences,
        where={"rate_per_s": ANY},
        note=f"{_NOTE}: the differences to two pools, seed by seed, with their 95 % intervals",
    ),
}
