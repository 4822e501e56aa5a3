"""The table of this experiment."""

from collections.abc import Sequence
from statistics import median

from experiments.common.rows import ANY, Row
from experiments.common.tables import Table, load_note, markdown
from experiments.receipt_cost.run import CONTROL, OFF, ON, ROLES


def _costs(rows: Sequence[Row]) -> str:
    head = ["request", "clients"]
    head += [text for role in ROLES for text in (f"{role}, off", "a second one, more", "on, more")]
    return f"{markdown(head, map(_line, rows), text_columns=1)}\n\n{load_note(rows)}".rstrip()


def _line(row: Row) -> list[str]:
    return [
        str(row.key["request"]),
        f"{row.key['clients']}",
        *(text for role in ROLES for text in _of(row, role)),
    ]


def _of(row: Row, role: str) -> list[str]:
    without = row.figures[f"{role}, {OFF}"]
    more = [
        1_000 * median(one - other for one, other in zip(row.figures[f"{role}, {way}"], without, strict=True))
        for way in (CONTROL, ON)
    ]
    return [f"{1_000 * median(without):.0f}", *(f"{each:+.0f}" for each in more)]


TABLES = {
    "costs": Table(
        text=_costs,
        where={"request": ANY},
        note="CPU time in microseconds per request, medians over the rounds; *more* is the median of the "
        "differences within a round",
    ),
}
