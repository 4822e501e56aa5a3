"""The tables of this experiment."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from experiments.common.rows import ANY, Row, where
from experiments.common.tables import Table, markdown, plus_minus

_KINDS = ("paper", "released", "ours")


def _sizes(rows: Sequence[Row]) -> str:
    names = ("queues", "smallest, %", "moved, %")
    head = ["workload", "n", *(f"{kind}: {name}" for kind in _KINDS for name in names)]
    places = dict.fromkeys((row.key["workload"], row.key["n"]) for row in rows)
    lines = []
    for workload, count in places:
        mine = {row.key["kind"]: row.figures for row in where(rows, workload=workload, n=count)}
        cells = (cell for kind in _KINDS for cell in _found(mine[kind]))
        lines.append([str(workload), f"{count:,}", *cells])
    return markdown(head, lines, text_columns=1)


def _found(figures: Mapping[str, list[float]]) -> list[str]:
    return [
        f"{median(figures['refined']):.0f} > {median(figures['queues']):.0f}",
        f"{100 * min(figures['least_share']):.2f}",
        f"{100 * median(figures['moved']):.1f}",
    ]


def _switches(rows: Sequence[Row]) -> str:
    lines = [
        [
            str(row.key["switch"]),
            f"{fmean(row.figures['queues']):.1f}",
            plus_minus(row.figures["spread"], 1, scale=100),
            plus_minus(row.figures["moved"], 1, scale=100),
            plus_minus(row.figures["bubbles"], 2, scale=100),
        ]
        for row in rows
    ]
    return markdown(["switch", "queues", "spread, %", "moved, %", "bubbles, %"], lines)


def _drift(rows: Sequence[Row]) -> str:
    lines = [
        [str(row.key["traffic"]), f"{100 * row.figures['rings']:.1f}", f"{row.figures['shift_median']:.3f}"]
        for row in rows
    ]
    return markdown(["traffic", "alarms, % of pairs", "median shift"], lines)


def _times(rows: Sequence[Row]) -> str:
    lines = [
        [str(row.key["timed"]), f"{row.figures['lengths']:,}", f"{row.figures['seconds']:.2f}"]
        for row in rows
    ]
    return markdown(["algorithm", "lengths", "seconds to learn"], lines)


TABLES = {
    "sizes": Table(
        text=_sizes,
        where={"workload": ANY},
        note="Queues after refining > after pruning, smallest share, distance to the largest sample",
    ),
    "switches": Table(
        text=_switches,
        where={"switch": ANY},
        note="Means over workloads and seeds, with the 95 % interval over seeds",
    ),
    "drift": Table(
        text=_drift, where={"traffic": ANY}, note="A seed is a pair of 5,000 earlier and 500 recent lengths"
    ),
    "times": Table(text=_times, where={"timed": ANY}, note="Once each, on one core, lengths of LMSYS"),
}
