"""Tables of this experiment, and the comparisons that its map shows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.common.rows import Row
from experiments.common.tables import Table, markdown, plus_minus
from serve_app.core.metrics.confidence import ConfidenceInterval, interval_95

OURS = "ewsjf"
OTHERS = ("fcfs", "sjf", "wspt-drr", "fcfs-isolated", "ewsjf, no isolation", "ewsjf-paper")
LOSS = 0.95
"""A ratio below this is a loss: five percent."""
# Parts of ours, by the variant that lacks only this part.
_PARTS = {
    "fcfs-isolated": "order",
    "one queue": "learned queues",
    "no bound on delay": "bound on delay",
    "no chunks": "chunks",
    "no limits on prefills": "limits on prefills",
}


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


def _ratio_text(one: ConfidenceInterval) -> str:
    return f"{one.mean:.2f}" if one.low is None else f"{one.mean:.2f} ({one.low:.2f} to {one.high:.2f})"


def _lost(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, float], str, Mapping[str, Row], Verdict]]:
    for key, cell in cells_of(rows).items():
        for figure in FIGURES:
            found = verdict(cell, figure)
            if found.is_loss:
                yield key, figure, cell, found


def _without(cell: Mapping[str, Row], figure: str, best: str) -> list[tuple[str, ConfidenceInterval]]:
    """Return the parts of ours, each with the ratio of ours without it to the best other policy."""
    return [(part, ratio(cell[name], cell[best], figure)) for name, part in _PARTS.items() if name in cell]


def _losses(rows: Sequence[Row]) -> str:
    head = ["traffic and engines", "load", "figure", "best other", "ours / best", "cause: ratio without it"]
    lines = []
    for (scene, load), figure, cell, found in _lost(rows):
        part, without = max(_without(cell, figure, found.best), key=lambda one: one[1].mean)
        cause = f"{part}: {without.mean:.2f}"
        lines.append([scene, f"{load:g}", figure, found.best, _ratio_text(found.ratio), cause])
    return markdown(head, lines or [["none", "", "", "", "", ""]], text_columns=4)


def _causes(rows: Sequence[Row]) -> str:
    """Return a line for each loss and part of ours."""
    head = ["traffic and engines", "load", "figure", "without", "ratio to the best other"]
    lines = [
        [scene, f"{load:g}", figure, part, _ratio_text(one)]
        for (scene, load), figure, cell, found in _lost(rows)
        for part, one in [("nothing", found.ratio), *_without(cell, figure, found.best)]
    ]
    return markdown(head, lines or [["none", "", "", "", ""]], text_columns=4)


def _all(rows: Sequence[Row]) -> str:
    head = ["traffic and engines", "load", "policy", "goodput", "short P99, s", "long P99, s"]
    head += ["TPOT, ms", "longest wait, s", "tokens/s"]
    lines = [
        [
            scene,
            f"{load:g}",
            name,
            plus_minus(row.figures["goodput"], 3),
            plus_minus(row.figures["short_ttft_p99_s"]),
            plus_minus(row.figures["long_ttft_p99_s"]),
            plus_minus(row.figures["tpot_mean_s"], 0, scale=1_000),
            plus_minus(row.figures["queue_wait_max_s"], 1),
            plus_minus(row.figures["tokens_per_s"], 0),
        ]
        for (scene, load), cell in cells_of(rows).items()
        for name, row in cell.items()
    ]
    return markdown(head, lines, text_columns=3)


_RATIO = "Geometric means over seeds with their 95 % intervals; above 1, ours is better"
TABLES = {
    "losses": Table(text=_losses, note=f"Simulated. {_RATIO}"),
    "causes": Table(text=_causes, note=f"Simulated. {_RATIO}"),
    "all": Table(text=_all, note="Simulated; means over seeds with their 95 % intervals"),
}
