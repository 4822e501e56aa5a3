"""Page of a report: the sections of its document, as text for a terminal and as one HTML file."""

import html
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from serve_app.core.accounting.wait_causes import WaitCause
from serve_app.core.metrics.summary import t_95
from serve_app.lab.tables import number_text, paragraph, table_text

Document = Mapping[str, Any]

# Name, decimals and factor of each compared figure.
_FIGURES = {
    "ttft_mean_s": ("TTFT mean s", 3, 1),
    "ttft_p95_s": ("TTFT P95 s", 3, 1),
    "ttft_p99_s": ("TTFT P99 s", 3, 1),
    "tpot_mean_s": ("ms per token", 1, 1_000),
    "not_completed_ratio": ("not completed %", 1, 100),
}
_PARTS = {
    "queue": "in the queue of the scheduler",
    "behind_long_prefills": "in the engine, behind prefills of long prompts",
    "other_engine_time": "in the engine, behind other requests, and in the network",
    "own_prefill": "its own prefill",
}
_CAUSES = {cause.value: cause.meaning for cause in WaitCause}
_SIDES = ("unscheduled", "scheduled")
# Figures that decide a verdict, and the minimum number of parts of a window that have each.
_JUDGED, _MIN_BLOCKS = ("ttft_mean_s", "not_completed_ratio"), 5
_VERDICT_NOTE = "A change counts if its 95 % interval, from the spread over parts of the windows, excludes 0."
# Smaller changes are not named as the price.
_NOTABLE_RATIO = 0.05


class Section(NamedTuple):
    """A title, sentences, and a table, whose first columns have text."""

    title: str
    sentences: Sequence[str]
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    text_columns: int = 1


def as_text(document: Document) -> str:
    """Return the report for standard output."""
    parts = []
    for title, sentences, head, rows, text_columns in sections(document):
        parts += [title, *map(paragraph, sentences)]
        if rows:
            parts.append(table_text(head, rows, text_columns=text_columns, key_columns=text_columns))
        parts.append("")
    return "\n".join(parts[:-1])


_STYLE = """
:root{color-scheme:light dark;--line:#d0d7de;--back:#fff;--text:#1f2328;--head:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--line:#3d444d;--back:#0d1117;--text:#f0f6fc;--head:#151b23}}
body{max-width:60rem;margin:2rem auto;padding:0 1rem;background:var(--back);color:var(--text);
font:15px/1.5 system-ui,sans-serif}h2{font-size:1.1rem;margin:2rem 0 .5rem}p{margin:.4rem 0}
h2:first-of-type{font-size:1.4rem}div{overflow-x:auto}table{border-collapse:collapse}
th,td{padding:.3rem .7rem;border-bottom:1px solid var(--line);text-align:right}
th{background:var(--head)}.t{text-align:left}
"""


def as_html(document: Document) -> str:
    """Return the report as one page without external files."""
    body = ""
    for title, sentences, head, rows, text_columns in sections(document):
        body += f"<h2>{html.escape(title)}</h2>" + "".join(
            f"<p>{html.escape(each)}</p>" for each in sentences
        )
        if rows:
            lines = [
                _row_html("th", head, text_columns),
                *(_row_html("td", row, text_columns) for row in rows),
            ]
            body += f"<div><table>{''.join(lines)}</table></div>"
    head_of_page = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    title = html.escape(f"Report on {document['model']}")
    return (
        f'<!doctype html><html lang="en">{head_of_page}<title>{title}</title><style>{_STYLE}</style>{body}\n'
    )


def _row_html(tag: str, cells: Sequence[str], text_columns: int) -> str:
    marks = [" class=t" if place < text_columns else "" for place in range(len(cells))]
    return (
        f"<tr>{''.join(f'<{tag}{mark}>{html.escape(cell)}' for mark, cell in zip(marks, cells, strict=True))}"
    )


def _clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC).astimezone():%Y-%m-%d %H:%M:%S}"


def sections(document: Document) -> Iterator[Section]:
    """Yield the sections of a report."""
    seen, forecast, earlier = document["observed"], document["forecast"], document["earlier"]
    title = f"Traffic of {document['model']}, {_clock(seen['from'])} to {_clock(seen['until'])}"
    yield Section(title, list(_summary(document)))
    head = ("requests", "number", "tokens", *(heading for heading, _, _ in _FIGURES.values()))
    rows = [
        (group, f"{of['requests']:,}", f"{of['tokens']:,}", *(_figure(name, of[name]) for name in _FIGURES))
        for group, of in seen["groups"].items()
    ]
    yield Section("Measured", list(_lengths(seen)), head, rows)
    note = (
        "The queue is measured. The division of the time in the engines is an estimate, from recorded times "
        "and the fitted duration of each prefill."
    )
    waits = {_PARTS[name]: seconds for name, seconds in document["short_waits"].items()}
    yield _shares("Time to first token of a short prompt", note, waits)
    if causes := seen["short_queue_causes_s"]:
        named = {_CAUSES.get(name, name): seconds for name, seconds in causes.items()}
        yield _shares("Queue time of all short prompts", "By cause, as in `explain`.", named)
    if forecast is not None:
        yield from _forecast(forecast)
    if earlier is not None:
        yield _comparison(earlier, seen)
        verdicts = (_verdict(length, earlier["observed"], seen) for length in ("short", "long"))
        yield Section("Verdict", [_VERDICT_NOTE, *verdicts])


def _summary(document: Document) -> Iterator[str]:
    seen, waits, forecast = document["observed"], document["short_waits"], document["forecast"]
    outcomes = ", ".join(f"{count:,} {name}" for name, count in seen["outcomes"].items())
    yield (
        f"{seen['requests']:,} requests ({seen['requests_per_s']:.2f}/s): {outcomes}. "
        f"{document['active_share']:.0%} are scheduled, policy {document['policy']}. "
        f"Short prompts have at most {document['short_at_tokens']:,} tokens."
    )
    if "priority batch" in seen["groups"]:
        yield "Batch requests are not counted among short or long prompts."
    if total := sum(waits.values()):
        behind = waits["behind_long_prefills"] / total
        yield f"A short prompt spends {behind:.0%} of its {total:.2f} s to first token behind long prefills."
    if forecast is not None and forecast["changes"] is None:
        yield f"There is no prediction of what scheduling changes: {forecast['reason']}."
    elif forecast is not None:
        for group in ("short", "long"):
            if of := forecast["changes"].get(group, {}).get("ttft_mean_s"):
                before, after = (of[side]["mean"] for side in _SIDES)
                yield f"Predicted mean TTFT of {group} prompts: {before:.2f} s, scheduled {after:.2f} s."
        worse = [
            f"{group} {_FIGURES[name][0]} {_change(name, each['change'])}"
            for group, of in forecast["changes"].items()
            for name, each in of.items()
            if each["change"]["mean"] > _NOTABLE_RATIO
        ]
        yield f"Predicted price: {', '.join(worse) or f'no figure gets worse by over {_NOTABLE_RATIO:.0%}'}."
        unknown = [
            f"{group} {_FIGURES[name][0]}"
            for group in ("short", "long")
            for name in _FIGURES
            if name not in forecast["changes"].get(group, ())
        ]
        if unknown:
            yield f"Too few requests to predict: {', '.join(unknown)}."


def _lengths(seen: Document) -> Iterator[str]:
    for name in ("prompt", "output"):
        lengths = seen[f"{name}_tokens"].items()
        yield f"Tokens per {name}: {', '.join(f'{key} {number_text(value)}' for key, value in lengths)}."
    yield f"The engines reported {seen['cached_ratio']:.0%} of the prompt tokens as cached."


def _shares(title: str, note: str, seconds: Mapping[str, float]) -> Section:
    total = sum(seconds.values()) or 1.0
    rows = [(name, f"{each:,.3f}", f"{each / total:.0%}") for name, each in seconds.items()]
    return Section(title, (note,), ("part", "s", "share"), rows)


def _forecast(forecast: Document) -> Iterator[Section]:
    note = (
        "The recorded requests, replayed on simulated engines as they were served: unscheduled. The step "
        "times of the engines are fitted to the recording. A percentile needs ten requests beyond it."
    )
    rows = _rows(
        forecast["error"],
        lambda name, of: (
            *(_figure(name, of[side]) for side in ("measured", "twin")),
            f"{of['error_ratio']:+.0%}",
        ),
    )
    yield Section("Error of the twin", (note,), ("prompts", "figure", "measured", "twin", "error"), rows, 2)
    if forecast["changes"] is not None:
        note = (
            "Means over windows drawn from the recording, each played in the twin in both ways, and the "
            "interval for 95 % of further windows. It does not contain the error of the twin."
        )
        rows = _rows(
            forecast["changes"],
            lambda name, of: (
                *(_figure(name, of[side]["mean"]) for side in _SIDES),
                _change(name, of["change"]),
            ),
        )
        head = ("requests", "figure", *_SIDES, "change (95 %)")
        yield Section("Predicted effect of scheduling", (note,), head, rows, 2)


def _comparison(earlier: Document, seen: Document) -> Section:
    predicted, before = (earlier["forecast"] or {}).get("changes") or {}, earlier["observed"]
    known = {
        group: {name: (before["groups"][group], predicted.get(group, {}).get(name), of) for name in _FIGURES}
        for group, of in seen["groups"].items()
        if group in before["groups"]
    }
    rows = _rows(
        known,
        lambda name, of: (_figure(name, of[0][name]), _expected(name, of[1]), _figure(name, of[2][name])),
    )
    loads = f"{_load(before)}, this one {_load(seen)}"
    sentences = [f"The report of {_clock(earlier['created'])} has {loads}. Other traffic has other figures."]
    if reason := (earlier["forecast"] or {}).get("reason"):
        sentences.append(f"The earlier report has no prediction: {reason}.")
    head = ("requests", "figure", "measured before", "predicted (95 %)", "measured now")
    return Section("Prediction and measurement", sentences, head, rows, 2)


def _verdict(length: str, before: Document, seen: Document) -> str:
    """Return whether prompts of a length are better off, in one sentence."""
    prompts, parts, bounds = f"{length.capitalize()} prompts", [], list[tuple[float, float]]()
    for name in _JUDGED:
        label, decimals, scale = _FIGURES[name]
        blocks = [of.get("blocks", {}).get(length, ()) for of in (before, seen)]
        sides = [[scale * each[name] for each in side if each[name] is not None] for side in blocks]
        if min(map(len, sides)) < _MIN_BLOCKS:
            return f"{prompts}: not clear, because a report has too few of them or is of an older release."
        errors = (t_95(len(each) - 1) * statistics.stdev(each) / math.sqrt(len(each)) for each in sides)
        change, half = statistics.fmean(sides[1]) - statistics.fmean(sides[0]), math.hypot(*errors)
        bounds.append((change - half, change + half))
        low, high = (f"{bound:+,.{decimals}f}" for bound in bounds[-1])
        parts.append(f"of {change:+,.{decimals}f} ({low} to {high}) in {label}")
    verdict = "better" if any(high < 0 for _, high in bounds) else "not clear"
    if any(low > 0 for low, _ in bounds):
        verdict = "worse"
    return f"{prompts}: {verdict}, with a change {' and '.join(parts)}."


def _load(seen: Document) -> str:
    """Return the rates of requests and of tokens: prompts may be longer at the same request rate."""
    # Reports of older releases counted batch work among short and long prompts.
    tokens = seen.get("tokens") or sum(seen["groups"][length]["tokens"] for length in ("short", "long"))
    seconds = max(1.0, seen["until"] - seen["from"])
    return f"{seen['requests_per_s']:.2f} requests/s and {tokens / seconds:,.0f} tokens/s"


def _rows(groups: Document, cells: Callable[[str, Any], Sequence[str]]) -> list[Sequence[str]]:
    return [
        (group, _FIGURES[name][0], *cells(name, each))
        for group, of in groups.items()
        for name, each in of.items()
    ]


def _figure(name: str, value: float | None) -> str:
    _, decimals, scale = _FIGURES[name]
    return number_text(value, decimals, scale)


def _expected(name: str, of: Document | None) -> str:
    if of is None:
        return "-"
    mean, low, high = (_figure(name, max(0.0, of["scheduled"][bound])) for bound in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def _change(name: str, of: Document) -> str:
    mean, low, high = (f"{100 * of[bound]:+.0f}" for bound in ("mean", "low", "high"))
    return f"{mean}{' points' if name.endswith('_ratio') else '%'} ({low} to {high})"
