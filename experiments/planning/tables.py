"""Tables of this experiment."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.common.rows import ANY, Row
from experiments.common.tables import Column, Table, line_per_row, markdown
from experiments.policies.tables import GOODPUT, LONG_P99, LONGEST_WAIT
from serve_app.lab.planning.queueing import PAGED, POOLS, WORST_CASE

_FORMS = {
    "by_requests": "by requests, alpha (1 - 1/rho)",
    "by_work": "by work, w_s (1 - 1/rho)",
    "by_both_pools": "both pools",
}
_BASELINES = {WORST_CASE: "16 sequences", PAGED: "one paged pool"}
_NONE = "-"
_HOURS_A_YEAR = 8_760
# Printed in arXiv 2604.09613 and 2604.08075, by case: saved share of the GPUs, and saved dollars a year.
_PRINTED = {
    "lmsys-a100": ("31 to 39 %", "1.2 to 2.0 M"),
    "azure-a100": ("17 to 42 %", "1.2 to 2.9 M"),
    "lmsys-mi300x": ("30 %", "15.4 M"),
    "azure-mi300x": ("30 %", "15.4 M"),
}


def _cases(rows: Sequence[Row]) -> str:
    head = [
        *("demand", "one pool, 16 sequences", "one paged pool", "two pools"),
        *("cost against one paged pool", "saving printed in the source"),
    ]
    lines = [
        [
            row.settings["title"],
            *(_gpus(row.figures["fleets"].get(name)) for name in (WORST_CASE, PAGED)),
            _pools(row.figures["fleets"].get(POOLS)),
            _cost(row),
            _printed(row)[0],
        ]
        for row in rows
    ]
    return markdown(head, lines)


def _headline(rows: Sequence[Row]) -> str:
    """Return the cases without the savings printed in the sources."""
    return "\n".join(line.rsplit(" |", 2)[0] + " |" for line in _cases(rows).splitlines())


def _printed(row: Row) -> tuple[str, str]:
    """Return the printed savings, as a share and in dollars."""
    return _PRINTED.get(str(row.key["case"]), (_NONE, _NONE))


def _gpus(fleet: Mapping[str, Any] | None) -> str:
    return "none meets the limits" if fleet is None else f"{fleet['gpus']:,} GPUs"


def _pools(fleet: Mapping[str, Any] | None) -> str:
    if fleet is None:
        return _gpus(fleet)
    short, long = (fleet["per_pool"][pool]["replicas"] for pool in ("short", "long"))
    return f"{fleet['gpus']:,} GPUs ({short:,} + {long:,} replicas)"


def _cost(row: Row) -> str:
    against = _against(row, PAGED)
    if against is None:
        return _NONE
    saved, resolution = 100 * against["simulated"], 100 * against["resolution"]
    return f"{abs(saved):.1f} ± {resolution:.1f} % {'less' if saved >= 0 else 'more'}"


def _against(row: Row, baseline: str) -> Mapping[str, Any] | None:
    """Return the saving of two pools against a baseline; None if one of the fleets is missing."""
    pools = row.figures["fleets"].get(POOLS)
    found: Mapping[str, Any] | None = None if pools is None else pools["savings"].get(baseline)
    return found


def _dollars(rows: Sequence[Row]) -> str:
    against = (f"against {title}, $ a year" for title in _BASELINES.values())
    head = ["demand", *against, "printed in the source, $ a year"]
    lines = [
        [row.settings["title"], *(_saved_a_year(row, baseline) for baseline in _BASELINES), _printed(row)[1]]
        for row in rows
    ]
    return markdown(head, lines)


def _saved_a_year(row: Row, baseline: str) -> str:
    """Return the millions of dollars that two pools save per year; negative if they cost more."""
    fleets, against = row.figures["fleets"], _against(row, baseline)
    if baseline not in fleets or against is None:
        return _NONE
    cost = fleets[baseline]["usd_per_hour"] * _HOURS_A_YEAR / 1e6
    return f"{cost * against['simulated']:+.2f} ± {cost * against['resolution']:.2f} M"


def _promises(rows: Sequence[Row]) -> str:
    """Return the excess of each closed form over the simulation, in percentage points."""
    head = ["closed form"]
    for baseline, title in _BASELINES.items():
        found = [one["simulated"] for row in rows if (one := _against(row, baseline))]
        head.append(f"against {title} (simulated {_range(found)} %)")
    lines = [
        [title, *(_promise(rows, baseline, form) for baseline in _BASELINES)]
        for form, title in _FORMS.items()
    ]
    return markdown(head, lines)


def _promise(rows: Sequence[Row], baseline: str, form: str) -> str:
    beyond = [one["closed_form"][form] - one["simulated"] for row in rows if (one := _against(row, baseline))]
    return f"{_range(beyond)}, mean {100 * fmean(beyond):.0f}" if beyond else _NONE


def _range(values: Sequence[float]) -> str:
    return f"{100 * min(values):z.0f} to {100 * max(values):z.0f}" if values else _NONE


_CASES_NOTE = "Simulated; ± is the resolution of the search, one simulated replica or a quarter of one"

# KV pressure

_SHORT = Column("short preempted, per mille", "preempted_short", 1, 1_000)
_LONG = Column("long preempted, per mille", "preempted_long", 1, 1_000)
_REJECTED = Column("rejected, per mille", "rejected_ratio", 2, 1_000)
_COLUMNS = (
    _SHORT,
    _LONG,
    _REJECTED,
    Column("answers cut, per mille", "clipped_ratio", 2, 1_000),
    Column("short TTFT p99, s", "short_ttft_p99_s"),
    LONG_P99,
    LONGEST_WAIT,
    Column("TPOT p99, ms", "tpot_p99_s", 0, 1_000),
    GOODPUT,
)


_NOTE = "Simulated; fleets of a case have as many GPUs. Means over seeds with their 95 % intervals"
_PRESSURE = {"part": "pressure", "load": 0.9, "control": ("router", "gateway, ewsjf")}
_PLANS = {"part": "plans", "case": ANY}

TABLES = {
    "headline": Table(
        text=_headline,
        where={"part": "plans", "case": ("lmsys-8b", "lmsys-a100", "azure-a100", "lmsys-mi300x")},
        note=_CASES_NOTE,
    ),
    "cases": Table(text=_cases, where=_PLANS, note=_CASES_NOTE),
    "dollars": Table(
        text=_dollars,
        where=_PLANS,
        note="Saving by two pools at the GPU prices of the planner's table, with the resolution of the "
        "search; negative values are losses",
    ),
    "grid": Table(
        text=_promises,
        where={"part": "plans", "mix": ANY},
        note="Excess of the closed form's saving over the simulated one, in percentage points of cost",
    ),
    "pressure": Table(
        text=line_per_row(
            {
                "fleet": "{case}: {fleet}",
                "control": lambda row: str(row.key["control"]).partition(",")[0],
            },
            (_SHORT, _LONG, _REJECTED, LONG_P99),
        ),
        where=_PRESSURE,
        note=f"Load 0.9. {_NOTE}",
    ),
    "pressure-all": Table(
        text=line_per_row(
            {"case": "{case}", "load": "{load}", "fleet": "{fleet}", "control": "{control}"}, _COLUMNS
        ),
        where=_PRESSURE,
        note=_NOTE,
    ),
}
