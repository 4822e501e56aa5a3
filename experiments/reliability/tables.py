"""Tables of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import Row
from experiments.common.tables import Table, markdown, plus_minus

# Heading, figure, decimals and scale of each column.
_COLUMNS = (
    ("short preempted, per mille", "preempted_short", 1, 1_000),
    ("long preempted, per mille", "preempted_long", 1, 1_000),
    ("rejected, per mille", "rejected_ratio", 2, 1_000),
    ("answers cut, per mille", "clipped_ratio", 2, 1_000),
    ("short TTFT p99, s", "short_ttft_p99_s", 2, 1),
    ("long p99, s", "long_ttft_p99_s", 2, 1),
    ("longest wait, s", "queue_wait_max_s", 1, 1),
    ("TPOT p99, ms", "tpot_p99_s", 0, 1_000),
    ("goodput, 1/s", "goodput_per_s", 1, 1),
)

_HEADLINE = ("preempted_short", "preempted_long", "rejected_ratio", "long_ttft_p99_s")


def _headline(rows: Sequence[Row]) -> str:
    shown = [each for each in _COLUMNS if each[1] in _HEADLINE]
    lines = [
        [
            f"{row.key['case']}: {row.key['fleet']}",
            "router" if row.key["control"] == "router" else "gateway",
            *(plus_minus(row.figures[name], decimals, scale=scale) for _, name, decimals, scale in shown),
        ]
        for row in rows
    ]
    return markdown(["fleet", "control", *(heading for heading, *_ in shown)], lines, text_columns=2)


def _all(rows: Sequence[Row]) -> str:
    lines = [
        [
            str(row.key["case"]),
            str(row.key["load"]),
            str(row.key["fleet"]),
            str(row.key["control"]),
            *(plus_minus(row.figures[name], decimals, scale=scale) for _, name, decimals, scale in _COLUMNS),
        ]
        for row in rows
    ]
    head = ["case", "load", "fleet", "control", *(heading for heading, *_ in _COLUMNS)]
    return markdown(head, lines, text_columns=4)


_NOTE = "Simulated; fleets of a case have as many GPUs. Means over seeds with their 95 % intervals"

_WHERE = {"load": 0.9, "control": ("router", "gateway, ewsjf")}

TABLES = {
    "headline": Table(text=_headline, where=_WHERE, note=f"Load 0.9. {_NOTE}"),
    "all": Table(text=_all, where=_WHERE, note=_NOTE),
}
