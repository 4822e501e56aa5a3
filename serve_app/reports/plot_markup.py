"""The markup of a plot: a place for the drawing, its legend with switches, and its values as a table."""

import json
import math
from collections.abc import Sequence
from html import escape

from serve_app.reports.document import Look, Plot, PlotAxis, Series, Unit

# Lines of the table of a plot's values.
_TABLE_LINES = 21
_DIGITS = 5


def plot_markup(name: str, plot: Plot) -> str:
    """A plot, drawn by the script of the page.

    Args:
        name: of the element, unique in the page.
    """
    legend = "".join(_entry(number, one) for number, one in enumerate(plot.series))
    return (
        f'<figure class="plot" id="{name}"><figcaption><h3>{escape(plot.title)}</h3>'
        f"<p>{escape(plot.reading)}</p></figcaption>"
        f'<noscript><p class="noscript">The drawing needs a script; its values are below.</p></noscript>'
        f'<div class="controls" hidden>{_switch("x", plot.x)}{_switch("y", plot.y)}'
        '<button type="button" class="whole">Whole range</button></div>'
        f'<div class="drawing" hidden tabindex="0" role="application" aria-label="{escape(plot.title)}: '
        'arrow keys move along the plot, plus and minus zoom, Escape shows the whole range"></div>'
        f'<p class="reading-at" aria-live="polite" hidden></p><ul class="legend">{legend}</ul>'
        f"<details><summary>Values as a table</summary>{_values(plot)}</details>"
        f'<script type="application/json">{_as_script(plot)}</script></figure>'
    )


def _entry(number: int, series: Series) -> str:
    return (
        f'<li><label><input type="checkbox" checked disabled data-series="{number}">'
        f'<span class="swatch {series.look.value} {_colour(series)}"></span>'
        f"{escape(series.name)}</label> <output></output></li>"
    )


def _colour(series: Series) -> str:
    return "colour-base" if series.look is Look.BASELINE else f"colour-{series.colour % 8}"


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
        "places": [_rounded(place) for place in plot.places],
        "series": [
            {
                "name": one.name,
                "look": one.look.value,
                "colour": _colour(one),
                "values": [_rounded(value) for value in one.values],
            }
            for one in plot.series
        ],
        "marks": [{"at": _rounded(at), "name": name} for at, name in plot.marks],
    }
    # Names come from users; `<` ends a script or begins a comment in one.
    return json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _axis(axis: PlotAxis) -> dict[str, object]:
    return {
        "label": axis.label,
        "unit": axis.unit.value,
        "logarithmic": bool(axis.logarithmic),
        "base": axis.base,
        "fromZero": axis.from_zero,
    }


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


# Values


def _values(plot: Plot) -> str:
    head = "".join(f'<th scope="col" class=figure>{escape(name)}</th>' for name in _columns(plot))
    rows = "".join(_row(plot, place) for place in _chosen(len(plot.places)))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _columns(plot: Plot) -> Sequence[str]:
    return plot.x.label, *(one.name for one in plot.series)


def _chosen(count: int) -> Sequence[int]:
    """Places spread evenly, the first and the last among them."""
    if count <= _TABLE_LINES:
        return range(count)
    return sorted({round(line * (count - 1) / (_TABLE_LINES - 1)) for line in range(_TABLE_LINES)})


def _row(plot: Plot, place: int) -> str:
    cells = "".join(
        f"<td class=figure>{escape(written(one.values[place], plot.y.unit))}</td>" for one in plot.series
    )
    head = escape(written(plot.places[place], plot.x.unit))
    return f'<tr><th scope="row" class=figure>{head}</th>{cells}</tr>'


def written(value: float | None, unit: Unit) -> str:
    """A value of an axis as text."""
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
