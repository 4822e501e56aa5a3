"""The tables of this experiment."""

import math
from collections.abc import Sequence

from experiments.adaptive_b_short.settings import ADAPTIVE
from experiments.common.rows import Row, where
from experiments.common.tables import Table, difference, markdown, plus_minus

_H100, _RTX4090 = "70B on H100", "8B on RTX 4090"
_TITLES = {
    "flip": "documents go from 5 % to 50 %",
    "other flip": "another mix flips",
    "drift": "the mix drifts one way",
}
_NOTE = "Share of requests with TTFT up to 2 s and TPOT up to 100 ms, %: means with 95 % intervals"


def _headline(rows: Sequence[Row]) -> str:
    scenarios = [name for name in _TITLES if where(rows, scenario=name)]
    lines = [
        [b_short, *(_attainment(where(rows, scenario=name, b_short=b_short)[0]) for name in scenarios)]
        for b_short in dict.fromkeys(str(row.key["b_short"]) for row in sorted(rows, key=_tokens))
    ]
    return markdown(["`B_short`", *(_TITLES[name] for name in scenarios)], lines)


def _attainment(row: Row) -> str:
    return plus_minus(row.figures["attainment"], 1, scale=100)


def _all(rows: Sequence[Row]) -> str:
    head = [
        *("scenario", "gated", "`B_short`", "within limits, %", "adaptive, + points", "TTFT p99, s"),
        *("short, s", "long, s", "TPOT p99, ms", "spilled, %", "moves", "last"),
    ]
    places = list(dict.fromkeys(map(_place, rows)))
    in_order = sorted(rows, key=lambda row: (places.index(_place(row)), _tokens(row)))
    return markdown(head, [_line(row, rows) for row in in_order], text_columns=3)


def _place(row: Row) -> tuple[object, object]:
    return row.key["gated"], row.key["scenario"]


def _tokens(row: Row) -> float:
    """Of a fixed `B_short`; the adaptive one comes last."""
    b_short = str(row.key["b_short"])
    return math.inf if b_short == ADAPTIVE else int(b_short.replace(",", ""))


def _line(row: Row, rows: Sequence[Row]) -> list[str]:
    figures = row.figures
    return [
        str(row.key["scenario"]),
        "yes" if row.key["gated"] else "no",
        str(row.key["b_short"]),
        _attainment(row),
        _gain(row, rows),
        *(plus_minus(figures[f"{of}ttft_p99_s"], 2) for of in ("", "short_", "long_")),
        plus_minus(figures["tpot_p99_s"], 0, scale=1_000),
        plus_minus(figures["spilled"], 1, scale=100),
        plus_minus(figures["moves"], 1),
        plus_minus(figures["last_b_short_tokens"], 0),
    ]


def _gain(fixed: Row, rows: Sequence[Row]) -> str:
    """By how many percentage points the adaptive one attains more, seed by seed."""
    if fixed.key["b_short"] == ADAPTIVE:
        return ""
    (adaptive,) = where(rows, scenario=fixed.key["scenario"], gated=fixed.key["gated"], b_short=ADAPTIVE)
    mine, theirs = (row.figures["attainment"] for row in (adaptive, fixed))
    return difference(mine, theirs, 1, scale=100)


TABLES = {
    "headline": Table(
        text=_headline, where={"fleet": _H100, "gated": False, "scenario": tuple(_TITLES)}, note=_NOTE
    ),
    "gated": Table(
        text=_headline, where={"fleet": _H100, "gated": True, "scenario": tuple(_TITLES)}, note=_NOTE
    ),
    "h100": Table(text=_all, where={"fleet": _H100}, note=_NOTE),
    "rtx4090": Table(text=_all, where={"fleet": _RTX4090}, note=_NOTE),
}
