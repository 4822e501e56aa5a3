"""Draws cost against bytes of a body and chunks of a stream: `python -m experiments.overhead.plot`."""

import sys
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.rows import Row, read_rows, where
from experiments.overhead.run import REMOTE
from experiments.overhead.system import DIRECT, OURS, RequestKind
from experiments.overhead.tables import layer_ms

HERE = Path(__file__).parent
PICTURE = HERE.parents[1] / "docs" / "images" / "overhead.svg"
_CLIENTS = 16


def draw(rows: Sequence[Row], target: Path) -> None:
    """Two panels: bodies that are answered whole, and streams; a line for each system."""
    # The same picture gives the same file.
    rcParams["svg.hashsalt"] = "overhead"
    cells = [(_kind(row), row) for row in where(rows, engines=REMOTE, clients=_CLIENTS, label="")]
    bodies = [(kind.body_bytes, row) for kind, row in cells if not kind.chunks and not kind.shared]
    streams = [(kind.chunks, row) for kind, row in cells if kind.chunks]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _panel(left, bodies, "bytes of the prompt")
    _panel(right, streams, "chunks of the answer")
    left.set_ylabel("CPU ms per request, without engine and client")
    left.legend(fontsize=8)
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


def _kind(row: Row) -> RequestKind:
    return RequestKind(**row.settings["requests"][row.key["kind"]])


def _panel(axes: Axes, cells: Sequence[tuple[int, Row]], label: str) -> None:
    names = dict.fromkeys(name for _, row in cells for name in row.figures if name != DIRECT)
    for name in names:
        mine = sorted((cell for cell in cells if name in cell[1].figures), key=itemgetter(0))
        axes.plot(
            [size for size, _ in mine],
            [layer_ms(row.figures[name]) for _, row in mine],
            marker="o",
            markersize=3,
            linewidth=2.2 if name == OURS else 1.2,
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel=label)
    axes.grid(visible=True, alpha=0.3)


if __name__ == "__main__":
    draw(read_rows(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results.jsonl"), PICTURE)
