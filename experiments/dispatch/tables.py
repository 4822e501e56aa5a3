"""The table of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import Row
from experiments.common.tables import Table, markdown, plus_minus
from experiments.dispatch.drive import KINDS


def _costs(rows: Sequence[Row]) -> str:
    head = ["decider", "replicas", *KINDS, "request", "of smallest", "places taken", "busy"]
    return markdown(head, map(_cost, rows))


def _cost(row: Row) -> list[str]:
    figures = row.figures
    events = [figures["events_us"][kind] for kind in KINDS]
    return [
        str(row.key["decider"]),
        f"{row.key['replicas']:,}",
        *(f"{one['p50']:.1f} / {one['p99']:.0f}" for one in events),
        plus_minus(figures["request_us"], 1),
        plus_minus(figures["of_smallest"], 2),
        f"{figures['taken']:.0%}",
        f"{figures['busy']:.2f}",
    ]


TABLES = {
    "costs": Table(
        text=_costs,
        note="Microseconds of one core: p50 / p99 of each event, means with 95 % intervals of a request",
    )
}
