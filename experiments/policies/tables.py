"""Tables of this experiment, and the columns that other grids of policies share."""

from collections.abc import Callable, Sequence

from experiments.common.rows import Row, where
from experiments.common.tables import Column, Table, line_per_row, markdown
from serve_app.core.metrics.summary import interval_95

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
# Rows of the headline and their titles. The table of all policies is `paper-mix`.
_HEADLINE = {
    "direct": "no gateway",
    "fcfs": "FCFS in the gateway",
    "fcfs, chunk 256": "FCFS, engine chunks of 256 tokens",
    "fcfs-isolated": "FCFS with prefill isolation",
    "ewsjf": "**EWSJF with prefill isolation (default)**",
}
_HEADLINE_LOAD = 0.9


def grid_table(*by: str) -> Callable[[Sequence[Row]], str]:
    """Return a function that makes a table with all columns, a line for each row.

    Args:
        by: parts of the key before the policy.
    """
    return line_per_row({**{name: f"{{{name}}}" for name in by}, "policy": _policy}, COLUMNS)


def _policy(row: Row) -> str:
    return str(row.key["policy"]) if row.figures["deployable"] else f"{row.key['policy']} (not deployable)"


def _headline(rows: Sequence[Row]) -> str:
    columns = (SHORT_P99, LONG_P99, LONGEST_WAIT, GOODPUT)
    shown = where(rows, load=_HEADLINE_LOAD, policy=tuple(_HEADLINE))
    by_policy = {str(row.key["policy"]): row for row in shown}
    lines = [[title, *(one.mean(by_policy[name]) for one in columns)] for name, title in _HEADLINE.items()]
    head = ["", "short P99 TTFT, s", "long P99 TTFT, s", "longest queue time, s", "goodput, requests/s"]
    short, long = _widest(shown, SHORT_P99), _widest(shown, LONG_P99)
    return (
        f"{markdown(head, lines)}\n\nLoad {_HEADLINE_LOAD}. 95 % intervals are within ± {short:.0f} % of a "
        f"short and ± {long:.0f} % of a long P99. Without a gateway, requests queue in the engines instead."
    )


def _widest(rows: Sequence[Row], *columns: Column) -> float:
    """Return half the width of the widest interval, in % of its mean; 0 with one seed."""
    intervals = [interval_95(row.figures[column.figure]) for row in rows for column in columns]
    return max(
        (100 * (one.high - one.mean) / one.mean for one in intervals if one.high is not None), default=0.0
    )


TABLES = {
    "headline": Table(
        text=_headline,
        where={"case": "paper-mix", "profile": _H100},
        note="Simulated: Llama-2-70B, four replicas of four H100 each. Short prompts have up to 512 tokens. "
        "Goodput: TTFT within 1 s (long 10 s) and TPOT within 100 ms",
    ),
    "paper-mix": Table(text=grid_table("load"), where={"case": "paper-mix", "profile": _H100}, note=NOTE),
    "rtx4090": Table(text=grid_table("load"), where={"case": "paper-mix", "profile": _RTX4090}, note=NOTE),
    "azure": Table(text=grid_table("load"), where={"case": "azure", "profile": _H100}, note=NOTE),
}
