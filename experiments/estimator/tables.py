"""Tables of this experiment: means over tokenizers, or their span."""

from collections.abc import Sequence
from statistics import fmean

from experiments.common.rows import ANY, Row, where
from experiments.common.tables import Table, markdown
from experiments.estimator.run import ALL, FIXED

_SETTINGS_COLUMNS = {
    "median": "median, %",
    "p95": "p95, %",
    "under": "under, %",
    "other_pool_azure": "other pool: Azure, %",
    "overflow_azure": "overflow: Azure, %",
    "other_pool_lmsys": "other pool: LMSYS, %",
    "overflow_lmsys": "overflow: LMSYS, %",
}
_HEADLINE = {"median": 1, "other_pool_lmsys": 1, "overflow_lmsys": 2}
_SOURCES = (
    "Texts: FastAPI's documentation in three languages, sonnets, HumanEval, GSM8K, MT-Bench, Python's "
    "standard library, and generated numbers and encoded bytes"
)


def _headline(rows: Sequence[Row]) -> str:
    head = [
        "estimate",
        "median error, %",
        "in another pool than by true length, %",
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
    """Return the lowest and the highest mean of a tokenizer over orders."""
    means = [100 * fmean(row.figures[ALL][column]) for row in rows]
    low, high = f"{min(means):.{decimals}f}", f"{max(means):.{decimals}f}"
    return low if low == high else f"{low} to {high}"


def _settings(rows: Sequence[Row]) -> str:
    head = ["settings", "judged", *_SETTINGS_COLUMNS.values()]
    lines = [
        [name, when, *_means(where(rows, variant=name), when)]
        for when in ("learned", "drift")
        for name in dict.fromkeys(str(row.key["variant"]) for row in rows)
    ]
    return markdown(head, lines, text_columns=2)


def _means(rows: Sequence[Row], when: str) -> list[str]:
    """Return means over tokenizers and orders; each tokenizer counts equally."""
    found = [row.figures[when] for row in rows]
    return [f"{100 * fmean(_mean(one[name]) for one in found):.2f}" for name in _SETTINGS_COLUMNS]


def _mean(value: float | Sequence[float]) -> float:
    return value if isinstance(value, float | int) else fmean(value)


TABLES = {
    "headline": Table(
        text=_headline,
        where={"after": ANY},
        note=f"Range over tokenizers; bodies weighted to the total tokens of LMSYS. {_SOURCES}",
    ),
    "settings": Table(
        text=_settings,
        where={"variant": ANY},
        note="Means over tokenizers: after 50 observations of each category, and after a drift to other "
        f"sources. {_SOURCES}",
    ),
}
