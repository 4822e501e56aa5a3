"""The tables of this experiment."""

from collections.abc import Sequence
from statistics import median

from experiments.common.rows import ANY, Row
from experiments.common.tables import Table, load_note, markdown

_ROLES = ("gateway", "scheduler", "haproxy", "watcher")


def _headline(rows: Sequence[Row]) -> str:
    head = [
        "endpoints",
        "requests/s",
        *(f"{role}, ms" for role in _ROLES),
        "watcher idle, cores",
        "watcher, MB",
        "gateway, MB",
        "arrival, s (worst)",
        "death, s (worst)",
    ]
    return f"{markdown(head, [_line(row) for row in rows])}\n\n{load_note(rows)}".rstrip()


def _line(row: Row) -> list[str]:
    figures = row.figures
    return [
        str(row.key["endpoints"]),
        f"{median(figures['per_s']):,.0f}",
        *(f"{median(figures['cpu_ms'][role]):.2f}" for role in _ROLES),
        f"{figures['idle_cores'].get('watcher', 0.0):.2f}",
        *(f"{figures['memory_mb'].get(role, 0.0):.0f}" for role in ("watcher", "gateway")),
        *(f"{median(figures[name]):.2f} ({max(figures[name]):.2f})" for name in ("arrival_s", "death_s")),
    ]


def _replacement(rows: Sequence[Row]) -> str:
    head = ["endpoints", "replaced by others", "requests completed meanwhile", "failed"]
    lines = [
        [
            str(row.key["endpoints"]),
            str(row.figures["replaced"]),
            f"{row.figures['completed_meanwhile']:,}",
            str(len(row.figures["failures_meanwhile"])),
        ]
        for row in rows
    ]
    return markdown(head, lines)


_NOTE = "Live; clients, endpoints and application share the machine. CPU per request by role, less idle use"

TABLES = {
    "headline": Table(text=_headline, where={"endpoints": ANY}, note=_NOTE),
    "replacement": Table(text=_replacement, where={"endpoints": ANY}, note="Streams of eight tokens"),
}
