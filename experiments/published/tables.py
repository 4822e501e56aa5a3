"""Tables of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import ANY, Row
from experiments.common.tables import Table, markdown, plus_minus
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

_RATE = "rate, 1/s"


# Rows of the headline and their titles.
_HEADLINE = {
    "direct": "no gateway",
    "ewsjf-paper": "EWSJF as published",
    "fcfs-isolated": "FCFS with isolation",
    "ewsjf": "EWSJF with isolation",
}


def _headline(rows: Sequence[Row]) -> str:
    lines = [
        [
            f"{str(row.key['profile']).removeprefix('llama2-13b-')}, load {row.key['load']}",
            _HEADLINE[str(row.key["policy"])],
            *(column.mean(row) for column in (SHORT_MEAN, LONG_P99, LONGEST_WAIT, THROUGHPUT)),
        ]
        for row in sorted(rows, key=lambda row: (str(row.key["profile"]), row.key["load"]))
    ]
    head = ["GPUs", "policy", "short TTFT mean, s", "long P99, s", "longest queue time, s", "tokens/s"]
    return markdown(head, lines, text_columns=2)


def _all(rows: Sequence[Row]) -> str:
    columns = (SHORT_MEAN, SHORT_P99, LONG_MEAN, LONG_P99, LONGEST_WAIT, THROUGHPUT, GOODPUT)
    lines = [
        [
            str(row.key["profile"]).removeprefix("llama2-13b-"),
            f"{row.key['load']}",
            str(row.key["policy"]),
            plus_minus(row.figures["rate_per_s"], 1),
            *(column.with_interval(row) for column in columns),
        ]
        for row in sorted(rows, key=lambda row: (str(row.key["profile"]), row.key["load"]))
    ]
    head = ["GPUs", "load", "policy", _RATE, *(column.heading for column in columns)]
    return markdown(head, lines, text_columns=3)


TABLES = {
    "headline": Table(
        text=_headline,
        where={"case": ANY, "policy": tuple(_HEADLINE)},
        note="Simulated, means over seeds. TTFT counts from arrival",
    ),
    "all": Table(text=_all, where={"case": ANY}, note=NOTE),
}
