"""Tables of this experiment."""

from collections.abc import Sequence
from itertools import chain
from statistics import fmean

from experiments.common.rows import Row
from experiments.common.tables import Column, Computed, Table, line_per_row, markdown, plus_minus

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

# Drift

_BEFORE, _AFTER = "before", "after"
_DRIFT = {"part": "drift"}


def _drift(rows: Sequence[Row]) -> str:
    minutes = rows[0].settings["minutes"]
    spans = {
        name: " to ".join(f"{minutes * share:g}" for share in rows[0].settings["phases"][name])
        for name in (_BEFORE, _AFTER)
    }
    classes = _classes(rows)
    head = [
        "production",
        f"reward, minutes {spans[_BEFORE]}",
        spans[_AFTER],
        *(f"{name} TTFT p50 / p99 s, {spans[_AFTER]}" for name in classes.values()),
    ]
    lines = [
        [
            str(row.key["variant"]),
            *(_reward(row, phase) for phase in (_BEFORE, _AFTER)),
            *(_ttft(row, _AFTER, name) for name in classes),
        ]
        for row in rows
    ]
    return markdown(head, lines)


def _is_tuned(row: Row) -> bool:
    return bool(row.settings["tuning"]["rollout"]["mode"] != "off")


def _classes(rows: Sequence[Row]) -> dict[str, str]:
    """Return the classes of all rows by name, short ones first, with their titles."""
    names = {
        name
        for row in rows
        for phases in row.figures["phases"]
        for figures in phases.values()
        for name in figures["classes"]
    }
    return {name: name.removeprefix("default ") for name in sorted(names, reverse=True)}


def _reward(row: Row, phase: str) -> str:
    return plus_minus([run[phase]["reward"] for run in row.figures["phases"]], 3)


def _ttft(row: Row, phase: str, name: str) -> str:
    found = [run[phase]["classes"][name] for run in row.figures["phases"] if name in run[phase]["classes"]]
    p50_s = [figures["ttft_p50_s"] for figures in found if figures["ttft_p50_s"] is not None]
    median = f"{fmean(p50_s):.2f}" if p50_s else "-"
    return f"{median} / {plus_minus([figures['ttft_p99_s'] for figures in found], 2)}"


def _trials(rows: Sequence[Row]) -> str:
    head = [
        *("production", "searches", "without a winner", "tried", "adopted", "rolled back"),
        *("pairs", "worst pair"),
    ]
    lines = []
    for row in filter(_is_tuned, rows):
        figures = row.figures
        all_pairs = list(chain(*figures["pairs"]))
        counts = ("searches", "without_winner", "tried", "adopted", "rolled_back")
        lines.append(
            [
                str(row.key["variant"]),
                *(f"{fmean(figures[name]):.1f}" for name in counts),
                str(len(all_pairs)),
                f"{min(all_pairs):+.3f}" if all_pairs else "-",
            ]
        )
    return markdown(head, lines)


TABLES = {
    "good-start": Table(text=_GAINS, where={"start": "good"}, note=_NOTE),
    "bad-start": Table(text=_GAINS, where={"start": "bad"}, note=_NOTE),
    "drift": Table(text=_drift, where=_DRIFT, note="Simulated; means over seeds with their 95 % intervals"),
    "trials": Table(text=_trials, where=_DRIFT, note="Means over seeds; pairs are those of all seeds"),
}
