"""Draws the replicas of both pools over time: `python -m experiments.scaling.plot`."""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from experiments.common.rows import Row, read_rows
from experiments.scaling.traffic import STEPS

HERE = Path(__file__).parent
PICTURE = HERE.parents[1] / "docs" / "images" / "scaling_steps.svg"
_RULES = ("work, reacting", "Serve's default")
_COLOURS = {"short": "#1b6ca8", "long": "#c4581a"}


def draw(rows: Sequence[Row], start_s: float, target: Path) -> None:
    """Two panels, one for each rule: replicas that are paid for, of the first seed of the traffic `steps`."""
    mpl.use("svg")
    # The same picture gives the same file.
    mpl.rcParams["svg.hashsalt"] = "scaling"
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the choice of a backend

    figure, panels = plt.subplots(len(_RULES), 1, figsize=(8, 5), sharex=True, sharey=True)
    for panel, rule in zip(panels, _RULES, strict=True):
        (row,) = [
            row
            for row in rows
            if (row.key["case"], row.key["start_s"], row.key["rule"]) == ("steps", start_s, rule)
        ]
        sizes, end_s = row.figures["sizes"][0], row.figures["end_s"][0]
        for pool, colour in _COLOURS.items():
            mine = [(at, paid) for at, name, _, paid in sizes if name == pool]
            times, counts = [at / 60 for at, _ in mine], [paid for _, paid in mine]
            panel.step([*times, end_s / 60], [*counts, counts[-1]], where="post", label=pool, color=colour)
        _phases(panel, row.settings["span_s"] / 60)
        panel.set_title(rule, loc="left", fontsize=10)
        panel.set_ylabel("replicas, paid for")
        panel.grid(alpha=0.3)
    panels[0].legend(loc="center left", fontsize=8)
    panels[-1].set_xlabel("minutes")
    figure.tight_layout()
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


def _phases(panel: object, span_min: float) -> None:
    length = span_min / len(STEPS)
    for number, (short, long) in enumerate(STEPS):
        panel.axvline(number * length, color="#999999", linewidth=0.6, linestyle=":")  # type: ignore[attr-defined]
        text = f"short x{short:g}\nlong x{long:g}"
        where = panel.get_xaxis_transform()  # type: ignore[attr-defined]
        panel.text(  # type: ignore[attr-defined]
            (number + 0.04) * length, 0.84, text, fontsize=7, color="#555555", transform=where
        )


if __name__ == "__main__":
    draw(read_rows(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results.jsonl"), 30, PICTURE)
