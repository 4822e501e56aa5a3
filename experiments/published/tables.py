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


def _headline(rows: Sequence[Row]) -> str:
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
    "headline": Table(text=_headline, where={"case": ANY}, note=NOTE),
}
