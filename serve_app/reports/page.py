"""A report as one HTML file: styles, scripts and values are in it, and nothing is fetched from elsewhere.

Tables, verdict and pictures of intervals need no script. The browser is told to load nothing and to run only
the two scripts that stand in the file, by their hashes.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from pathlib import Path

from serve_app.reports.differences import FigureDifference
from serve_app.reports.document import (
    Cell,
    DifferenceTable,
    Listing,
    Origin,
    Plot,
    ReportSection,
    ReportTable,
    ResultReport,
)
from serve_app.reports.interval_pictures import IntervalScale
from serve_app.reports.plot_markup import plot_markup

_ASSETS = resources.files("serve_app.reports") / "assets"
_PLOTTING_LIBRARY = "uPlot.js"
_OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]*")


def write_report(path: Path, report: ResultReport) -> None:
    """Write a report; its folder is made when it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report_as_html(report), encoding="utf-8")


def report_as_html(report: ResultReport) -> str:
    """The whole page."""
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
    yield '<section aria-labelledby="asked"><h2 id="asked">What was asked</h2>'
    yield _pairs(report.facts)
    yield "</section>"


def _prose(text: str) -> str:
    """Text in which options of the command line are not broken at their dashes."""
    # Neither is a percent sign torn from its figure.
    return _OPTION.sub(r"<code>\g<0></code>", escape(text).replace(" %", "\u00a0%"))


def _command(line: str) -> str:
    """A command line that is broken between its words only."""
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


def _block(block: ReportTable | DifferenceTable | Listing) -> str:
    if isinstance(block, Listing):
        return f"<p>{escape(block.caption)}</p><pre><code>{escape(block.text)}</code></pre>"
    return _table(block) if isinstance(block, ReportTable) else _differences(block)


# Tables


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
    # A wide table scrolls in its own frame, which the keyboard can reach as well.
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
    names = (table.base, table.other, "difference", "95 % interval", "change")
    head = "".join(f'<th scope="col" class=figure>{escape(name)}</th>' for name in names)
    picture = f'<th scope="col"></th><th scope="col">{scale.ruler()}</th>'
    rows = "".join(_difference(one, scale) for one in table.differences)
    return _framed(
        table.caption,
        f'<thead><tr><th scope="col"></th>{picture}{head}</tr></thead><tbody>{rows}</tbody>',
    )


def _difference(one: FigureDifference, scale: IntervalScale) -> str:
    interval = "-"
    if one.low is not None and one.high is not None:
        interval = f"{one.written(one.low, signed=True)} to {one.written(one.high, signed=True)}"
    figures = (
        Cell(one.written(one.base), one.base),
        Cell(one.written(one.other), one.other),
        Cell(one.written(one.difference, signed=True), one.difference),
        interval,
        "-" if one.change is None else f"{one.change:+.1%}",
    )
    kind = ", ".join(filter(None, (one.unit, "less is better" if one.lower_is_better else "more is better")))
    return (
        f'<tr class="{one.judgement.name.lower()}">'
        f'<th scope="row">{escape(one.figure)} <small>{escape(kind)}</small></th>'
        f'<td class="judgement">{escape(one.judgement.value)}</td><td>{scale.picture(one)}</td>'
        f"{''.join(f'<td class=figure>{_shown(cell)}</td>' for cell in figures)}</tr>"
    )


# Provenance


def _provenance(origin: Origin) -> Iterable[str]:
    yield '<section aria-labelledby="provenance"><h2 id="provenance">Where this comes from</h2>'
    yield f"<p>Made by:</p><pre><code>{_command(origin.command_line)}</code></pre>"
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
