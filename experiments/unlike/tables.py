"""Tables of this experiment."""

from collections.abc import Sequence
from statistics import fmean

from experiments.common.rows import Row, where
from experiments.common.tables import Column, Table, line_per_row, markdown

_LEARNED, _KNOWN = "learned speeds", "known speeds"
_FIGURES = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s")


_HEADLINE = (
    Column("TTFT mean, s", "ttft_mean_s", 3),
    Column("P99, s", "ttft_p99_s", 3),
    Column("end-to-end mean, s", "e2e_mean_s", 3),
    Column("on slow replicas, %", "slow_ratio", 0, 100),
)


def _ratios(rows: Sequence[Row]) -> str:
    head = ["requests", "metrics", "load", "TTFT mean", "P99", "end-to-end mean"]
    lines = []
    for row in where(rows, variant=_LEARNED):
        (known,) = where(rows, **{**row.key, "variant": _KNOWN})
        ratios = (fmean(row.figures[name]) / fmean(known.figures[name]) for name in _FIGURES)
        metrics = "yes" if row.key["metrics"] else "no"
        lines.append(
            [str(row.key["workload"]), metrics, str(row.key["load"]), *(f"{each:.2f}" for each in ratios)]
        )
    return markdown(head, lines, text_columns=3)


_NOTE = "Means over seeds with their 95 % intervals; TTFT counts from arrival"
_BY_LOAD = line_per_row({"load": "{load}", "choice": "{variant}"}, _HEADLINE)

TABLES = {
    "ratios": Table(text=_ratios, note="Learned relative to known speeds, means over seeds"),
    **{
        f"{name}{suffix}": Table(text=_BY_LOAD, where={"workload": workload, "metrics": metrics}, note=_NOTE)
        for name, workload in (("paper", "paper-mix"), ("code", "code generation"))
        for suffix, metrics in (("", True), ("-blind", False))
    },
}
