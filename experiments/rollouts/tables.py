"""Tables of this experiment."""

from collections.abc import Sequence

from experiments.common.audit import SUMMARY, summary
from experiments.common.rows import Row
from experiments.common.tables import Table, markdown

_WAITS = (
    *("usual p99, s", "p99 during the change", "worst", "p99 at the gateways", "client late"),
    *("complete after, s", "replaced"),
)


def _headline(rows: Sequence[Row]) -> str:
    head = [
        *("change", "requests", "answered once", "usual P99, s", "P99 during the change, s"),
        "P99 at the gateways, s",
    ]
    lines = []
    for row in rows:
        sent, answered, *_ = summary(row.figures)
        usual, during, _, at_gateways, *_ = _waits(row)
        lines.append([str(row.key["what"]), sent, answered, usual, during, at_gateways])
    return markdown(head, lines)


def _all(rows: Sequence[Row]) -> str:
    lines = ([str(row.key["what"]), *summary(row.figures), *_waits(row)] for row in rows)
    return markdown(["change", *SUMMARY, *_WAITS], lines)


def _waits(row: Row) -> list[str]:
    figures = row.figures
    return [
        f"{figures['before_s']['p99']:.2f}",
        f"{figures['during_s']['p99']:.2f}",
        f"{figures['during_s']['worst']:.2f}",
        f"{figures['during_at_gateways_s']['p99']:.2f}",
        f"{figures['client_late_s']['p99']:.2f}",
        f"{figures['took_s']:.0f}",
        ", ".join(name.removesuffix("-demo") for name in figures["replaced"]) or "nothing",
    ]


_NOTE = "Live, emulated engines, one run of each kind"

TABLES = {
    "headline": Table(text=_headline, note=_NOTE, shows_load=True),
    "all": Table(text=_all, note=_NOTE, shows_load=True),
}
