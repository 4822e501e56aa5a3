"""The table of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import Row
from experiments.common.tables import Table, markdown, plus_minus

_SHARES = (
    "first_inside",
    "first_before",
    "first_after",
    "inside_interactive",
    "inside_default",
    "inside_batch",
    "last_inside",
)


def _honesty(rows: Sequence[Row]) -> str:
    head = [
        "traffic",
        "policy",
        "requests told",
        "started inside, %",
        "before, %",
        "after, %",
        "inside, interactive",
        "default",
        "batch",
        "inside by the last estimate, %",
        "median error, s",
    ]
    return markdown(head, map(_line, rows), text_columns=2)


def _line(row: Row) -> list[str]:
    figures = row.figures
    return [
        str(row.key["case"]),
        str(row.key["policy"]),
        plus_minus(figures["told"], 0),
        *(plus_minus(figures[name], 0, scale=100) for name in _SHARES),
        plus_minus(figures["error_median_s"], 1),
    ]


TABLES = {
    "honesty": Table(
        text=_honesty,
        note="Intervals of 80 %, by the first estimate where nothing else is said. Llama-2-70B on four H100, "
        "simulated; means over seeds with their 95 % intervals",
    )
}
