"""Tables of this experiment."""

from collections.abc import Sequence

from experiments.common.audit import SUMMARY, summary
from experiments.common.rows import Row
from experiments.common.tables import Table, markdown
from experiments.deaths.run import KINDS

_WHOLE = ("recovery, s: P50", "worst")


def _headline(rows: Sequence[Row]) -> str:
    head = [
        *("failure", "requests", "answered once", "rejected, failed or broken"),
        *("lost, doubled or cut", "recovery, s: P50 / worst"),
    ]
    lines = []
    for row in rows:
        sent, answered, *visible, wrong = (int(each.replace(",", "")) for each in summary(row.figures))
        counts = (f"{count:,}" for count in (sent, answered, sum(visible), wrong))
        lines.append([_words(row), *counts, " / ".join(_whole_after(row))])
    return markdown(head, lines)


def _words(row: Row) -> str:
    done = {"KILL": "killed", "STOP": "halted"}[str(row.key["signal"])]
    resumed = ", streams resumed" if row.key.get("resume_streams") else ""
    return f"{row.key['kind']} {done}, {row.figures['deaths']} times{resumed}"


def _whole_after(row: Row) -> list[str]:
    back = sorted(seconds for seconds in row.figures["back_s"] if seconds is not None)
    never = len(row.figures["back_s"]) - len(back)
    return [
        f"{back[len(back) // 2]:.1f}" if back else "-",
        f"{back[-1]:.1f}" if not never else f"{never} not in time",
    ]


_NOTE = "Live, emulated engines, one run of each kind"

TABLES = {
    "headline": Table(text=_headline, note=_NOTE, shows_load=True),
    "nodes": Table(text=_headline, where={"kind": KINDS}, note=_NOTE, shows_load=True),
    "all": Table(
        text=lambda rows: markdown(
            ["failure", *SUMMARY, *_WHOLE],
            ([_words(row), *summary(row.figures), *_whole_after(row)] for row in rows),
        ),
        note=_NOTE,
        shows_load=True,
    ),
}
