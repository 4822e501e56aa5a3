"""Tables of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import Row
from experiments.common.tables import Table, markdown, plus_minus


def _accuracy(rows: Sequence[Row]) -> str:
    head = [
        "tenants",
        "method",
        "error, log sigma",
        "rank correlation",
        "within the upper prediction, %",
        "µs",
    ]
    lines = [
        [
            str(row.key["tenants"]),
            str(row.key["method"]),
            plus_minus(row.figures["log_sigma"], 2),
            plus_minus(row.figures["rank"], 2),
            plus_minus(row.figures["covered"], 0, scale=100),
            f"{row.figures['cpu_us']:,.0f}",
        ]
        for row in rows
    ]
    return markdown(head, lines, text_columns=2)


TABLES = {
    "accuracy": Table(
        text=_accuracy,
        where={},
        note="Means over consecutive parts of the traffic with their 95 % intervals; the upper prediction "
        "should cover 87.5 %",
    )
}
