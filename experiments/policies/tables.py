"""Tables of this experiment, and the columns that other grids of policies share."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from experiments.common.rows import Row, where
from experiments.common.tables import Column, Table, line_per_row, markdown
from experiments.policies.orders import LONG, SHORT, Order, orders_of
from serve_app.core.metrics.summary import ConfidenceInterval, interval_95

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
_OURS, _BEFORE, _ISOLATED, _DIRECT = "ewsjf", "ewsjf, no bound", "fcfs-isolated", "direct"


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


def dominating(point: Sequence[Order]) -> list[str]:
    """Return the policies that are better than ours in short and long P99 at once.

    The mean of the paired differences over seeds decides; `!` marks policies whose intervals exclude zero in
    both.
    """
    (ours,) = (order for order in point if order.policy == _OURS)
    found = []
    for order in point:
        short, long = (_difference(order.figures[name], ours.figures[name]) for name in (SHORT, LONG))
        if short.mean < 0 and long.mean < 0:
            is_sure = all(each.high is not None and each.high < 0 for each in (short, long))
            found.append(f"{order.policy}{'!' if is_sure else ''}")
    return found


def _difference(figures: Sequence[float], ours: Sequence[float]) -> ConfidenceInterval:
    """Return the difference per seed, whose interval is far narrower than two intervals side by side."""
    return interval_95([one - other for one, other in zip(figures, ours, strict=True)])


def _points(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, float], Mapping[str, Order]]]:
    """Yield case and load of each point that has ours, and its orders by policy."""
    points: dict[tuple[str, float], dict[str, Order]] = {}
    for order in orders_of(rows):
        points.setdefault((order.case, order.load), {})[order.policy] = order
    return ((point, of) for point, of in points.items() if _OURS in of)


def _order_verdicts(rows: Sequence[Row]) -> str:
    four, three = (_DIRECT, _ISOLATED, _BEFORE, _OURS), (_ISOLATED, _BEFORE, _OURS)
    lines = [
        [
            case,
            str(load),
            _means(of, SHORT, four, 2),
            _means(of, LONG, four, 1),
            _price(of),
            _means(of, LONGEST_WAIT.figure, three, 1),
            _means(of, GOODPUT.figure, three, 2),
            ", ".join(dominating([*of.values()])) or "none",
        ]
        for (case, load), of in _points(rows)
    ]
    head = [
        *("traffic", "load", "short P99, s: direct / isolated / before / ours"),
        *("long P99, s: direct / isolated / before / ours", "long P99, ours / isolated"),
        *("longest wait, s: isolated / before / ours", "goodput, 1/s: isolated / before / ours"),
        "better at both",
    ]
    return markdown(head, lines, text_columns=2)


def _price(of: Mapping[str, Order]) -> str:
    return f"{of[_OURS].mean(LONG) / of[_ISOLATED].mean(LONG):.2f}" if _ISOLATED in of else "-"


def _means(of: Mapping[str, Order], figure: str, policies: Sequence[str], decimals: int) -> str:
    """Return the means of some policies, where they were measured."""
    return " / ".join(f"{of[one].mean(figure):,.{decimals}f}" if one in of else "-" for one in policies)


def _order_headline(rows: Sequence[Row]) -> str:
    shown = (_DIRECT, _ISOLATED, _OURS)
    lines = [
        [traffic, str(load), *(f"{of[one].mean(SHORT):.2f}" for one in shown), _price(of)]
        for (traffic, load), of in _points(rows)
    ]
    head = [
        *("traffic", "load", "short P99, s: no gateway", "short P99, s: FCFS with isolation"),
        *("short P99, s: EWSJF", "long P99: EWSJF / FCFS with isolation"),
    ]
    return markdown(head, lines, text_columns=2)


def _engine(row: Row) -> str:
    return str(row.key["profile"]).split("-")[2]


def _comparison(case: str, profile: str) -> Table:
    return Table(text=grid_table("load"), where={**_COMPARISON, "case": case, "profile": profile}, note=NOTE)


_COMPARISON, _ORDERS, _FRONTIER = ({"part": part} for part in ("comparison", "orders", "frontier"))
_FRONTIER_COLUMNS = (SHORT_P99, LONG_MEAN, LONG_P99, TPOT, GOODPUT)

TABLES = {
    "headline": Table(
        text=_headline,
        where={**_COMPARISON, "case": "paper-mix", "profile": _H100},
        note="Simulated: Llama-2-70B, four replicas of four H100 each. Short prompts have up to 512 tokens. "
        "Goodput: TTFT within 1 s (long 10 s) and TPOT within 100 ms",
    ),
    "paper-mix": _comparison("paper-mix", _H100),
    "rtx4090": _comparison("paper-mix", _RTX4090),
    "azure": _comparison("azure", _H100),
    "robustness": Table(text=grid_table("case", "load"), where={"part": "robustness"}, note=NOTE),
    "frontier": Table(
        text=line_per_row({"traffic": "{case}", "variant": "{policy}"}, _FRONTIER_COLUMNS),
        where={**_FRONTIER, "profile": _H100, "load": 1.1},
        note=f"{NOTE}. Simulated, load 1.1, four replicas of Llama-2-70B on four H100 each",
    ),
    "frontier-all": Table(
        text=line_per_row(
            {"traffic": "{case}", "engine": _engine, "load": "{load}", "variant": "{policy}"},
            _FRONTIER_COLUMNS,
        ),
        where=_FRONTIER,
        note=f"{NOTE}. Simulated, four replicas of Llama-2-70B on four H100 (h100) or of Llama-3.1-8B on an "
        "RTX 4090 (rtx4090)",
    ),
    "orders": Table(
        text=_order_headline,
        where=_ORDERS,
        note="Simulated: Llama-2-70B on four H100, four replicas, means over seeds. EWSJF includes isolation",
    ),
    "verdicts": Table(
        text=_order_verdicts,
        where=_ORDERS,
        note="Llama-2-70B on four H100, simulated, means over seeds. `isolated` is `fcfs-isolated`, and "
        "`before` is ours without the bound on delay; a mark `!` is for intervals that exclude zero",
    ),
}
