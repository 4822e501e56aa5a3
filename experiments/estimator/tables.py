"""Tables of this experiment: means over tokenizers, or their span."""

from collections.abc import Sequence
from statistics import fmean

from experiments.common.rows import ANY, Row, where
from experiments.common.tables import Table, markdown
from experiments.estimator.run import BY_LANGUAGE, FIXED, OURS, PUBLISHED

_NAMES = {OURS: "byte classes", PUBLISHED: "published", FIXED: "fixed 4.0 bytes per token"}
_COLUMNS = {
    "median": ("median error, %", 1),
    "under": ("under, %", 1),
    "other_pool_lmsys": ("other pool: LMSYS, %", 2),
    "overflow_lmsys": ("overflow: LMSYS, %", 3),
    "other_pool_azure": ("other pool: Azure, %", 2),
    "overflow_azure": ("overflow: Azure, %", 3),
}
_HEADLINE = ("median", "other_pool_lmsys", "overflow_lmsys")
_SOURCES = (
    "Known texts: FastAPI's documentation in three languages, sonnets, HumanEval, GSM8K, MT-Bench, Python's "
    "standard library, and generated numbers and encoded bytes. Fresh ones: Django in 28 languages, and code"
)


def _headline(rows: Sequence[Row]) -> str:
    head = ["estimate, on fresh texts", *(_COLUMNS[name][0] for name in _HEADLINE)]
    rows = where(rows, texts="fresh")
    kinds = dict.fromkeys((str(row.key["estimate"]), str(row.key["after"])) for row in rows)
    lines = [
        [
            _title(name, after),
            *(_span(where(rows, estimate=name, after=after), one, _COLUMNS[one][1]) for one in _HEADLINE),
        ]
        for name, after in kinds
    ]
    return markdown(head, lines)


def _title(name: str, after: str) -> str:
    if name == FIXED:
        return _NAMES[name]
    when = "before any observation" if after == "0" else f"after {int(after):,} observations"
    return f"{_NAMES[name]}, {when}"


def _span(rows: Sequence[Row], column: str, decimals: int) -> str:
    """Return the lowest and the highest mean of a tokenizer over orders."""
    means = [100 * fmean(row.figures[column]) for row in rows]
    low, high = f"{min(means):.{decimals}f}", f"{max(means):.{decimals}f}"
    return low if low == high else f"{low} to {high}"


def _mean(rows: Sequence[Row], column: str) -> float:
    """Return the mean over tokenizers and orders, in percent; each tokenizer counts equally."""
    return 100 * fmean(fmean(row.figures[column]) for row in rows)


def _margins(rows: Sequence[Row]) -> str:
    head = ["texts", "margin_deviations", *(title for title, _ in _COLUMNS.values())]
    lines = [
        [
            texts,
            margin,
            *(
                f"{_mean(where(rows, texts=texts, margin=margin), name):.{decimals}f}"
                for name, (_, decimals) in _COLUMNS.items()
            ),
        ]
        for texts in dict.fromkeys(str(row.key["texts"]) for row in rows)
        for margin in dict.fromkeys(str(row.key["margin"]) for row in rows)
    ]
    return markdown(head, lines)


def _languages(rows: Sequence[Row]) -> str:
    head = [
        "language",
        "error, %",
        "published",
        "other pool: LMSYS, %",
        "published",
        "overflow, %",
        "published",
    ]
    prefix = f"{BY_LANGUAGE[0]} of "
    languages = [name.removeprefix(prefix) for name in rows[0].figures if name.startswith(prefix)]
    lines = []
    for language in sorted(languages):
        cells = [
            f"{_mean(where(rows, estimate=name), f'{column} of {language}'):.{decimals}f}"
            for column, decimals in zip(BY_LANGUAGE, (1, 2, 3), strict=True)
            for name in (OURS, PUBLISHED)
        ]
        lines.append(["two texts" if language == "two" else language, *cells])
    return markdown(head, lines)


TABLES = {
    "headline": Table(
        text=_headline,
        where={"after": ANY},
        note=f"Range over tokenizers; bodies weighted to the total tokens of LMSYS. {_SOURCES}",
    ),
    "margins": Table(
        text=_margins,
        where={"margin": ANY},
        note=f"Means over tokenizers, after 200 observations of each category. {_SOURCES}",
    ),
    "languages": Table(
        text=_languages,
        where={"languages": ANY},
        note=f"Means over tokenizers, after 200 observations of each category. {_SOURCES}",
    ),
}
