"""The tables of this experiment."""

from collections.abc import Iterator, Sequence

from experiments.common.audit import ENDS, SUMMARY, summary
from experiments.common.rows import Row
from experiments.common.tables import Table, load_note, markdown


def _account(rows: Sequence[Row]) -> str:
    head = [
        *("traffic", "requests/s", "of full load", "s", "disconnects"),
        *("requests", *ENDS, "answered twice", "still held"),
    ]
    return f"{markdown(head, map(_line, rows))}\n\n{load_note(rows)}".rstrip()


def _line(row: Row) -> list[str]:
    figures = row.figures
    return [
        str(row.key["phase"]),
        f"{_sent_per_s(row):.1f}",
        f"{_of_full_load(row):.1f}",
        f"{figures['seconds']:,.0f}",
        f"{figures['disconnects']:,}",
        f"{figures['sent']:,}",
        *(f"{figures['ends'][end]:,}" for end in ENDS),
        str(figures["answered_twice"]),
        str(sum(figures["still_held"].values())),
    ]


def _summary(rows: Sequence[Row]) -> str:
    lines = ([_words(row), *summary(row.figures)] for row in rows)
    return f"{markdown(['traffic', *SUMMARY], lines)}\n\n{load_note(rows)}".rstrip()


def _words(row: Row) -> str:
    figures = row.figures
    left = f", {figures['disconnects']:,} clients left" if figures["disconnects"] else ""
    return (
        f"{row.key['phase']}: {figures['seconds'] / 60:.0f} min, {_of_full_load(row):.1f} of full load{left}"
    )


def _sent_per_s(row: Row) -> float:
    return float(row.figures["sent"] / row.figures["seconds"])


def _of_full_load(row: Row) -> float:
    return float(_sent_per_s(row) / row.figures["capacity_per_s"])


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


_NOTE = "Live, emulated engines, one application"

TABLES = {
    "headline": Table(text=_account, note=_NOTE),
    "summary": Table(text=_summary, note=_NOTE),
    "growth": Table(text=_growth, note="Resident memory and open descriptors, by the part of a process"),
}
