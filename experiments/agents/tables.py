"""Tables of this experiment."""

from collections.abc import Sequence
from dataclasses import replace

from experiments.common.rows import Row
from experiments.common.tables import Column, Computed, Table, line_per_row, markdown

_OURS, _TODAY = "programs", "prefix affinity"


_PREFILL = Column("prefill / ideal", "prefill_over_ideal")
_JCT_MEAN, _JCT_P99 = Column("JCT mean, s", "jct_mean_s", 0), Column("p99, s", "jct_p99_s", 0)
_FIGURES = (
    _PREFILL,
    Column("hit ratio", "hit_ratio", 3),
    _JCT_MEAN,
    Column("p50, s", "jct_p50_s", 0),
    _JCT_P99,
    Column("TTFT p50, s", "ttft_p50_s"),
    Column("p99, s", "ttft_p99_s", 0),
    Column("longest wait, s", "max_wait_s", 0),
)
_BESIDE = (
    Column("interactive TTFT p50, s", "others_ttft_p50_s", 3),
    Column("p99, s", "others_ttft_p99_s", 3),
    _JCT_MEAN,
    _JCT_P99,
)
_COST = Computed(
    "arrival, first token and end of a turn, µs", lambda row: f"{row.figures['us_per_turn']:.0f}"
)


def _headline(rows: Sequence[Row]) -> str:
    """Compare the scheduling of programs with that of requests, case by case."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(str(row.key["case"]), {})[str(row.key["policy"])] = row
    columns = (replace(_PREFILL, decimals=1), _JCT_MEAN, replace(_JCT_P99, heading="JCT p99, s"))
    lines = [
        [case, *(f"{column.mean(of[_TODAY])} to {column.mean(of[_OURS])}" for column in columns)]
        for case, of in cases.items()
        if {_TODAY, _OURS} <= set(of)
    ]
    return markdown(["case", *(column.heading for column in columns)], lines)


_NOTE = "Means over seeds with their 95 % intervals"
_CASES = (
    "70B, 400k",
    "70B, 800k",
    "70B, 1.6M",
    "8B, 400k",
    "8B, 1.6M",
    "8B, 400k, long gaps",
    "70B, 400k, 4 replicas",
    "70B, 400k, 16 replicas",
)
_BY_CASE = line_per_row({"case": "{case}", "policy": "{policy}"}, _FIGURES)

TABLES = {
    "headline": Table(
        text=_headline,
        where={"case": _CASES, "policy": (_TODAY, _OURS)},
        note="From the scheduling of requests to that of programs; means over seeds",
    ),
    "cases": Table(text=_BY_CASE, where={"case": _CASES}, note=_NOTE),
    "parts": Table(text=line_per_row({"policy": "{policy}"}, _FIGURES), where={"case": "parts"}, note=_NOTE),
    "exact": Table(text=_BY_CASE, where={"case": ("exact, 400k", "exact, 800k")}, note=_NOTE),
    "beside": Table(text=line_per_row({"policy": "{policy}"}, _BESIDE), where={"case": "beside"}, note=_NOTE),
    "decisions": Table(
        text=line_per_row({"programs": "{programs:,}"}, [_COST], text_columns=0),
        where={"cost": "decisions"},
        note="The best of three rounds",
    ),
}
