"""The tables of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import ANY, Row
from experiments.common.tables import Table, load_note, markdown

_STAGES = ("receive", "check", "parse", "hash", "all")


def _costs(rows: Sequence[Row]) -> str:
    head = ["body", "bytes", *(f"{name}, µs" for name in _STAGES)]
    return f"{markdown(head, map(_line, rows), text_columns=1)}\n\n{load_note(rows)}".rstrip()


def _line(row: Row) -> list[str]:
    costs = [row.figures[f"{name}_median_us"] for name in _STAGES]
    return [str(row.key["body"]), f"{row.figures['body_bytes']:,}", *(_shown(cost) for cost in costs)]


def _shown(cost_us: float) -> str:
    return f"{cost_us:,.0f}" if cost_us >= 100 else f"{cost_us:.1f}"


TABLES = {
    "costs": Table(
        text=_costs, where={"body": ANY}, note="Medians of CPU time in microseconds, threads included"
    ),
}
