"""Pictures of rows: small panels of lines with the value at every point, as an SVG."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from experiments.common.rows import Row

Picture = Callable[[Callable[[str], Sequence[Row]]], str]
"""Returns the SVG; its argument returns the rows of an experiment by name."""

_COLUMNS, _WIDTH, _HEIGHT, _LEGEND = 2, 360, 212, 36
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 330, 52, 156
# Colours of the other pictures, on light and dark pages.
_COLOURS = (("#1f5fbf", "#7fb0ff"), ("#0f7c74", "#5fd0c5"), ("#566172", "#a3adbb"))


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel, with a value at each of its ticks."""

    name: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel; its ticks have equal distances.

    Attributes:
        is_log: whether the vertical axis is logarithmic; otherwise it begins at zero.
    """

    title: str
    ticks: Sequence[str]
    lines: Sequence[Line]
    is_log: bool = False

    def heights(self, values: Sequence[float]) -> list[float]:
        """Return the vertical positions of values, between those of the panel's limits."""
        scale: Callable[[float], float] = math.log if self.is_log else float
        found = [value for line in self.lines for value in line.values]
        low = scale(min(found)) if self.is_log else 0.0
        span = scale(max(found)) - low or 1.0
        return [_BOTTOM - (_BOTTOM - _TOP) * (scale(value) - low) / span for value in values]


def drawn(title: str, description: str, panels: Sequence[Panel]) -> str:
    """Return panels side by side as an SVG, with one legend for all."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    width, height = _COLUMNS * _WIDTH, _LEGEND + math.ceil(len(panels) / _COLUMNS) * _HEIGHT
    light = "".join(f".c{n} text{{fill:{a}}}.c{n} *{{stroke:{a}}}" for n, (a, _) in enumerate(_COLOURS))
    dark = "".join(f".c{n} text{{fill:{b}}}.c{n} *{{stroke:{b}}}" for n, (_, b) in enumerate(_COLOURS))
    legend = "".join(
        f'<g class="c{n}" transform="translate({16 + 150 * n} 20)">'
        f'<path d="M0 0h24"/><text x="32" y="4">{escape(name)}</text></g>\n'
        for n, name in enumerate(names)
    )
    body = "".join(
        f'<g transform="translate({place % _COLUMNS * _WIDTH} {_LEGEND + place // _COLUMNS * _HEIGHT})">\n'
        f"{_panel(panel, names)}</g>\n"
        for place, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-labelledby="t d" font-family="system-ui, sans-serif" '
        f'font-size="12">\n<title id="t">{escape(title)}</title>\n<desc id="d">{escape(description)}</desc>\n'
        "<style>\n.ground{fill:#fff}text{fill:#1b2430;stroke:none!important}path{fill:none;stroke-width:2}"
        f".axis{{stroke:#c3c9d2;stroke-width:1}}.title{{font-weight:600}}\n{light}\n"
        "@media (prefers-color-scheme:dark){.ground{fill:#12161c}text{fill:#e6eaf0}.axis{stroke:#3a4350}"
        f'{dark}}}\n</style>\n<path class="ground" d="M0 0H{width}V{height}H0z"/>\n{legend}{body}</svg>\n'
    )


def _panel(panel: Panel, names: Sequence[str]) -> str:
    step = (_RIGHT - _LEFT) / max(1, len(panel.ticks) - 1)
    places = [_LEFT + step * number for number in range(len(panel.ticks))]
    ticks = "".join(
        f'<text x="{x:.0f}" y="{_BOTTOM + 40}" text-anchor="middle">{escape(tick)}</text>\n'
        for x, tick in zip(places, panel.ticks, strict=True)
    )
    axis = f'<path class="axis" d="M{_LEFT} {_BOTTOM + 24}H{_RIGHT}"/>\n'
    title = f'<text class="title" x="16" y="20">{escape(panel.title)}</text>\n'
    lines = "".join(
        f'<g class="c{names.index(line.name)}">\n{_line(places, panel, line)}</g>\n' for line in panel.lines
    )
    return f"{title}{axis}{ticks}{lines}"


def _line(places: Sequence[float], panel: Panel, line: Line) -> str:
    heights = panel.heights(line.values)
    points = " ".join(f"{x:.0f} {y:.1f}" for x, y in zip(places, heights, strict=True))
    # The highest line has its labels above, and others have them below, so that close lines stay legible.
    highest = [max(values) for values in zip(*(each.values for each in panel.lines), strict=True)]
    labels = "".join(
        f'<text x="{x:.0f}" y="{y + (-7 if value == high else 16):.1f}" text-anchor="middle">'
        f"{_written(value)}</text>\n"
        for x, y, value, high in zip(places, heights, line.values, highest, strict=True)
    )
    return f'<path d="M{points}"/>\n{labels}'


def _written(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"
