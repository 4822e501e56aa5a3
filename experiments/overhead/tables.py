"""Tables of this experiment."""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from experiments.common.rows import Row, where
from experiments.common.tables import Table, load_note, markdown
from experiments.overhead.run import REMOTE, TUNER
from experiments.overhead.system import DIRECT

Figures = Mapping[str, Any]
_ALL_KINDS = ("small", "stream", "paced", "200 kB", "400 kB", "4 MB")
_HEADLINE_KINDS = ("small", "stream", "paced", "400 kB", "4 MB")
_NONE = "-"


def layer_ms(figures: Figures) -> float:
    """Return CPU milliseconds per request of a system without the tuner, median over the rounds."""
    used = [values for role, values in figures["cpu_ms"].items() if role != TUNER]
    return float(median(map(sum, zip(*used, strict=True)))) if used else 0.0


def added_ms(row: Row, system: str, name: str) -> float | None:
    """Return the time that a system adds to a direct request, median of the differences within a round."""
    if system not in row.figures or DIRECT not in row.figures:
        return None
    pairs = zip(row.figures[system][name], row.figures[DIRECT][name], strict=True)
    return float(median(through - straight for through, straight in pairs))


def _cpu(rows: Sequence[Row], kinds: Sequence[str] = _HEADLINE_KINDS) -> str:
    """Return a line for each system, with a column for each kind at its most clients."""
    cells = [(kind, row) for kind in kinds if (row := _busiest(rows, kind)) is not None]
    head = ["system", *(f"{kind}, {row.key['clients']} at once" for kind, row in cells)]
    lines = [
        [_named(rows, system), *(_cpu_cell(row, system) for _, row in cells)]
        for system in _systems(rows)
        if system != DIRECT
    ]
    return f"{markdown(head, lines)}\n\n{_circumstances(rows)}"


def _cpu_cell(row: Row, system: str) -> str:
    if system not in row.figures:
        return _NONE
    value = layer_ms(row.figures[system])
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}"


def _first(
    rows: Sequence[Row],
    timed: Sequence[str] = ("small", "stream", "400 kB"),
    counted: Sequence[str] = ("small", "400 kB"),
) -> str:
    """Return times to the first token with one client, and requests per second with many.

    Args:
        timed: kinds of requests whose times are shown.
        counted: kinds whose rates are shown, of those that were also played with one client.
    """
    timed, counted = (
        [kind for kind in kinds if where(rows, kind=kind, clients=1)] for kinds in (timed, counted)
    )
    head = ["system"]
    head += [f"{kind}, P50 / P99 ms" for kind in timed]
    head += [f"{kind}, requests/s" for kind in counted if _busiest(rows, kind)]
    lines = []
    for system in _systems(rows):
        alone = [row for kind in timed for row in where(rows, kind=kind, clients=1)]
        busy = [row for kind in counted if (row := _busiest(rows, kind)) is not None]
        lines.append([system, *(_times(row, system) for row in alone), *(_rate(row, system) for row in busy)])
    return f"{markdown(head, lines)}\n\n{_circumstances(rows)}"


def _times(row: Row, system: str) -> str:
    if system not in row.figures:
        return _NONE
    if system == DIRECT:
        times = [median(row.figures[DIRECT][name]) for name in ("first_p50_ms", "first_p99_ms")]
        return " / ".join(f"{one:.2f}" for one in times)
    added = [added_ms(row, system, name) for name in ("first_p50_ms", "first_p99_ms")]
    return " / ".join(_NONE if one is None else f"{one:+.2f}" for one in added)


def _rate(row: Row, system: str) -> str:
    return f"{median(row.figures[system]['per_s']):,.0f}" if system in row.figures else _NONE


def _quick_start(rows: Sequence[Row]) -> str:
    (figures,) = [row.figures for row in rows]
    roles = sorted(figures["memory_mb"], key=lambda role: -median(figures["memory_mb"][role]))
    lines = [
        [role, *(f"{median(figures[name].get(role, [0.0])):{form}}" for name, form in _OF_ROLES.items())]
        for role in roles
    ]
    totals = {name: median(map(sum, zip(*figures[name].values(), strict=True))) for name in _OF_ROLES}
    lines.append(["all", *(f"{totals[name]:{form}}" for name, form in _OF_ROLES.items())])
    start_s, processes = median(figures["start_s"]), median(figures["processes"])
    summary = f"It accepts requests {start_s:.1f} s after its start, and has {processes:.0f} processes."
    return f"{markdown(['role', 'memory, MB', 'idle CPU, cores'], lines)}\n\n{summary} {load_note(rows)}"


_OF_ROLES = {"memory_mb": ",.0f", "idle_cores": ".3f"}


_REMOVED = "ours, HAProxy"
"""A system of older rows, which this project no longer has."""


def _systems(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.figures if name != _REMOVED))


def _named(rows: Sequence[Row], system: str) -> str:
    version = next(row.figures[system]["version"] for row in rows if system in row.figures)
    return f"{system} {version}".rstrip() if not version.startswith("Python") else system


def _busiest(rows: Sequence[Row], kind: str) -> Row | None:
    return max(where(rows, kind=kind), key=lambda row: int(row.key["clients"]), default=None)


def _circumstances(rows: Sequence[Row]) -> str:
    settings = rows[0].settings
    rounds = f"Medians of {settings['rounds']} rounds of {settings['seconds']:g} s"
    return f"{rounds}. {load_note(rows)}".rstrip()


_NOTE = "Live; client, engines and systems share the machine"
_CPU_NOTE = f"CPU milliseconds per request, less idle use, without client, engines and tuner. {_NOTE}"
_FIRST_NOTE = (
    "TTFT without a system (`direct`), and the time that each system adds; throughput with many clients. "
    f"{_NOTE}"
)

TABLES = {
    "headline": Table(text=_cpu, where={"engines": REMOTE}, note=_CPU_NOTE),
    "cpu-all": Table(text=partial(_cpu, kinds=_ALL_KINDS), where={"engines": REMOTE}, note=_CPU_NOTE),
    "first": Table(text=_first, where={"engines": REMOTE}, note=_FIRST_NOTE),
    "first-all": Table(
        text=partial(_first, timed=_ALL_KINDS, counted=_ALL_KINDS),
        where={"engines": REMOTE},
        note=_FIRST_NOTE,
    ),
    "quick_start": Table(
        text=_quick_start,
        where={"quick start": True},
        note="Live. Memory is the sum of proportional set sizes",
    ),
}
