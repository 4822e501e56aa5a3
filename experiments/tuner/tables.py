"""Tables of this experiment."""

from statistics import fmean

from experiments.common.tables import Column, Computed, Table, line_per_row

_SEARCHES = {"presets": "presets", "tpe": "presets, then TPE"}
_NOTE = "Means over seeds with their 95 % intervals; the reward is at most 1"


_GAINS = line_per_row(
    {"traffic, requests/s": lambda row: f"{row.key['mix']}, {row.figures['rate_per_s']:.1f}"},
    (
        Computed("search", lambda row: _SEARCHES[str(row.key["search"])]),
        Column("gain applied", "applied_gain", 3),
        Computed("worst", lambda row: f"{min(row.figures['applied_gain']):.3f}"),
        Computed(
            "recommended",
            lambda row: f"{sum(row.figures['is_recommended'])} of {len(row.figures['is_recommended'])}",
        ),
        Computed("simulated requests", lambda row: f"{fmean(row.figures['requests']):,.0f}"),
    ),
)

TABLES = {
    "good-start": Table(text=_GAINS, where={"start": "good"}, note=_NOTE),
    "bad-start": Table(text=_GAINS, where={"start": "bad"}, note=_NOTE),
}
