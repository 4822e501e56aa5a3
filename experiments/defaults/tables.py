"""Tables and the map of this experiment."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.common.rows import Row
from experiments.common.tables import Column, Table, line_per_row, markdown
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


# Parts of ours, by the variant that lacks only this part.
_PARTS = {
    "fcfs-isolated": "order",
    "one queue": "learned queues",
    "no bound on delay": "bound on delay",
    "no chunks": "chunks",
    "no limits on prefills": "limits on prefills",
}


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


_ALL = line_per_row(
    {"traffic and engines": "{scene}", "load": "{load:g}", "policy": "{policy}"},
    (
        Column("goodput", "goodput", 3),
        Column("short P99, s", "short_ttft_p99_s"),
        Column("long P99, s", "long_ttft_p99_s"),
        Column("TPOT, ms", "tpot_mean_s", 0, 1_000),
        Column("longest wait, s", "queue_wait_max_s", 1),
        Column("tokens/s", "tokens_per_s", 0),
    ),
)
# The map

_TITLES = {"goodput": "requests within the SLO", "short by long P99": "short P99 × long P99 of TTFT"}  # noqa: RUF001
_LEFT, _TOP, _WIDTH, _HEIGHT, _GAP = 190, 78, 132, 40, 14
_ROOT = 'role="img" aria-labelledby="t" font-family="system-ui, sans-serif" font-size="12"'
_STYLE = """<style>
.ground{fill:#fff}text{fill:#1b2430}.on{fill:#1b2430}.small{font-size:10.5px}.bold{font-weight:700}
@media (prefers-color-scheme:dark){.ground{fill:#12161c}text{fill:#e6eaf0}.on{fill:#1b2430}}
</style>"""
# Ratios beyond this have the strongest colour.
_STRONGEST = 2.0
_BETTER, _WORSE, _EQUAL = (94, 160, 214), (238, 145, 70), (243, 244, 246)


def picture(rows: Sequence[Row]) -> str:
    """Return the map as SVG: a line for each scene, a column for each figure and load."""
    cells = cells_of(rows)
    scenes, loads = list(dict.fromkeys(scene for scene, _ in cells)), sorted({load for _, load in cells})
    width = _LEFT + len(FIGURES) * (len(loads) * _WIDTH + _GAP) + 6
    height = _TOP + len(scenes) * _HEIGHT + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {_ROOT}>',
        '<title id="t">The defaults against the best other policy, by traffic, engines and load</title>',
        _STYLE,
        f'<rect class="ground" width="{width}" height="{height}" rx="8"/>',
        _text(14, 24, "Ours / best other policy: above 1, the defaults are better", "bold", "start"),
    ]
    for number, scene in enumerate(scenes):
        parts.append(_text(_LEFT - 10, _TOP + number * _HEIGHT + 25, scene, "", "end"))
    for place, figure in enumerate(FIGURES):
        left = _LEFT + place * (len(loads) * _WIDTH + _GAP)
        parts.append(_text(left + len(loads) * _WIDTH // 2, 48, _TITLES[figure], "bold"))
        for column, load in enumerate(loads):
            x = left + column * _WIDTH
            parts.append(_text(x + _WIDTH // 2, 68, f"load {load:g}"))
            for number, scene in enumerate(scenes):
                found = verdict(cells[scene, load], figure)
                parts += _cell(x, _TOP + number * _HEIGHT, found)
    foot = f"Below {LOSS:g} is a loss. Bold: the 95 % interval excludes 1. Of equals, the first is named."
    parts.append(_text(14, height - 16, foot, "small", "start"))
    return "\n".join([*parts, "</svg>", ""])


def _cell(x: int, y: int, found: Verdict) -> list[str]:
    one = found.ratio
    is_sure = one.low is not None and one.high is not None and not one.low <= 1 <= one.high
    number = f"{one.mean:.2f}" if one.mean < 100 else f"{one.mean:.0f}"
    middle, size = x + _WIDTH // 2, f'width="{_WIDTH - 2}" height="{_HEIGHT - 2}"'
    return [
        f'<rect x="{x + 1}" y="{y + 1}" {size} rx="4" fill="{_colour(one.mean)}"/>',
        _text(middle, y + 17, number, "on bold" if is_sure else "on"),
        _text(middle, y + 32, found.best, "on small"),
    ]


def _colour(ratio: float) -> str:
    share = max(-1.0, min(1.0, math.log(ratio) / math.log(_STRONGEST)))
    end = _BETTER if share > 0 else _WORSE
    mixed = (round(low + abs(share) * (high - low)) for low, high in zip(_EQUAL, end, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _text(x: int, y: int, text: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{text}</text>'


_RATIO = "Geometric means over seeds with their 95 % intervals; above 1, ours is better"
TABLES = {
    "losses": Table(text=_losses, note=f"Simulated. {_RATIO}"),
    "causes": Table(text=_causes, note=f"Simulated. {_RATIO}"),
    "all": Table(
        text=lambda rows: _ALL([row for cell in cells_of(rows).values() for row in cell.values()]),
        note="Simulated; means over seeds with their 95 % intervals",
    ),
}
PICTURES = {"docs/images/defaults.svg": lambda rows_of: picture(rows_of("defaults"))}
