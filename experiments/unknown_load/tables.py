"""The tables of this experiment."""

from collections.abc import Callable, Sequence
from statistics import fmean

from experiments.common.rows import ANY, Row
from experiments.common.tables import Table, markdown
from experiments.unknown_load.run import LIMITS, METRICS

_NAMES = (METRICS, *LIMITS)


def _goodput(rows: Sequence[Row]) -> str:
    return _compared(rows, lambda row: f"{fmean(row.figures['goodput_per_s']):.2f}")


def _ttft(rows: Sequence[Row]) -> str:
    return _compared(
        rows,
        lambda row: f"{fmean(row.figures['ttft_p50_s']):.2f} / {fmean(row.figures['ttft_p99_s']):.0f}",
    )


def _compared(rows: Sequence[Row], shown: Callable[[Row], str]) -> str:
    cases = list(dict.fromkeys(str(row.key["case"]) for row in rows))
    by_key = {(str(row.key["case"]), str(row.key["limit"])): row for row in rows}
    lines = [[case, *(shown(by_key[case, name]) for name in _NAMES)] for case in cases]
    return markdown(["engine", *_NAMES], lines)


NOTE = "Simulated, means over seeds"
TABLES = {
    "goodput": Table(text=_goodput, where={"case": ANY, "limit": ANY}, note=NOTE),
    "ttft": Table(text=_ttft, where={"case": ANY, "limit": ANY}, note=NOTE),
}
