"""The table of this experiment."""

from collections.abc import Sequence
from statistics import fmean

from experiments.common.rows import ANY, Row
from experiments.common.tables import Table, markdown
from experiments.who_pays.run import RULES


def _errors(rows: Sequence[Row]) -> str:
    lines = [
        [str(row.key["case"]), *(f"{100 * fmean(row.figures[f'{rule}, moved']):.1f}" for rule in RULES)]
        for row in rows
    ]
    return markdown(["engine and load", *RULES], lines)


def _shares(rows: Sequence[Row]) -> str:
    prefix = "true "
    tenants = [name.removeprefix(prefix) for name in rows[0].figures if name.startswith(prefix)]
    ways = ("true", *RULES)
    lines = []
    for row in rows:
        for way in ways:
            shares = (f"{100 * fmean(row.figures[f'{way} {tenant}']):.1f}" for tenant in tenants)
            lines.append([str(row.key["case"]) if way == ways[0] else "", way, *shares])
    return markdown(["engine and load", "by", *tenants], lines)


NOTE = "Simulated, two replicas, means over seeds, in % of the engines' time"
TABLES = {
    "errors": Table(text=_errors, where={"case": ANY}, note=NOTE),
    "shares": Table(text=_shares, where={"case": ANY}, note=NOTE),
}
