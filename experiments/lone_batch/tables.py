"""The table of this experiment."""

from collections.abc import Sequence
from statistics import fmean

from experiments.common.rows import ANY, Row
from experiments.common.tables import Table, markdown
from experiments.lone_batch.run import WAYS
from serve_app.metrics.statistics import percentile


def _served(rows: Sequence[Row]) -> str:
    head = [
        "engine",
        "batch prompts",
        "interactive, every",
        *(f"batch/s, {way}" for way in WAYS),
        *(f"TTFT, {way}" for way in WAYS),
        "of",
    ]
    return markdown(head, [_line(row) for row in rows], text_columns=3)


def _line(row: Row) -> list[str]:
    gap_s = row.key["gap_s"]
    rates = (f"{fmean(row.figures[f'{way}, batch_per_s']):.1f}" for way in WAYS)
    ttfts = [sorted(ttft for seed in row.figures[f"{way}, ttfts_s"] for ttft in seed) for way in WAYS]
    shown = (f"{percentile(of, 50):.2f} / {percentile(of, 90):.2f}" if of else "-" for of in ttfts)
    counted = " / ".join(str(len(of)) for of in ttfts)
    return [
        str(row.key["profile"]),
        str(row.key["batch"]),
        f"{gap_s:g} s" if gap_s else "none",
        *rates,
        *shown,
        counted,
    ]


TABLES = {
    "served": Table(
        text=_served,
        where={"profile": ANY, "batch": ANY, "gap_s": ANY},
        note="Simulated, one replica; TTFT of interactive requests in seconds, median and P90 over all seeds",
    ),
}
