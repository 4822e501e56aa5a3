"""The tables of this experiment, and the columns that other grids of policies share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.common.rows import Row, where
from experiments.common.tables import Table, markdown, plus_minus
from serve_app.core.metrics.confidence import interval_95


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a row, and how it is written."""

    heading: str
    figure: str
    decimals: int
    scale: float = 1.0

    def mean(self, row: Row) -> str:
        """The mean over seeds alone."""
        return f"{self.scale * fmean(row.figures[self.figure]):,.{self.decimals}f}"

    def with_interval(self, row: Row) -> str:
        """The mean and half the width of its interval."""
        return plus_minus(row.figures[self.figure], self.decimals, scale=self.scale)


SHORT_MEAN = Column("short TTFT mean, s", "short_ttft_mean_s", 3)
SHORT_P99 = Column("short p99, s", "short_ttft_p99_s", 2)
LONG_MEAN = Column("long mean, s", "long_ttft_mean_s", 3)
LONG_P99 = Column("long p99, s", "long_ttft_p99_s", 2)
LONGEST_WAIT = Column("longest wait, s", "queue_wait_max_s", 1)
TPOT = Column("TPOT, ms", "tpot_mean_s", 0, 1_000)
GOODPUT = Column("goodput, 1/s", "goodput_per_s", 1)
THROUGHPUT = Column("tokens/s", "tokens_per_s", 0)
COLUMNS = (SHORT_MEAN, SHORT_P99, LONG_MEAN, LONG_P99, LONGEST_WAIT, TPOT, GOODPUT, THROUGHPUT)

NOTE = (
    "Means over seeds with their 95 % intervals. TTFT counts from arrival. "
    "Goodput counts requests within a TTFT of 1 s (long 10 s) and 100 ms per output token"
)

_H100, _RTX4090 = "llama2-70b-h100-tp4", "llama31-8b-rtx4090-tp1"
# What the first table shows, and by which names.
_HEADLINE = {
    "direct": "straight to the engines",
    "fcfs": "FCFS in the gateway",
    "random": "random order",
    "hrrn": "HRRN",
    "two-queue": "two queues",
    "ewsjf-paper": "EWSJF as published",
    "oracle": "oracle order (not deployable)",
    "fcfs, chunk 256": "FCFS, chunks of 256 in the engine",
    "fcfs-isolated": "FCFS with our isolation",
    "ewsjf": "**ours**",
}
_LOADS = (0.9, 0.98)


def grid_table(*by: str) -> Callable[[Sequence[Row]], str]:
    """Makes a table with all columns, a line for each row.

    Args:
        by: parts of the key that stand before the policy.
    """

    def text(rows: Sequence[Row]) -> str:
        lines = [
            [*(str(row.key[name]) for name in by), _policy(row), *(one.with_interval(row) for one in COLUMNS)]
            for row in rows
        ]
        head = [*by, "policy", *(one.heading for one in COLUMNS)]
        return markdown(head, lines, text_columns=len(by) + 1)

    return text


def _policy(row: Row) -> str:
    return str(row.key["policy"]) if row.figures["deployable"] else f"{row.key['policy']} (not deployable)"


def _headline(rows: Sequence[Row]) -> str:
    busy = (SHORT_MEAN, SHORT_P99, LONG_MEAN, LONG_P99, LONGEST_WAIT, TPOT, GOODPUT)
    full = (SHORT_MEAN, SHORT_P99, LONG_MEAN, LONG_P99, LONGEST_WAIT, GOODPUT)
    lines = []
    for name, title in _HEADLINE.items():
        (at_busy,), (at_full,) = (where(rows, load=load, policy=name) for load in _LOADS)
        lines.append([title, *(one.mean(at_busy) for one in busy), *(one.mean(at_full) for one in full)])
    first, *others = (one.heading for one in full)
    head = ["", *(one.heading for one in busy), f"load {_LOADS[1]}: {first}", *others]
    shown = where(rows, load=_LOADS[0], policy=tuple(_HEADLINE))
    mean, tail = _widest(shown, SHORT_MEAN, LONG_MEAN), _widest(shown, SHORT_P99)
    return (
        f"{markdown(head, lines)}\n\nThe first figures are at load {_LOADS[0]}. "
        f"Their 95 % intervals are at most ± {mean:.0f} % of a mean TTFT and ± {tail:.0f} % of a short p99. "
        "The longest wait is one in the gateway's queue; straight to the engines, requests wait in these."
    )


def _widest(rows: Sequence[Row], *columns: Column) -> float:
    """Half the width of the widest interval, in % of its mean; 0 when one seed cannot tell."""
    intervals = [interval_95(row.figures[column.figure]) for row in rows for column in columns]
    return max(
        (100 * (one.high - one.mean) / one.mean for one in intervals if one.high is not None), default=0.0
    )


TABLES = {
    "headline": Table(
        text=_headline,
        where={"case": "paper-mix", "profile": _H100},
        note="Llama-2-70B on four H100, four replicas, simulated; short is up to 512 tokens",
    ),
    "paper-mix": Table(text=grid_table("load"), where={"case": "paper-mix", "profile": _H100}, note=NOTE),
    "rtx4090": Table(text=grid_table("load"), where={"case": "paper-mix", "profile": _RTX4090}, note=NOTE),
    "azure": Table(text=grid_table("load"), where={"case": "azure", "profile": _H100}, note=NOTE),
}
