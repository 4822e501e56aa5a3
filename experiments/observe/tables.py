"""The tables of this experiment."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from experiments.common.rows import ANY, Row
from experiments.common.tables import Table, markdown

_FIGURES = (("short", "ttft_p50_s"), ("short", "ttft_p99_s"), ("all", "ttft_p50_s"), ("all", "ttft_p99_s"))


def _headline(rows: Sequence[Row]) -> str:
    head = ["requests/s", "way", "short p50, s", "short p99, s", "all p50, s", "all p99, s"]
    return markdown(head, [line for row in rows for line in _lines(row)])


def _lines(row: Row) -> list[list[str]]:
    names = {
        "passed, measured": "passed",
        "passed, by the twin": "forecast_passed",
        "scheduled, by the twin": "forecast_scheduled",
        "scheduled, measured": "scheduled",
    }
    return [
        [f"{row.key['rate_per_s']:g}", said, *(_median(row.figures[name], *which) for which in _FIGURES)]
        for said, name in names.items()
    ]


def _median(columns: Sequence[Mapping[str, Any] | None], size: str, name: str) -> str:
    known = [one[size][name] for one in columns if one is not None and one[size][name] is not None]
    return f"{median(known):.3f}" if known else "-"


TABLES = {
    "headline": Table(
        text=_headline,
        where={"rate_per_s": ANY},
        note="Simulated: median over the seeds of times to first token",
    ),
}
