"""Comparisons of ours with the best other policy of a cell, for the tables and the map."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.common.rows import Row
from serve_app.core.metrics.summary import ConfidenceInterval, interval_95

OURS = "ewsjf"
OTHERS = ("fcfs", "sjf", "wspt-drr", "fcfs-isolated", "ewsjf, no isolation", "ewsjf-paper")
LOSS = 0.95
"""A ratio below this is a loss: five percent."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ours against the best other policy of a cell, by one figure.

    Attributes:
        ratio: geometric mean over seeds, above 1 where ours is better, with its interval.
    """

    best: str
    ratio: ConfidenceInterval

    @property
    def is_loss(self) -> bool:
        """Return whether ours is more than five percent behind."""
        return self.ratio.mean < LOSS


def goodput(row: Row) -> list[float]:
    """Return the share of requests within the SLO, by seed."""
    return [float(one) for one in row.figures["goodput"]]


def both_p99s(row: Row) -> list[float]:
    """Return the short times the long P99 of TTFT, inverted so that more is better, by seed."""
    pairs = zip(row.figures["short_ttft_p99_s"], row.figures["long_ttft_p99_s"], strict=True)
    return [1 / (short * long) for short, long in pairs]


FIGURES = {"goodput": goodput, "short by long P99": both_p99s}


def cells_of(rows: Sequence[Row]) -> Mapping[tuple[str, float], Mapping[str, Row]]:
    """Return the rows of each scene and load by policy, in the order of the rows."""
    cells: dict[tuple[str, float], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((str(row.key["scene"]), float(str(row.key["load"]))), {})[str(row.key["policy"])] = (
            row
        )
    return cells


def verdict(cell: Mapping[str, Row], figure: str) -> Verdict:
    """Compare ours with the best other policy of a cell."""
    of = FIGURES[figure]
    best = max((name for name in OTHERS if name in cell), key=lambda name: _log_mean(of(cell[name])))
    return Verdict(best, ratio(cell[OURS], cell[best], figure))


def ratio(row: Row, other: Row, figure: str) -> ConfidenceInterval:
    """Return the geometric mean over seeds of the ratio of two rows, with its interval."""
    of = FIGURES[figure]
    # A policy without any request within the SLO counts as if it had one in ten thousand.
    pairs = zip(of(row), of(other), strict=True)
    logs = interval_95([math.log(max(one, _LEAST) / max(two, _LEAST)) for one, two in pairs])
    low, high = (None if end is None else math.exp(end) for end in (logs.low, logs.high))
    return ConfidenceInterval(math.exp(logs.mean), low, high, logs.n)


_LEAST = 1e-4


def _log_mean(values: Sequence[float]) -> float:
    return fmean(math.log(max(value, _LEAST)) for value in values)
