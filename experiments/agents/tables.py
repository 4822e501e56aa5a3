"""Tables of this experiment."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.common.rows import Row
from experiments.common.tables import Table, markdown, plus_minus

_OURS, _TODAY = "programs", "prefix affinity"


def _figures(figures: Mapping[str, Any]) -> list[str]:
    return [
        plus_minus(figures["prefill_over_ideal"], 2),
        plus_minus(figures["hit_ratio"], 3),
        plus_minus(figures["jct_mean_s"], 0),
        plus_minus(figures["jct_p50_s"], 0),
        plus_minus(figures["jct_p99_s"], 0),
        plus_minus(figures["ttft_p50_s"], 2),
        plus_minus(figures["ttft_p99_s"], 0),
        plus_minus(figures["max_wait_s"], 0),
    ]


_COLUMNS = (
    "prefill / ideal",
    "hit ratio",
    "JCT mean, s",
    "p50, s",
    "p99, s",
    "TTFT p50, s",
    "p99, s",
    "longest wait, s",
)


def _cases(rows: Sequence[Row]) -> str:
    lines = [[str(row.key["case"]), str(row.key["policy"]), *_figures(row.figures)] for row in rows]
    return markdown(["case", "policy", *_COLUMNS], lines, text_columns=2)


def _parts(rows: Sequence[Row]) -> str:
    lines = [[str(row.key["policy"]), *_figures(row.figures)] for row in rows]
    return markdown(["policy", *_COLUMNS], lines)


def _headline(rows: Sequence[Row]) -> str:
    """Compare the scheduling of programs with that of requests, case by case."""
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        cases.setdefault(str(row.key["case"]), {})[str(row.key["policy"])] = row.figures
    figures = (("prefill_over_ideal", 1), ("jct_mean_s", 0), ("jct_p99_s", 0))
    lines = [
        [
            case,
            *(
                " to ".join(plus_minus(of[policy][name], digits).split(" ±")[0] for policy in (_TODAY, _OURS))
                for name, digits in figures
            ),
        ]
        for case, of in cases.items()
        if {_TODAY, _OURS} <= set(of)
    ]
    return markdown(["case", "prefill / ideal", "JCT mean, s", "JCT p99, s"], lines)


def _beside(rows: Sequence[Row]) -> str:
    head = ["policy", "interactive TTFT p50, s", "p99, s", "JCT mean, s", "p99, s"]
    names = (("others_ttft_p50_s", 3), ("others_ttft_p99_s", 3), ("jct_mean_s", 0), ("jct_p99_s", 0))
    lines = [
        [str(row.key["policy"]), *(plus_minus(row.figures[name], digits) for name, digits in names)]
        for row in rows
    ]
    return markdown(head, lines)


def _decisions(rows: Sequence[Row]) -> str:
    lines = [[f"{row.key['programs']:,}", f"{row.figures['us_per_turn']:.0f}"] for row in rows]
    return markdown(["programs", "arrival, first token and end of a turn, µs"], lines, text_columns=0)


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

TABLES = {
    "headline": Table(
        text=_headline,
        where={"case": _CASES, "policy": (_TODAY, _OURS)},
        note="From the scheduling of requests to that of programs; means over seeds",
    ),
    "cases": Table(text=_cases, where={"case": _CASES}, note=_NOTE),
    "parts": Table(text=_parts, where={"case": "parts"}, note=_NOTE),
    "exact": Table(text=_cases, where={"case": ("exact, 400k", "exact, 800k")}, note=_NOTE),
    "beside": Table(text=_beside, where={"case": "beside"}, note=_NOTE),
    "decisions": Table(text=_decisions, where={"cost": "decisions"}, note="The best of three rounds"),
}
