"""The table of this experiment."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from experiments.common.rows import Row
from experiments.common.tables import Table, markdown, plus_minus


def _text(rows: Sequence[Row]) -> str:
    head = ["replicas", "requests/s", "schedulers", "slices", "TTFT mean, s", "short p99, s", "long p99, s"]
    head += ["worst tenant, s", "median tenant, s", "tokens/s", "leases moved", "beyond the leases"]
    return markdown(head, map(_line, rows), text_columns=0)


def _line(row: Row) -> list[str]:
    key, figures = row.key, row.figures
    return [
        f"{key['replicas']:,}",
        f"{float(str(key['per_replica_per_s'])) * int(str(key['replicas'])):,.0f}",
        str(key["schedulers"]),
        str(key["slices"]),
        _of(figures["ttft_s"], "mean"),
        _of(figures["ttft_short_s"], "p99"),
        _of(figures["ttft_long_s"], "p99"),
        plus_minus(figures["worst_tenant_s"], 2),
        plus_minus(figures["median_tenant_s"], 2),
        f"{fmean(figures['tokens_per_s']):,.0f}",
        f"{fmean(figures['moved']):,.0f}",
        f"{max(figures['most_over']):,}",
    ]


def _of(seeds: Sequence[dict[str, Any]], which: str) -> str:
    return plus_minus([one[which] for one in seeds], 2)


TABLES = {"headline": Table(text=_text, note="Means over seeds with 95 % intervals; TTFT from arrival")}
