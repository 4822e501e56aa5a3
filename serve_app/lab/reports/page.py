"""Report as one HTML file, which includes its styles, scripts and values and loads nothing else.

Tables, verdict and pictures of intervals need no script. The content security policy blocks all loading and
allows only the two scripts in the file, by their hashes.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

from serve_app.lab.reports.document import (
    DIFFERENCE_COLUMNS,
    Cell,
    DifferenceTable,
    FigureDifference,
    LineStyle,
    Origin,
    Plot,
    PlotAxis,
    ReportSection,
    ReportTable,
    ResultReport,
    Series,
    Unit,
    figures_of,
)

_WIDTH, _HEIGHT = 240, 22
_MARGIN = 8
# A figure that more than doubles would compress all others. Its interval ends in an arrow there.
_LOWEST, _HIGHEST = -1.0, 1.0
_LEAST = 0.02
# Minimum distance of labels of the scale, so that they do not overlap.
_LABEL = 50
_OPENED = f'<svg class="change" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'


@dataclass(frozen=True, slots=True)
class IntervalScale:
    """Horizontal scale of the pictures of one table, in shares of the baseline's value."""

    low: float
    high: float

    @classmethod
    def of(cls, differences: Sequence[FigureDifference]) -> "IntervalScale":
        """Return a scale that contains zero and these intervals, as far as they are of similar size."""
        ends = [0.0]
        for one in differences:
            ends += one.change_interval or (() if one.change is None else (one.change,))
        low, high = max(_LOWEST, min(ends)), min(_HIGHEST, max(ends))
        pad = max(_LEAST, 0.06 * (high - low))
        return cls(low - pad, high + pad)

    def ruler(self) -> str:
        """Draw the scale: its ends and zero."""
        labels = []
        for value, anchor in ((self.low, "start"), (0.0, "middle"), (self.high, "end")):
            x = self._x(value)
            if value and abs(x - self._x(0.0)) < _LABEL:
                continue
            text = "0" if value == 0 else f"{100 * value:+.0f} %"
            labels.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{text}</text>')
        return f'{_OPENED} aria-hidden="true">{"".join(labels)}</svg>'

    def picture(self, one: FigureDifference) -> str:
        """Draw the interval as a bar with its mean as a dot, beside a line at zero."""
        if one.change is None:
            return ""
        low, high = one.change_interval or (one.change, one.change)
        described = f"{one.change:+.1%}" if low == high else f"{one.change:+.1%}, {low:+.1%} to {high:+.1%}"
        middle = _HEIGHT / 2
        left, right, zero = (self._x(value) for value in (low, high, 0.0))
        shapes = [f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{_HEIGHT}"/>']
        if low != high:
            shapes.append(
                f'<line class="interval" x1="{left:.1f}" x2="{right:.1f}" y1="{middle}" y2="{middle}"/>'
            )
        if low < self.low:
            shapes.append(_arrow(-1))
        if high > self.high:
            shapes.append(_arrow(1))
        if self.low <= one.change <= self.high:
            shapes.append(f'<circle cx="{self._x(one.change):.1f}" cy="{middle}" r="4.5"/>')
        return (
            f'{_OPENED} role="img" aria-label="{described}"><title>{described}</title>{"".join(shapes)}</svg>'
        )

    def _x(self, value: float) -> float:
        within = min(self.high, max(self.low, value))
        return _MARGIN + (within - self.low) / (self.high - self.low) * (_WIDTH - 2 * _MARGIN)


def _arrow(direction: int) -> str:
    """Draw the end of an interval that exceeds the scale."""
    tip, middle = (_WIDTH - 1 if direction > 0 else 1), _HEIGHT / 2
    back = tip - direction * 7
    return f'<polygon points="{tip},{middle} {back},{middle - 5} {back},{middle + 5}"/>'


# Lines of the table of a plot's values.
_TABLE_LINES = 21
_DIGITS = 5


def plot_markup(name: str, plot: Plot) -> str:
    """Return the markup of a plot, which the page's script draws; `name` is its unique element id."""
    legend = "".join(_entry(number, one) for number, one in enumerate(plot.series))
    return (
        f'<figure class="plot" id="{name}"><figcaption><h3>{escape(plot.title)}</h3>'
        f"<p>{escape(plot.reading)}</p></figcaption>"
        f'<noscript><p class="noscript">The plot needs JavaScript; its values are below.</p></noscript>'
        f'<div class="controls" hidden>{_switch("x", plot.x)}{_switch("y", plot.y)}'
        '<button type="button" class="whole">Full range</button></div>'
        f'<div class="drawing" hidden tabindex="0" role="application" aria-label="{escape(plot.title)}: '
        'arrow keys move along the plot, plus and minus zoom, Escape shows the full range"></div>'
        f'<p class="reading-at" aria-live="polite" hidden></p><ul class="legend">{legend}</ul>'
        f"<details><summary>Values as a table</summary>{_values(plot)}</details>"
        f'<script type="application/json">{_as_script(plot)}</script></figure>'
    )


def _entry(number: int, series: Series) -> str:
    return (
        f'<li><label><input type="checkbox" checked disabled data-series="{number}">'
        f'<span class="swatch {series.style.value} {_colour(series)}"></span>'
        f"{escape(series.name)}</label> <output></output></li>"
    )


def _colour(series: Series) -> str:
    return "colour-base" if series.style is LineStyle.BASELINE else f"colour-{series.colour % 8}"


def _switch(axis_name: str, axis: PlotAxis) -> str:
    if axis.logarithmic is None:
        return ""
    checked = " checked" if axis.logarithmic else ""
    return (
        f'<label><input type="checkbox" data-axis="{axis_name}"{checked}> '
        f"logarithmic {escape(axis.label)}</label>"
    )


def _as_script(plot: Plot) -> str:
    document = {
        "x": _axis(plot.x),
        "y": _axis(plot.y),
        "positions": [_rounded(place) for place in plot.positions],
        "series": [
            {
                "name": one.name,
                "style": one.style.value,
                "colour": _colour(one),
                "values": [_rounded(value) for value in one.values],
            }
            for one in plot.series
        ],
        "marks": [{"at": _rounded(at), "name": name} for at, name in plot.marks],
    }
    # Names come from users, and `<` could end the script element or begin a comment in it.
    return json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _axis(axis: PlotAxis) -> dict[str, object]:
    return {
        "label": axis.label,
        "unit": axis.unit.value,
        "logarithmic": bool(axis.logarithmic),
        "base": axis.base,
    }


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


# -- values ------------------------------------------------------------------------------------------------


def _values(plot: Plot) -> str:
    head = "".join(f'<th scope="col" class=figure>{escape(name)}</th>' for name in _columns(plot))
    rows = "".join(_row(plot, place) for place in _chosen(len(plot.positions)))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _columns(plot: Plot) -> Sequence[str]:
    return plot.x.label, *(one.name for one in plot.series)


def _chosen(count: int) -> Sequence[int]:
    """Return evenly spread positions, including the first and the last."""
    if count <= _TABLE_LINES:
        return range(count)
    return sorted({round(line * (count - 1) / (_TABLE_LINES - 1)) for line in range(_TABLE_LINES)})


def _row(plot: Plot, place: int) -> str:
    cells = "".join(
        f"<td class=figure>{escape(written(one.values[place], plot.y.unit))}</td>" for one in plot.series
    )
    head = escape(written(plot.positions[place], plot.x.unit))
    return f'<tr><th scope="row" class=figure>{head}</th>{cells}</tr>'


def written(value: float | None, unit: Unit) -> str:
    """Format a value of an axis."""
    if value is None or not math.isfinite(value):
        return "-"
    if unit is Unit.SHARE:
        return f"{value:.2%}"
    if unit is Unit.SECONDS:
        return f"{1_000 * value:.3g} ms" if 0 < abs(value) < 1 else f"{value:,.4g} s"
    if unit is Unit.COUNT:
        return f"{value:,.0f}"
    if unit is Unit.DOLLARS:
        return f"${value:,.2f}"
    return f"{value:,.4g}"


_ASSETS = resources.files("serve_app.lab.reports") / "assets"
_PLOTTING_LIBRARY = "uPlot.js"
_OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]*")


def write_report(path: Path, report: ResultReport) -> None:
    """Write a report, creating its folder if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report_as_html(report), encoding="utf-8")


def report_as_html(report: ResultReport) -> str:
    """Return the complete page."""
    scripts = [_asset(_PLOTTING_LIBRARY), _asset("report.js")]
    parts = (
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(report.title)}</title>",
        f"<style>{_asset('uPlot.css')}\n{_asset('report.css')}</style>",
        "</head>",
        "<body>",
        "<main>",
        *_head(report),
        *(_section(number, one) for number, one in enumerate(report.sections)),
        *_provenance(report.origin),
        "</main>",
        *(f"<script>{script}</script>" for script in scripts),
        "</body>",
        "</html>",
    )
    return "\n".join(parts) + "\n"


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8").strip()


def _policy(scripts: Iterable[str]) -> str:
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; base-uri 'none'"


def _head(report: ResultReport) -> Iterable[str]:
    yield f"<header><h1>{escape(report.title)}</h1>"
    yield f'<p class="question">{escape(report.question)}</p></header>'
    yield '<section aria-labelledby="verdict" class="verdict"><h2 id="verdict">Verdict</h2>'
    yield from (f"<p>{_prose(sentence)}</p>" for sentence in report.verdict)
    if report.notes:
        yield '<ul class="notes">'
        yield from (f"<li>{_prose(note)}</li>" for note in report.notes)
        yield "</ul>"
    yield "</section>"
    yield '<section aria-labelledby="setup"><h2 id="setup">Setup</h2>'
    yield _pairs(report.facts)
    yield "</section>"


def _prose(text: str) -> str:
    """Format text so that command line options are not broken at their dashes."""
    # A percent sign is not separated from its figure either.
    return _OPTION.sub(r"<code>\g<0></code>", escape(text).replace(" %", "\u00a0%"))


def _command(line: str) -> str:
    """Format a command line so that it is broken between words only."""
    return " ".join(f"<span>{escape(word)}</span>" for word in line.split(" "))


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs)
    return f"<dl>{rows}</dl>"


def _section(number: int, section: ReportSection) -> str:
    name = f"section-{number}"
    intro = f"<p>{escape(section.intro)}</p>" if section.intro else ""
    blocks = []
    plots: list[str] = []
    for place, block in enumerate(section.blocks):
        if isinstance(block, Plot):
            if not block.is_empty:
                plots.append(plot_markup(f"{name}-plot-{place}", block))
            continue
        blocks.append(_block(block))
    if plots:
        blocks.append(f'<div class="plots">{"".join(plots)}</div>')
    content = "\n".join(blocks)
    return (
        f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(section.title)}</h2>'
        f"{intro}\n{content}</section>"
    )


def _block(block: ReportTable | DifferenceTable) -> str:
    return _table(block) if isinstance(block, ReportTable) else _differences(block)


# -- tables ------------------------------------------------------------------------------------------------


def _table(table: ReportTable) -> str:
    head = "".join(
        f'<th scope="col"{"" if place < table.text_columns else " class=figure"}>{escape(name)}</th>'
        for place, name in enumerate(table.head)
    )
    rows = "".join(
        f"<tr>{''.join(_cell(place, cell, table) for place, cell in enumerate(row))}</tr>"
        for row in table.rows
    )
    return _framed(table.caption, f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>")


def _framed(caption: str, content: str) -> str:
    # A wide table scrolls in a separate frame, which the keyboard can reach as well.
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption>{content}</table></div>"
    )


def _cell(place: int, cell: str | Cell, table: ReportTable) -> str:
    content = _shown(cell)
    if place == 0:
        return f'<th scope="row">{content}</th>'
    return f"<td>{content}</td>" if place < table.text_columns else f"<td class=figure>{content}</td>"


def _shown(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return escape(cell)
    if cell.value is None:
        return escape(cell.text)
    return f'<data value="{cell.value!r}">{escape(cell.text)}</data>'


def _differences(table: DifferenceTable) -> str:
    scale = IntervalScale.of(table.differences)
    names = (table.base, table.other, *DIFFERENCE_COLUMNS)
    head = "".join(f'<th scope="col" class=figure>{escape(name)}</th>' for name in names)
    picture = f'<th scope="col"></th><th scope="col">{scale.ruler()}</th>'
    rows = "".join(_difference(one, scale) for one in table.differences)
    return _framed(
        table.caption,
        f'<thead><tr><th scope="col"></th>{picture}{head}</tr></thead><tbody>{rows}</tbody>',
    )


def _difference(one: FigureDifference, scale: IntervalScale) -> str:
    kind = ", ".join(
        filter(None, (one.unit, "lower is better" if one.lower_is_better else "higher is better"))
    )
    return (
        f'<tr class="{one.judgement.name.lower()}">'
        f'<th scope="row">{escape(one.figure)} <small>{escape(kind)}</small></th>'
        f'<td class="judgement">{escape(one.judgement.value)}</td><td>{scale.picture(one)}</td>'
        f"{''.join(f'<td class=figure>{_shown(cell)}</td>' for cell in figures_of(one))}</tr>"
    )


# -- provenance --------------------------------------------------------------------------------------------


def _provenance(origin: Origin) -> Iterable[str]:
    yield '<section aria-labelledby="provenance"><h2 id="provenance">Provenance</h2>'
    yield f"<p>Command:</p><pre><code>{_command(origin.command_line)}</code></pre>"
    pairs = [(name.replace("_", " "), value) for name, value in origin.provenance.items()]
    short = [(name, _plain(value)) for name, value in pairs if not isinstance(value, Mapping)]
    yield _pairs(short)
    for name, value in pairs:
        if isinstance(value, Mapping):
            yield f"<details><summary>{escape(name)}</summary>"
            yield _pairs((str(key), _plain(each)) for key, each in value.items())
            yield "</details>"
    yield "</section>"


def _plain(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(each, int | float | str) for each in value):
        return ", ".join(map(str, value)) or "-"
    return json.dumps(value, default=str)
