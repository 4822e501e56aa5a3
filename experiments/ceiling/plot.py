"""Draws the cost of a request by replicas, backlog and tenants: `python -m experiments.ceiling.plot`."""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from experiments.ceiling.tables import request_us
from experiments.common.rows import Row, read_rows

HERE = Path(__file__).parent
PICTURE = HERE.parents[1] / "docs" / "images" / "ceiling.svg"
_PANELS = (("events", "replicas"), ("waiting", "waiting"), ("tenants", "tenants"))
_COLOUR = "#1b6ca8"


def draw(rows: Sequence[Row], target: Path) -> None:
    """Three panels with one scale: CPU time of one request in the core."""
    mpl.use("svg")
    # The same picture gives the same file.
    mpl.rcParams["svg.hashsalt"] = "ceiling"
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the choice of a backend

    figure, panels = plt.subplots(1, len(_PANELS), figsize=(9, 3), sharey=True)
    for panel, (part, axis) in zip(panels, _PANELS, strict=True):
        points = [(row.key[axis], request_us(row)) for row in rows if row.key["part"] == part]
        panel.plot(*zip(*points, strict=True), marker="o", color=_COLOUR)
        panel.set_xscale("log")
        panel.set_xlabel(axis)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("us of CPU for each request")
    panels[0].set_ylim(bottom=0)
    figure.tight_layout()
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(read_rows(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results.jsonl"), PICTURE)
