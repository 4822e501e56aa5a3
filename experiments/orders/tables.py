"""Tables of this experiment: EWSJF and every other order, a line for each kind of traffic and load."""

from collections.abc import Iterator, Mapping, Sequence

from experiments.common.rows import Row
from experiments.common.tables import Table, markdown
from experiments.orders.run import LONG, SHORT, Order, orders_of
from serve_app.core.metrics.summary import ConfidenceInterval, interval_95

_OURS, _BEFORE, _ISOLATED, _DIRECT = "ewsjf", "ewsjf, no bound", "fcfs-isolated", "direct"
_WAIT, _GOODPUT = "queue_wait_max_s", "goodput_per_s"


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


def _verdicts(rows: Sequence[Row]) -> str:
    four, three = (_DIRECT, _ISOLATED, _BEFORE, _OURS), (_ISOLATED, _BEFORE, _OURS)
    lines = [
        [
            case,
            str(load),
            _means(of, SHORT, four, 2),
            _means(of, LONG, four, 1),
            _price(of),
            _means(of, _WAIT, three, 1),
            _means(of, _GOODPUT, three, 2),
            ", ".join(dominating([*of.values()])) or "none",
        ]
        for (case, load), of in _points(rows)
    ]
    head = [
        "traffic",
        "load",
        "short P99, s: direct / isolated / before / ours",
        "long P99, s: direct / isolated / before / ours",
        "long P99, ours / isolated",
        "longest wait, s: isolated / before / ours",
        "goodput, 1/s: isolated / before / ours",
        "better at both",
    ]
    return markdown(head, lines, text_columns=2)


def _price(of: Mapping[str, Order]) -> str:
    return f"{of[_OURS].mean(LONG) / of[_ISOLATED].mean(LONG):.2f}" if _ISOLATED in of else "-"


def _means(of: Mapping[str, Order], figure: str, policies: Sequence[str], decimals: int) -> str:
    """Return the means of some policies, where they were measured."""
    return " / ".join(f"{of[one].mean(figure):,.{decimals}f}" if one in of else "-" for one in policies)


def _headline(rows: Sequence[Row]) -> str:
    lines = [
        [
            traffic,
            str(load),
            *(f"{of[one].mean(SHORT):.2f}" for one in (_DIRECT, _ISOLATED, _OURS)),
            _price(of),
        ]
        for (traffic, load), of in _points(rows)
    ]
    head = [
        *("traffic", "load", "short P99, s: no gateway", "short P99, s: FCFS with isolation"),
        *("short P99, s: EWSJF", "long P99: EWSJF / FCFS with isolation"),
    ]
    return markdown(head, lines, text_columns=2)


TABLES = {
    "headline": Table(
        text=_headline,
        note="Simulated: Llama-2-70B on four H100, four replicas, means over seeds. EWSJF includes isolation",
    ),
    "verdicts": Table(
        text=_verdicts,
        note="Llama-2-70B on four H100, simulated, means over seeds. `isolated` is `fcfs-isolated`, and "
        "`before` is ours without the bound on delay; a mark `!` is for intervals that exclude zero",
    ),
}
