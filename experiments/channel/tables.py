"""The table of this experiment."""

from collections.abc import Sequence
from statistics import median

from experiments.common.rows import Row
from experiments.common.tables import Table, load_note, markdown

_COLUMNS = (
    ("grants, 1/s", "grants_per_s", 0),
    ("to the grant, p50, ms", "p50_ms", 2),
    ("p99, ms", "p99_ms", 2),
    ("CPU of the gateway, ms", "gateway_cpu_ms", 3),
    ("of the scheduler, ms", "scheduler_cpu_ms", 3),
)


def _headline(rows: Sequence[Row]) -> str:
    lines = [
        [
            str(row.key["traffic"]),
            *(f"{median(row.figures[name]):,.{digits}f}" for _, name, digits in _COLUMNS),
        ]
        for row in rows
    ]
    table = markdown(["traffic", *(heading for heading, _, _ in _COLUMNS)], lines)
    return f"{table}\n\nMedians of {rows[0].settings['repeats']} repeats. {load_note(rows)}".rstrip()


TABLES = {
    "headline": Table(
        text=_headline, note="Scheduler and gateway in processes of their own, over the loopback, FCFS"
    )
}
