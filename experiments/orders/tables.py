"""The tables of this experiment: ours beside every other order, a line for each kind of traffic and load."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.common.rows import Row
from experiments.common.tables import Table, markdown
from experiments.policies.tables import NOTE, grid_table
from serve_app.metrics.confidence import paired_difference_95

_OURS, _BEFORE, _ISOLATED, _DIRECT = "ewsjf", "ewsjf, no bound", "fcfs-isolated", "direct"
_SHORT, _LONG = "short_ttft_p99_s", "long_ttft_p99_s"
_WAIT, _GOODPUT = "queue_wait_max_s", "goodput_per_s"

Point = tuple[str, float]
"""Case and load."""


def dominating(point: Sequence[Row]) -> list[str]:
    """The policies that are better than ours in short and long P99 at once.

    The mean of the paired differences over seeds counts; `!` marks one whose intervals exclude zero in both.
    """
    (ours,) = (row for row in point if row.key["policy"] == _OURS)
    found = []
    for row in point:
        short, long = (
            paired_difference_95(row.figures[name], ours.figures[name]) for name in (_SHORT, _LONG)
        )
        if short.mean < 0 and long.mean < 0:
            is_sure = all(each.high is not None and each.high < 0 for each in (short, long))
            found.append(f"{row.key['policy']}{'!' if is_sure else ''}")
    return found


def _points(rows: Sequence[Row]) -> Iterator[tuple[Point, list[Row]]]:
    points: dict[Point, list[Row]] = {}
    for row in rows:
        points.setdefault((str(row.key["case"]), float(row.key["load"])), []).append(row)
    for point, there in points.items():
        if any(row.key["policy"] == _OURS for row in there):
            yield point, there


def _verdicts(rows: Sequence[Row]) -> str:
    lines = []
    for (case, load), point in _points(rows):
        of = {str(row.key["policy"]): row.figures for row in point}

        price = fmean(of[_OURS][_LONG]) / fmean(of[_ISOLATED][_LONG]) if _ISOLATED in of else None
        lines.append(
            [
                case,
                str(load),
                _means(of, _SHORT, (_DIRECT, _ISOLATED, _BEFORE, _OURS), 2),
                _means(of, _LONG, (_DIRECT, _ISOLATED, _BEFORE, _OURS), 1),
                "-" if price is None else f"{price:.2f}",
                _means(of, _WAIT, (_ISOLATED, _BEFORE, _OURS), 1),
                _means(of, _GOODPUT, (_ISOLATED, _BEFORE, _OURS), 2),
                ", ".join(dominating(point)) or "none",
            ]
        )
    head = [
        "traffic",
        "load",
        "short P99, s: direct / isolated / before / ours",
        "long P99, s: direct / isolated / before / ours",
        "long P99, ours / isolated",
        "longest wait, s: isolated / before / ours",
        "goodput, 1/s: isolated / before / ours",
        "better at both",
    ]
    return markdown(head, lines, text_columns=2)


def _means(of: Mapping[str, Mapping[str, Any]], figure: str, policies: Sequence[str], decimals: int) -> str:
    """The means of some policies, where they were played."""
    return " / ".join(f"{fmean(of[one][figure]):,.{decimals}f}" if one in of else "-" for one in policies)


TABLES = {
    "verdicts": Table(
        text=_verdicts,
        note="Llama-2-70B on four H100, simulated, means over seeds. `isolated` is `fcfs-isolated`, and "
        "`before` is ours without the bound on delay; a mark `!` is for intervals that exclude zero",
    ),
    "all": Table(text=grid_table("case", "load"), note=NOTE),
}
