"""The tables of this experiment."""

from collections.abc import Sequence
from statistics import median

from experiments.common.rows import ANY, Row
from experiments.common.tables import Table, load_note, markdown
from experiments.overhead.run import TUNER
from experiments.overhead.tables import layer_ms

_ROLES = ("gateway", "scheduler")
_MEMORY = ("gateway", "scheduler")
# Of fewer streams the memory is lost in what a process takes and gives back by itself.
_FEWEST = 500


def _costs(rows: Sequence[Row]) -> str:
    head = ["request", "clients", "gateways", "requests/s", *_ROLES, "all", "first byte p50, ms"]
    ordered = sorted(rows, key=lambda row: (row.key["kind"], row.key["clients"], row.key["gateways"]))
    lines = [
        [
            str(row.key["kind"]),
            str(row.key["clients"]),
            str(row.key["gateways"]),
            f"{median(row.figures['per_s']):,.0f}",
            *(f"{median(row.figures['cpu_ms'].get(role, [0.0])):.3f}" for role in _ROLES),
            f"{layer_ms(row.figures, TUNER):.3f}",
            f"{median(row.figures['first_p50_ms']):.1f}",
        ]
        for row in ordered
    ]
    return f"{markdown(head, lines)}\n\n{load_note(rows)}".rstrip()


def _waiting(rows: Sequence[Row]) -> str:
    head = [
        "waiting",
        *(f"{role}, kB each" for role in _MEMORY),
        "place taken again, ms",
        "first byte from the engine, ms",
        *(f"{role}, % of a core" for role in _ROLES),
    ]
    lines = []
    for row in rows:
        waiting, figures = int(row.key["waiting"]), row.figures
        turn, first = figures["turn_ms"], figures["first_ms"]
        lines.append(
            [
                f"{waiting:,}",
                *(_kilobytes(figures["grown_mb"].get(role, 0.0), waiting) for role in _MEMORY),
                f"{turn['p50']:.1f} / {turn['p99']:.1f}",
                f"{first['p50']:.1f} / {first['p99']:.1f}",
                *(f"{100 * figures['cores'].get(role, 0.0):.0f}" for role in _ROLES),
            ]
        )
    return f"{markdown(head, lines, text_columns=0)}\n\n{load_note(rows)}".rstrip()


def _kilobytes(grown_mb: float, waiting: int) -> str:
    return f"{1_024 * grown_mb / waiting:.1f}" if waiting >= _FEWEST else "-"


_NOTE = (
    "CPU milliseconds per request, less idle use, without client, engines and tuner. Live; client and "
    "engines share the machine"
)
TABLES = {
    "costs": Table(text=_costs, where={"gateways": ANY}, note=_NOTE),
    "waiting": Table(
        text=_waiting,
        where={"waiting": ANY},
        note="Live: growth of the proportional set size; times are p50 / p99. Client and engine share the "
        "machine",
    ),
}
