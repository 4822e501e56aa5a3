"""The tables of this experiment: means over tokenizers, or their span."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.common.rows import ANY, Row, where
from experiments.common.tables import Table, markdown
from experiments.estimator.run import ALL, FIXED

_COLUMNS = {
    "signed": "signed, %",
    "median": "median, %",
    "p95": "p95, %",
    "under": "under, %",
    "refused_wrongly": "refused wrongly, %",
    "other_pool_uniform": "other pool: uniform, %",
    "overflow_uniform": "overflow: uniform, %",
    "other_pool_azure": "other pool: Azure, %",
    "overflow_azure": "overflow: Azure, %",
    "other_pool_lmsys": "other pool: LMSYS, %",
    "overflow_lmsys": "overflow: LMSYS, %",
}
_SETTINGS_COLUMNS = (
    "median",
    "p95",
    "under",
    *(name for name in _COLUMNS if "_azure" in name or "_lmsys" in name),
)
_HEADLINE = {"median": 1, "other_pool_lmsys": 1, "overflow_lmsys": 2}
_SOURCES = (
    "Texts: FastAPI's documentation in three languages, sonnets, HumanEval, GSM8K, MT-Bench, Python's "
    "standard library, and numbers and encoded bytes that are made"
)


def _headline(rows: Sequence[Row]) -> str:
    head = [
        "estimate",
        "median error, %",
        "to another pool than true lengths say, %",
        "overflow of the short pool, %",
    ]
    lines = [
        [_title(after), *(_span(where(rows, after=after), *column) for column in _HEADLINE.items())]
        for after in dict.fromkeys(str(row.key["after"]) for row in rows)
    ]
    return markdown(head, lines)


def _title(after: str) -> str:
    if after == FIXED:
        return "fixed 4.0 bytes per token"
    return "before the first observation" if after == "0" else f"learned, after {int(after):,} observations"


def _span(rows: Sequence[Row], column: str, decimals: int) -> str:
    """From the tokenizer with the least to the one with the most, each a mean over orders."""
    means = [100 * fmean(row.figures[ALL][column]) for row in rows]
    low, high = f"{min(means):.{decimals}f}", f"{max(means):.{decimals}f}"
    return low if low == high else f"{low} to {high}"


def _learning(rows: Sequence[Row]) -> str:
    lines = [
        [after, category, *_means(mine, _of_category(category))]
        for after in dict.fromkeys(str(row.key["after"]) for row in rows)
        for mine in [where(rows, after=after)]
        for category in mine[0].figures
    ]
    return markdown(["after", "category", *_COLUMNS.values()], lines, text_columns=2)


def _of_category(category: str) -> Callable[[Row], Mapping[str, Any]]:
    return lambda row: row.figures.get(category, {})


def _bodies(rows: Sequence[Row]) -> str:
    names = dict.fromkeys(name for row in rows for name in row.figures)
    lines = [[name, *_means(rows, _of_category(name))] for name in names]
    return markdown(["bodies", *_COLUMNS.values()], lines)


def _settings(rows: Sequence[Row]) -> str:
    head = ["settings", "judged", *(_COLUMNS[name] for name in _SETTINGS_COLUMNS)]
    lines = [
        [name, when, *_means(where(rows, variant=name), _of_category(when), _SETTINGS_COLUMNS)]
        for when in ("learned", "drift")
        for name in dict.fromkeys(str(row.key["variant"]) for row in rows)
    ]
    return markdown(head, lines, text_columns=2)


def _means(
    rows: Sequence[Row],
    part: Callable[[Row], Mapping[str, Any]],
    columns: Sequence[str] = tuple(_COLUMNS),
) -> list[str]:
    """Over tokenizers and orders, each tokenizer counting alike."""
    found = [one for one in map(part, rows) if one]
    return [f"{100 * fmean(_mean(one[name]) for one in found):.2f}" for name in columns]


def _mean(value: float | Sequence[float]) -> float:
    return value if isinstance(value, float | int) else fmean(value)


def _costs(rows: Sequence[Row]) -> str:
    lines = [[call, f"{cost:,.1f}"] for row in rows for call, cost in row.figures.items()]
    return markdown(["call", "µs"], lines)


TABLES = {
    "headline": Table(
        text=_headline,
        where={"after": ANY},
        note=f"From one tokenizer to another; bodies weighted to the total tokens of LMSYS. {_SOURCES}",
    ),
    "learning": Table(text=_learning, where={"after": ANY}, note=f"Means over tokenizers. {_SOURCES}"),
    "bodies": Table(
        text=_bodies,
        where={"bodies_after": ANY},
        note=f"Means over tokenizers, after 200 observations of each category and 50 images. {_SOURCES}",
    ),
    "settings": Table(
        text=_settings,
        where={"variant": ANY},
        note="Means over tokenizers: after 50 observations of each category, and after a drift to other "
        f"sources. {_SOURCES}",
    ),
    "costs": Table(text=_costs, where={"cost": ANY}, note="The best of five rounds, on one core"),
}
