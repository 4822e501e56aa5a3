"""The tables of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import Row
from experiments.common.tables import Table, load_note, markdown

_OF_A_REQUEST = ("arrival", "first token", "finish")


def _events(rows: Sequence[Row]) -> str:
    head = ["replicas", "requests/s", *_OF_A_REQUEST, "report", "request", "CPU asked for", "ceiling, 1/s"]
    lines = markdown(head, map(_event_line, rows), text_columns=0)
    return f"{lines}\n\n{load_note(rows)}"


def _event_line(row: Row) -> list[str]:
    figures, events = row.figures, row.figures["events_us"]
    request_us = sum(events[kind]["mean"] for kind in _OF_A_REQUEST if kind in events)
    report_us = events["report"]["mean"]
    offered = figures["offered_per_s"]
    asked = (request_us * offered + report_us * figures["reports_per_s"]) / 1e6
    # Reports come whatever is served: they are taken off before the rest is divided among requests.
    ceiling = max(0.0, 1e6 - report_us * figures["reports_per_s"]) / request_us
    kinds = [f"{events[kind]['p50']:.0f} / {events[kind]['mean']:.0f}" for kind in (*_OF_A_REQUEST, "report")]
    totals = [f"{request_us:.0f}", f"{asked:.0%}", f"{ceiling:,.0f}"]
    return [f"{row.key['replicas']:,}", f"{offered:,.0f}", *kinds, *totals]


def _waiting(rows: Sequence[Row]) -> str:
    head = ["waiting", "kB each", "process, MB", "arrival at first", "arrival at last"]
    return markdown(head, map(_waiting_line, rows), text_columns=0)


def _waiting_line(row: Row) -> list[str]:
    figures = row.figures
    arrivals = [figures[when]["events_us"]["arrival"] for when in ("first", "last")]
    return [
        f"{row.key['waiting']:,}",
        f"{figures['bytes_per_request'] / 1e3:.1f}",
        f"{figures['resident_bytes'] / 1e6:,.0f}",
        *(f"{one['p50']:.0f} / {one['mean']:.0f}" for one in arrivals),
    ]


TABLES = {
    "events": Table(
        where={"part": "events"},
        text=_events,
        note="Microseconds of CPU time, p50 / mean; the last columns follow from the means",
    ),
    "waiting": Table(
        where={"part": "waiting"},
        text=_waiting,
        note="An arrival in microseconds of CPU time, p50 / mean, with 10 replicas that take nothing more",
    ),
}
