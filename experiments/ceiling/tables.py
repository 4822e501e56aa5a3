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


TABLES = {
    "events": Table(
        where={"part": "events"},
        text=_events,
        note="Microseconds of CPU time, p50 / mean; the last columns follow from the means",
    ),
}
