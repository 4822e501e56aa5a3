"""Tables of this experiment."""

from collections.abc import Callable, Sequence

from experiments.availability.deaths import KINDS
from experiments.common.audit import SUMMARY, summary
from experiments.common.rows import Row
from experiments.common.tables import Table, markdown

_WHOLE = ("recovery, s: P50", "worst")


def _deaths(rows: Sequence[Row]) -> str:
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


_WAITS = (
    *("usual p99, s", "p99 during the change", "worst", "p99 at the gateways", "client late"),
    *("complete after, s", "replaced"),
)


def _rollouts(rows: Sequence[Row]) -> str:
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


def _table(text: Callable[[Sequence[Row]], str], **where: object) -> Table:
    note = "Live, emulated engines, one run of each kind"
    return Table(text=text, where=where, note=note, shows_load=True)


TABLES = {
    "deaths": _table(_deaths, part="deaths"),
    "nodes": _table(_deaths, part="deaths", kind=KINDS),
    "deaths-all": _table(
        lambda rows: markdown(
            ["failure", *SUMMARY, *_WHOLE],
            ([_words(row), *summary(row.figures), *_whole_after(row)] for row in rows),
        ),
        part="deaths",
    ),
    "rollouts": _table(_rollouts, part="rollouts"),
    "rollouts-all": _table(
        lambda rows: markdown(
            ["change", *SUMMARY, *_WAITS],
            ([str(row.key["what"]), *summary(row.figures), *_waits(row)] for row in rows),
        ),
        part="rollouts",
    ),
}
