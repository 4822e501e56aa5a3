"""The tables of this experiment."""

from collections.abc import Sequence
from statistics import median

from experiments.common.rows import Row, where
from experiments.common.tables import Table, load_note, markdown
from experiments.observe_cost.cost import ROLES

_FIGURES = (("short", "ttft_p50_s"), ("short", "ttft_p99_s"), ("all", "ttft_p50_s"), ("all", "ttft_p99_s"))
_TIMES = ("first_ms", "whole_ms")


def _cost(rows: Sequence[Row]) -> str:
    (row,) = where(rows, part="cost")
    head = ["way", "first token, ms", "whole answer, ms", *(f"{role} CPU, ms" for role in ROLES)]
    cpu = [f"{role}_cpu_ms" for role in ROLES]
    lines = [
        [way, *(f"{median(row.figures[way][name]):.2f}" for name in _TIMES), *_cpu(row, way, cpu)]
        for way in ("direct", "observe", "active")
    ]
    for way, other in (("observe", "direct"), ("observe", "active")):
        times = [_median_difference(row, way, other, name) for name in _TIMES]
        used = (
            ["-"] * len(cpu)
            if other == "direct"
            else [_median_difference(row, way, other, name) for name in cpu]
        )
        lines.append([f"{way} - {other}", *times, *used])
    return f"{markdown(head, lines)}\n\n{load_note([row])}"


def _cpu(row: Row, way: str, names: Sequence[str]) -> list[str]:
    return ["-" if way == "direct" else f"{median(row.figures[way][name]):.2f}" for name in names]


def _median_difference(row: Row, way: str, other: str, name: str) -> str:
    pairs = zip(row.figures[way][name], row.figures[other][name], strict=True)
    return f"{median(one - two for one, two in pairs):+.2f}"


def _forecast(rows: Sequence[Row]) -> str:
    (row,) = where(rows, part="forecast")
    names = {
        "passed, measured": "passed",
        "passed, by the twin": "forecast_passed",
        "scheduled, by the twin": "forecast_scheduled",
        "scheduled, measured": "scheduled",
    }
    head = ["way", "short p50, s", "short p99, s", "all p50, s", "all p99, s"]
    lines = [[said, *(_figure(row, name, *which) for which in _FIGURES)] for said, name in names.items()]
    return markdown(head, lines)


def _figure(row: Row, name: str, size: str, figure: str) -> str:
    found = row.figures[name]
    return "-" if found is None or found[size][figure] is None else f"{found[size][figure]:.3f}"


TABLES = {
    "cost": Table(
        text=_cost,
        where={"part": "cost"},
        note="Live, on light servers: medians over the rounds, and medians of the differences within a round",
    ),
    "forecast": Table(
        text=_forecast,
        where={"part": "forecast"},
        note="Live, on two emulated engines: times to first token",
    ),
}
