"""Tables and the map of this experiment."""

from collections.abc import Iterator, Mapping, Sequence

from experiments.common.rows import Row
from experiments.common.tables import Column, Table, line_per_row, markdown
from experiments.defaults.map import picture
from experiments.defaults.verdicts import FIGURES, Verdict, cells_of, ratio, verdict
from serve_app.core.metrics.summary import ConfidenceInterval

# Parts of ours, by the variant that lacks only this part.
_PARTS = {
    "fcfs-isolated": "order",
    "one queue": "learned queues",
    "no bound on delay": "bound on delay",
    "no chunks": "chunks",
    "no limits on prefills": "limits on prefills",
}


def _ratio_text(one: ConfidenceInterval) -> str:
    return f"{one.mean:.2f}" if one.low is None else f"{one.mean:.2f} ({one.low:.2f} to {one.high:.2f})"


def _lost(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, float], str, Mapping[str, Row], Verdict]]:
    for key, cell in cells_of(rows).items():
        for figure in FIGURES:
            found = verdict(cell, figure)
            if found.is_loss:
                yield key, figure, cell, found


def _without(cell: Mapping[str, Row], figure: str, best: str) -> list[tuple[str, ConfidenceInterval]]:
    """Return the parts of ours, each with the ratio of ours without it to the best other policy."""
    return [(part, ratio(cell[name], cell[best], figure)) for name, part in _PARTS.items() if name in cell]


def _losses(rows: Sequence[Row]) -> str:
    head = ["traffic and engines", "load", "figure", "best other", "ours / best", "cause: ratio without it"]
    lines = []
    for (scene, load), figure, cell, found in _lost(rows):
        part, without = max(_without(cell, figure, found.best), key=lambda one: one[1].mean)
        cause = f"{part}: {without.mean:.2f}"
        lines.append([scene, f"{load:g}", figure, found.best, _ratio_text(found.ratio), cause])
    return markdown(head, lines or [["none", "", "", "", "", ""]], text_columns=4)


def _causes(rows: Sequence[Row]) -> str:
    """Return a line for each loss and part of ours."""
    head = ["traffic and engines", "load", "figure", "without", "ratio to the best other"]
    lines = [
        [scene, f"{load:g}", figure, part, _ratio_text(one)]
        for (scene, load), figure, cell, found in _lost(rows)
        for part, one in [("nothing", found.ratio), *_without(cell, figure, found.best)]
    ]
    return markdown(head, lines or [["none", "", "", "", ""]], text_columns=4)


_ALL = line_per_row(
    {"traffic and engines": "{scene}", "load": "{load:g}", "policy": "{policy}"},
    (
        Column("goodput", "goodput", 3),
        Column("short P99, s", "short_ttft_p99_s"),
        Column("long P99, s", "long_ttft_p99_s"),
        Column("TPOT, ms", "tpot_mean_s", 0, 1_000),
        Column("longest wait, s", "queue_wait_max_s", 1),
        Column("tokens/s", "tokens_per_s", 0),
    ),
)
_RATIO = "Geometric means over seeds with their 95 % intervals; above 1, ours is better"
TABLES = {
    "losses": Table(text=_losses, note=f"Simulated. {_RATIO}"),
    "causes": Table(text=_causes, note=f"Simulated. {_RATIO}"),
    "all": Table(
        text=lambda rows: _ALL([row for cell in cells_of(rows).values() for row in cell.values()]),
        note="Simulated; means over seeds with their 95 % intervals",
    ),
}
PICTURES = {"docs/images/defaults.svg": lambda rows_of: picture(rows_of("defaults"))}
