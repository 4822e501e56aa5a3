"""The table of this experiment."""

from collections.abc import Sequence
from statistics import median

from experiments.common.rows import ANY, Row
from experiments.common.tables import Table, load_note, markdown
from experiments.tracing_cost.gateways import CONTROL, OFF, SAMPLED, UNSAMPLED

_OTHERS = (CONTROL, UNSAMPLED, SAMPLED)


def _costs(rows: Sequence[Row]) -> str:
    head = ["request", OFF, *(f"{way}, more" for way in _OTHERS)]
    return f"{markdown(head, map(_line, rows), text_columns=1)}\n\n{load_note(rows)}".rstrip()


def _line(row: Row) -> list[str]:
    without = row.figures[OFF]
    more = (
        1_000 * median(one - other for one, other in zip(row.figures[way], without, strict=True))
        for way in _OTHERS
    )
    return [str(row.key["request"]), f"{1_000 * median(without):.0f}", *(f"{each:+.0f}" for each in more)]


TABLES = {
    "costs": Table(
        text=_costs,
        where={"request": ANY},
        note="CPU time of a gateway in microseconds per request, medians over the rounds; *more* is the "
        "median of the differences within a round",
    ),
}
