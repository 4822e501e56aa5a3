"""Tables of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import ANY, Row, where
from experiments.common.tables import Table, markdown, plus_minus

_RULES = ("work, reacting", "Serve's default", "fixed, at the peak", "fixed, at the mean")
_HOUR_S = 3_600.0


_HEADLINE_START_S = 120


def _headline(rows: Sequence[Row]) -> str:
    head = ["traffic", "rule", "replica-hours", "short in SLO, %", "long in SLO, %", "long P99 TTFT, s"]
    lines = []
    for row in where(rows, start_s=_HEADLINE_START_S, rule=_RULES):
        case, _, rule, hours, short, long, _, p99, _ = _line(row)
        lines.append([case, rule, hours, short, long, p99])
    return markdown(head, lines, text_columns=2)


def _all(rows: Sequence[Row]) -> str:
    head = [
        *("traffic", "start, s", "rule", "replica-hours"),
        *("in SLO, short, %", "in SLO, long, %", "P99 TTFT short, s", "P99 TTFT long, s", "not completed"),
    ]
    lines = [_line(row) for row in rows if row.key["rule"] in _RULES]
    return markdown(head, lines, text_columns=3)


def _line(row: Row) -> list[str]:
    figures = row.figures
    return [
        str(row.key["case"]),
        f"{row.key['start_s']:g}",
        str(row.key["rule"]),
        plus_minus(figures["all_replica_s"], 1, scale=1 / _HOUR_S),
        plus_minus(figures["short_attained"], 1, scale=100),
        plus_minus(figures["long_attained"], 1, scale=100),
        plus_minus(figures["short_ttft_p99_s"], 1),
        plus_minus(figures["long_ttft_p99_s"], 1),
        f"{sum(figures['not_completed'])} of {sum(figures['requests'])}",
    ]


_NOTE = "Simulated. SLO: TTFT 1 s for short and 10 s for long prompts, TPOT 0.1 s"
_WHERE = {"case": ANY, "start_s": ANY, "rule": ANY}
TABLES = {
    "headline": Table(
        text=_headline,
        where=_WHERE,
        note=f"{_NOTE}. Engines start within {_HEADLINE_START_S} s",
    ),
    "all": Table(text=_all, where=_WHERE, note=_NOTE),
}
