"""Tables of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import Row
from experiments.common.tables import Table, markdown

_OF_A_REQUEST = ("arrival", "first token", "finish")
_KINDS = (*_OF_A_REQUEST, "report")
# Backlogs from which the growth of the process is due to the queued requests.
_MEASURABLE = 100_000
_NOTE = "Microseconds of CPU time, p50 / mean"


def request_us(row: Row) -> float:
    """Return the CPU time of one request in the core, in microseconds: the sum of its events' means.

    In a backlog, reports and wake-ups also dispatch requests, so all of the time is divided among requests.
    """
    events = row.figures["events_us"]
    if row.key["part"] == "waiting":
        return float(row.figures["all_us"]) / float(row.figures["requests"])
    return float(sum(events[kind]["mean"] for kind in _OF_A_REQUEST if kind in events))


def _events(rows: Sequence[Row]) -> str:
    head = ["replicas", "requests/s", *_KINDS, "request", "CPU used", "ceiling, 1/s"]
    return markdown(head, map(_event_line, rows), text_columns=0)


def _headline(rows: Sequence[Row]) -> str:
    head = ["replicas", "requests/s", "CPU per request, µs", "CPU used", "ceiling, requests/s"]
    lines = []
    for row in rows:
        replicas, rate, *_, request, used, ceiling = _event_line(row)
        lines.append([replicas, rate, request, used, ceiling])
    return markdown(head, lines, text_columns=0)


def _event_line(row: Row) -> list[str]:
    figures = row.figures
    report_us = figures["events_us"]["report"]["mean"]
    offered = figures["offered_per_s"]
    asked = (request_us(row) * offered + report_us * figures["reports_per_s"]) / 1e6
    # Reports arrive at any load: subtract them before dividing the rest among requests.
    ceiling = max(0.0, 1e6 - report_us * figures["reports_per_s"]) / request_us(row)
    totals = [f"{request_us(row):.0f}", f"{asked:.0%}", f"{ceiling:,.0f}"]
    return [f"{row.key['replicas']:,}", f"{offered:,.0f}", *_kinds(row), *totals]


def _waiting(rows: Sequence[Row]) -> str:
    head = ["waiting", *_KINDS, "request", "kB each"]
    lines = [
        [
            f"{row.key['waiting']:,}",
            *_kinds(row),
            f"{request_us(row):.0f}",
            f"{row.figures['bytes_per_request'] / 1_000:.1f}"
            if int(row.key["waiting"]) >= _MEASURABLE
            else "-",
        ]
        for row in rows
    ]
    return markdown(head, lines, text_columns=0)


def _kinds(row: Row) -> list[str]:
    events = row.figures["events_us"]
    return [
        f"{events[kind]['p50']:.0f} / {events[kind]['mean']:.0f}" if kind in events else "-"
        for kind in _KINDS
    ]


TABLES = {
    "headline": Table(
        where={"part": "events"},
        text=_headline,
        note="The core alone: 200 tenants, 10 requests/s per replica",
        shows_load=True,
    ),
    "events": Table(
        where={"part": "events"},
        text=_events,
        note=f"{_NOTE}; the last columns follow from the means",
        shows_load=True,
    ),
    "waiting": Table(
        where={"part": "waiting"}, text=_waiting, note=f"{_NOTE}; 20 saturated replicas", shows_load=True
    ),
}
