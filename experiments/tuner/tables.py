"""Tables of this experiment."""

from collections.abc import Sequence
from statistics import fmean

from experiments.common.rows import Row
from experiments.common.tables import Table, markdown, plus_minus

_SEARCHES = {"presets": "presets", "tpe": "presets, then TPE"}
_NOTE = "Means over seeds with their 95 % intervals; the reward is at most 1"


def _gains(rows: Sequence[Row]) -> str:
    head = ["traffic, requests/s", "search", "gain applied", "worst", "recommended", "simulated requests"]
    lines = []
    for row in rows:
        figures = row.figures
        lines.append(
            [
                f"{row.key['mix']}, {figures['rate_per_s']:.1f}",
                _SEARCHES[str(row.key["search"])],
                plus_minus(figures["applied_gain"], 3),
                f"{min(figures['applied_gain']):.3f}",
                f"{sum(figures['is_recommended'])} of {len(figures['is_recommended'])}",
                f"{fmean(figures['requests']):,.0f}",
            ]
        )
    return markdown(head, lines)


TABLES = {
    "good-start": Table(text=_gains, where={"start": "good"}, note=_NOTE),
    "bad-start": Table(text=_gains, where={"start": "bad"}, note=_NOTE),
}
