"""The tables of this experiment."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from experiments.common.rows import ANY, Row
from experiments.common.tables import Table, difference, markdown, plus_minus

_RULES = ("work, reacting", "Serve's default", "fixed, at the peak", "fixed, at the mean")
_HOUR_S = 3_600.0


def _headline(rows: Sequence[Row]) -> str:
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


def _forecasts(rows: Sequence[Row]) -> str:
    """Each forecast against reacting, which lacks only it."""
    by_key: dict[tuple[Any, ...], Row] = {
        (row.key["case"], row.key["start_s"], row.key["rule"]): row for row in rows
    }
    head = [
        "traffic",
        "start, s",
        "forecast",
        "in SLO, points",
        "replica-hours",
        "in SLO per replica-hour, %",
    ]
    lines = []
    for (case, start_s, rule), row in by_key.items():
        base = by_key.get((case, start_s, "work, reacting"))
        if base is None or rule not in ("work, trend", "work, season"):
            continue
        lines.append(
            [
                str(case),
                f"{start_s:g}",
                str(rule).removeprefix("work, "),
                difference(row.figures["attained"], base.figures["attained"], 2, scale=100),
                difference(row.figures["all_replica_s"], base.figures["all_replica_s"], 2, scale=1 / _HOUR_S),
                f"{100 * (_per_hour(row) / _per_hour(base) - 1):+.1f}",
            ]
        )
    return markdown(head, lines, text_columns=3)


def _per_hour(row: Row) -> float:
    pairs = zip(row.figures["attained"], row.figures["all_replica_s"], strict=True)
    return float(mean(attained / seconds for attained, seconds in pairs))


_WHERE = {"case": ANY, "start_s": ANY, "rule": ANY}
TABLES = {
    "headline": Table(
        text=_headline,
        where=_WHERE,
        note="Simulated. SLO: TTFT 1 s for short and 10 s for long prompts, TPOT 0.1 s",
    ),
    "forecasts": Table(
        text=_forecasts,
        where=_WHERE,
        note="Simulated: each forecast less reacting, and the change of SLO attainment per replica-hour",
    ),
}
