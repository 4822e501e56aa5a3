"""Tables and the picture of this experiment."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from experiments.ceiling.tables import request_us
from experiments.common.picture import Line, Panel, Picture, drawn
from experiments.common.rows import Row, where
from experiments.common.tables import Table, load_note, markdown, plus_minus
from experiments.cost.bursts import ROLES
from experiments.cost.run import BODY_BYTES, CHUNKS, FEATURE
from experiments.cost.variants import VARIANTS

Figures = Mapping[str, Any]
_SMALL, _STREAM = "small", "stream"
_US_PER_MS = 1_000
# Variants that are no features, with the number of tenants or programs.
_TENANTS = {1: "", 10: "10 tenants", 1_000: "1,000 tenants"}
_PROGRAMS = {0: "", 100: "100 programs", 1_000: "1,000 programs"}


def role_ms(figures: Figures, role: str) -> float:
    """Return CPU milliseconds per request of a role, median over the rounds."""
    return float(median(figures["cpu_ms"][role]))


def prices_us(row: Row, roles: Sequence[str] = ROLES) -> list[float]:
    """Return CPU microseconds per request with a feature less those without it, one for each block."""
    sign = 1 if VARIANTS[str(row.key["feature"])].is_addition else -1
    base, variant = (_both_ms(row.figures[side], roles) for side in ("base", "variant"))
    return [sign * _US_PER_MS * (one - other) for one, other in zip(variant, base, strict=True)]


def _both_ms(figures: Figures, roles: Sequence[str]) -> list[float]:
    return [sum(values) for values in zip(*(figures["cpu_ms"][role] for role in roles), strict=True)]


def _features(rows: Sequence[Row]) -> str:
    head = ["feature", "setting", *(f"{kind}, µs" for kind in _kinds(rows))]
    lines = [
        [name, f"`{VARIANTS[name].setting}`" if VARIANTS[name].setting else "", *_cells(rows, name, ROLES)]
        for name in _by_price(rows)
    ]
    return f"{markdown(head, lines, text_columns=2)}\n\n{_base_note(rows)} {_circumstances(rows)}"


def _features_by_role(rows: Sequence[Row]) -> str:
    head = ["feature", *(f"{kind}, {role}, µs" for kind in _kinds(rows) for role in ROLES)]
    lines = [[name, *_cells(rows, name, *((role,) for role in ROLES))] for name in _by_price(rows)]
    return f"{markdown(head, lines)}\n\n{_circumstances(rows)}"


def _cells(rows: Sequence[Row], name: str, *sides: Sequence[str]) -> Iterator[str]:
    """Yield the prices of a feature for each kind of request, with one cell for each selection of roles."""
    for kind in _kinds(rows):
        for row in where(rows, kind=kind, feature=name):
            yield from (plus_minus(prices_us(row, roles), 0) for roles in sides)


def _kinds(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(row.key["kind"]) for row in rows))


def _by_price(rows: Sequence[Row]) -> list[str]:
    """Return the features by their price for a small request, the highest first."""
    features = [row for row in where(rows, kind=_SMALL) if VARIANTS[str(row.key["feature"])].is_feature]
    return [str(row.key["feature"]) for row in sorted(features, key=lambda row: -fmean(prices_us(row)))]


def _base_note(rows: Sequence[Row]) -> str:
    costs = [f"{kind} {_US_PER_MS * _base_ms(where(rows, kind=kind)):,.0f} µs" for kind in _kinds(rows)]
    return f"The default configuration costs: {', '.join(costs)}."


def _base_ms(rows: Sequence[Row]) -> float:
    return float(median(one for row in rows for one in _both_ms(row.figures["base"], ROLES)))


def _circumstances(rows: Sequence[Row]) -> str:
    settings = rows[0].settings
    bursts = ", ".join(
        f"{settings['blocks'] * cycles:,} bursts of {settings['burst'][kind]} requests ({kind})"
        for kind, cycles in settings["cycles"].items()
    )
    return f"{bursts} by {settings['clients']} clients. {load_note(rows)}".rstrip()


def _sweep(rows: Sequence[Row]) -> str:
    head = ["", *ROLES, "both"]
    lines = [
        [
            f"{row.key['value']:,}",
            *(f"{role_ms(row.figures, role):.3f}" for role in ROLES),
            f"{median(_both_ms(row.figures, ROLES)):.3f}",
        ]
        for row in rows
    ]
    return f"{markdown(head, lines, text_columns=0)}\n\n{load_note(rows)}"


def _picture(rows_of: Callable[[str], Sequence[Row]]) -> str:
    rows, ceiling = rows_of("cost"), rows_of("ceiling")
    panels = [
        _swept_panel("By chunks of a streamed answer (log)", where(rows, part=CHUNKS), "{:,}"),
        _swept_panel("By bytes of the request's body (log)", where(rows, part=BODY_BYTES), "{:,}"),
        _core_panel(ceiling),
        _counted_panel("By tenants, each with a key; small requests", rows, _TENANTS),
        _counted_panel("By programs with a session id; small requests", rows, _PROGRAMS),
    ]
    described = "; ".join(
        f"{panel.title}: "
        + ", ".join(
            f"{line.name} {' '.join(f'{value:.2g}' for value in line.values)} at {' '.join(panel.ticks)}"
            for line in panel.lines
        )
        for panel in panels
    )
    return drawn("CPU milliseconds per request", described, panels)


def _swept_panel(title: str, rows: Sequence[Row], tick: str) -> Panel:
    lines = [Line(role, [role_ms(row.figures, role) for row in rows]) for role in ROLES]
    return Panel(title=title, ticks=[tick.format(row.key["value"]) for row in rows], lines=lines, is_log=True)


def _counted_panel(title: str, rows: Sequence[Row], counts: Mapping[int, str]) -> Panel:
    found = where(rows, part=FEATURE, kind=_SMALL, feature=tuple(counts.values()))
    by_name = {row.key["feature"]: row.figures["variant"] for row in found}
    figures = [by_name[name] if name else found[0].figures["base"] for name in counts.values()]
    lines = [Line(role, [role_ms(one, role) for one in figures]) for role in ROLES]
    return Panel(title=title, ticks=[f"{count:,}" for count in counts], lines=lines)


def _core_panel(rows: Sequence[Row]) -> Panel:
    idle = min(where(rows, part="events"), key=lambda row: int(row.key["replicas"]))
    waiting = sorted(where(rows, part="waiting"), key=lambda row: int(row.key["waiting"]))
    ticks = ["0", *(f"{row.key['waiting']:,}" for row in waiting)]
    values = [request_us(row) / _US_PER_MS for row in (idle, *waiting)]
    return Panel(title="By queued requests", ticks=ticks, lines=[Line("scheduler's core alone", values)])


_NOTE = "CPU per request of gateway and scheduler, less idle use. Live, light engines"

TABLES = {
    "features": Table(text=_features, where={"part": FEATURE}, note=_NOTE),
    "features-by-role": Table(text=_features_by_role, where={"part": FEATURE}, note=_NOTE),
    "chunks": Table(text=_sweep, where={"part": CHUNKS}, note=f"Milliseconds by chunks. {_NOTE}"),
    "bodies": Table(text=_sweep, where={"part": BODY_BYTES}, note=f"Milliseconds by bytes. {_NOTE}"),
}
PICTURES: Mapping[str, Picture] = {"docs/images/cost.svg": _picture}
