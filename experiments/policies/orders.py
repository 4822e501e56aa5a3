"""Rows of orders: one row per point, a kind of traffic at a load, with all policies.

A row per policy would make the file seven times as large. The P99s are stored by seed, because orders are
compared by paired differences. Of the other figures, tables need only the mean and its interval.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

from experiments.common.experiment import Context, Measurement
from experiments.common.rows import Key, Row
from experiments.policies.grid import PolicyGrid, cells_of, play_grid
from serve_app.core.metrics.summary import interval_95

SHORT, LONG = "short_ttft_p99_s", "long_ttft_p99_s"
_PAIRED = (SHORT, LONG)
_MEANS = (
    *("short_ttft_mean_s", "long_ttft_mean_s", "queue_wait_max_s", "tpot_mean_s"),
    *("goodput_per_s", "tokens_per_s"),
)
_POINT = ("case", "profile", "load")
# Names of orders contain commas.
_BETWEEN = " | "
# Fields of single orders, which follow from their names, the grid and the commit.
_OF_SOME_ORDERS = frozenset({"policy", "label", "scheduler", "partition"})


@dataclass(frozen=True, slots=True)
class Order:
    """One order of service at one point.

    Attributes:
        figures: a list over seeds, or the mean and half the width of its interval.
    """

    case: str
    load: float
    policy: str
    figures: dict[str, list[Any]]

    def mean(self, figure: str) -> float:
        """Return the mean over seeds."""
        found = self.figures[figure]
        return fmean(found) if figure in _PAIRED else float(found[0])


def play_points(grid: PolicyGrid, context: Context) -> Iterator[Measurement]:
    """Measure the grid, a row for each point; skip existing points."""
    there = {_point(key) for key in context.kept}
    kept = tuple(cell.key for cell in cells_of(grid) if _point(cell.key) in there)
    cells = play_grid(grid, Context(context.jobs, kept))
    for _, orders in groupby(cells, key=lambda one: _point(one.key)):
        yield combined(list(orders))


def combined(orders: Sequence[Measurement]) -> Measurement:
    """Combine the rows of a point's orders into the row of the point."""
    first = orders[0]
    figures: dict[str, Any] = {"deployable": [one.figures["deployable"] for one in orders]}
    for name in _PAIRED:
        figures[name] = [one.figures[name] for one in orders]
    for name in _MEANS:
        figures[name] = [_mean_and_half(one.figures[name]) for one in orders]
    point = dict(zip(_POINT, _point(first.key), strict=True))
    return Measurement(
        key={**point, "policies": _BETWEEN.join(str(one.key["policy"]) for one in orders)},
        figures=figures,
        seeds=first.seeds,
        traces=first.traces,
        settings={
            name: value for name, value in (first.settings or {}).items() if name not in _OF_SOME_ORDERS
        },
    )


def orders_of(rows: Iterable[Row]) -> Iterator[Order]:
    """Yield every order of every point."""
    for row in rows:
        for number, policy in enumerate(str(row.key["policies"]).split(_BETWEEN)):
            yield Order(
                case=str(row.key["case"]),
                load=float(row.key["load"]),
                policy=policy,
                figures={name: row.figures[name][number] for name in (*_PAIRED, *_MEANS)},
            )


def _point(key: Key) -> tuple[str | int | float | bool, ...]:
    return tuple(key[name] for name in _POINT)


def _mean_and_half(values: Sequence[float]) -> list[float | None]:
    found = interval_95(values)
    return [fmean(values), None if found.high is None else found.high - found.mean]
