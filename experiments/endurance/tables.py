"""The tables of this experiment."""

from collections.abc import Iterator, Sequence

from experiments.common.audit import ENDS
from experiments.common.rows import Row
from experiments.common.tables import Table, load_note, markdown


def _account(rows: Sequence[Row]) -> str:
    head = ["traffic", "requests/s", "s", "disconnects", "requests", *ENDS, "answered twice", "still held"]
    return f"{markdown(head, map(_line, rows))}\n\n{load_note(rows)}".rstrip()


def _line(row: Row) -> list[str]:
    figures = row.figures
    return [
        str(row.key["phase"]),
        f"{figures['rate_per_s']:.1f}",
        f"{figures['seconds']:,.0f}",
        f"{figures['disconnects']:,}",
        f"{figures['sent']:,}",
        *(f"{figures['ends'][end]:,}" for end in ENDS),
        str(figures["answered_twice"]),
        str(sum(figures["still_held"].values())),
    ]


def _growth(rows: Sequence[Row]) -> str:
    head = [
        *("traffic", "processes"),
        *("how many", "memory at the begin, MiB", "after 5 min", "at the end", "most of one, MiB"),
        *("descriptors at the begin", "after 5 min", "at the end"),
    ]
    return markdown(head, (line for row in rows for line in _sizes(row)), text_columns=2)


def _sizes(row: Row) -> Iterator[list[str]]:
    for role, found in row.figures["processes"].items():
        yield [
            str(row.key["phase"]),
            role,
            str(found["processes"]),
            *(f"{mib:,.0f}" for mib in found["rss_mib"]),
            f"{found['worst_mib']:+.1f}",
            *(f"{count:,}" for count in found["descriptors"]),
        ]


TABLES = {
    "headline": Table(text=_account, note="Live, emulated engines, one application"),
    "growth": Table(
        text=_growth, note="Resident memory and open descriptors, by the part that a process plays"
    ),
}
