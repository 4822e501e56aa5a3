"""The table of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import Row
from experiments.common.tables import Table, load_note, markdown


def _headline(rows: Sequence[Row]) -> str:
    head = [
        "beside",
        "requests answered",
        "p50, ms",
        "p90, ms",
        "p99, ms",
        "malformed",
        "5xx",
        "their p99, ms",
    ]
    return f"{markdown(head, map(_line, rows))}\n\n{load_note(rows)}".rstrip()


def _line(row: Row) -> list[str]:
    figures = row.figures
    line = [str(row.key["beside"]), f"{figures['answered']:,}"]
    line += [f"{1e3 * figures[name]:,.0f}" for name in ("p50_s", "p90_s", "p99_s")]
    if "malformed" not in figures:
        return [*line, "0", "0", "-"]
    statuses = figures["statuses"]
    faults = sum(count for status, count in statuses.items() if status.startswith("5"))
    return [*line, f"{sum(statuses.values()):,}", str(faults), f"{1e3 * figures['malformed']['p99_s']:,.0f}"]


TABLES = {"headline": Table(text=_headline, note="Live, one gateway, one emulated engine, a token an answer")}
