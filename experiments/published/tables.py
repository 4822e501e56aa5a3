"""Tables of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import ANY, Row
from experiments.common.tables import Column, Table, line_per_row, markdown
from experiments.policies.tables import (
    GOODPUT,
    LONG_MEAN,
    LONG_P99,
    LONGEST_WAIT,
    NOTE,
    SHORT_MEAN,
    SHORT_P99,
    THROUGHPUT,
)

_RATE = Column("rate, 1/s", "rate_per_s", 1)
# Rows of the headline and their titles.
_HEADLINE = {
    "direct": "no gateway",
    "ewsjf-paper": "EWSJF as published",
    "fcfs-isolated": "FCFS with isolation",
    "ewsjf": "EWSJF with isolation",
}


def _gpus(row: Row) -> str:
    return str(row.key["profile"]).removeprefix("llama2-13b-")


def _ordered(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (str(row.key["profile"]), row.key["load"]))


def _headline(rows: Sequence[Row]) -> str:
    lines = [
        [
            f"{_gpus(row)}, load {row.key['load']}",
            _HEADLINE[str(row.key["policy"])],
            *(column.mean(row) for column in (SHORT_MEAN, LONG_P99, LONGEST_WAIT, THROUGHPUT)),
        ]
        for row in _ordered(rows)
    ]
    head = ["GPUs", "policy", "short TTFT mean, s", "long P99, s", "longest queue time, s", "tokens/s"]
    return markdown(head, lines, text_columns=2)


_ALL = line_per_row(
    {"GPUs": _gpus, "load": "{load}", "policy": "{policy}"},
    (_RATE, SHORT_MEAN, SHORT_P99, LONG_MEAN, LONG_P99, LONGEST_WAIT, THROUGHPUT, GOODPUT),
)

TABLES = {
    "headline": Table(
        text=_headline,
        where={"case": ANY, "policy": tuple(_HEADLINE)},
        note="Simulated, means over seeds. TTFT counts from arrival",
    ),
    "all": Table(text=lambda rows: _ALL(_ordered(rows)), where={"case": ANY}, note=NOTE),
}
