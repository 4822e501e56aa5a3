"""Table of this experiment."""

from collections.abc import Mapping, Sequence

from experiments.common.rows import Row, where
from experiments.common.tables import Table, load_note, markdown, plus_minus

# Heading, figure, decimals, scale.
Columns = Sequence[tuple[str, str, int, float]]
_COLUMNS: Columns = (
    ("to the grant: mean, ms", "grant_mean_ms", 2, 1.0),
    ("to the grant: P99, ms", "grant_p99_ms", 1, 1.0),
    ("TTFT P50, ms", "ttft_p50_ms", 1, 1.0),
    ("TTFT P99, ms", "ttft_p99_ms", 0, 1.0),
    ("tuner, % of a core", "tuner_cores", 0, 100.0),
    ("scheduler, %", "scheduler_cores", 1, 100.0),
    ("gateway, %", "gateway_cores", 1, 100.0),
)

_HEADLINE = _COLUMNS[:5]


def _headline(rows: Sequence[Row]) -> str:
    return _text(rows, _HEADLINE)


def _all(rows: Sequence[Row]) -> str:
    return _text(rows, _COLUMNS)


def _text(rows: Sequence[Row], columns: Columns) -> str:
    (idle,), (working,) = (where(rows, search=side) for side in ("idle", "working"))
    lines = [
        ["no search", *_cells(idle.figures, columns)],
        ["searching", *_cells(working.figures, columns)],
        ["difference", *_cells(_differences(idle, working), columns)],
    ]
    table = markdown(["tuner", *(heading for heading, *_ in columns)], lines)
    settings = idle.settings
    return (
        f"{table}\n\n{settings['pairs']} pairs of {settings['slice_s']:g} s, "
        f"{settings['rate_per_s']:g} requests/s. {load_note(rows)}"
    ).rstrip()


def _cells(figures: Mapping[str, Sequence[float]], columns: Columns) -> list[str]:
    return [plus_minus(figures[name], decimals, scale=scale) for _, name, decimals, scale in columns]


def _differences(idle: Row, working: Row) -> dict[str, list[float]]:
    """Return the differences, pair by pair."""
    return {
        name: [mine - theirs for mine, theirs in zip(working.figures[name], idle.figures[name], strict=True)]
        for _, name, *_ in _COLUMNS
    }


_NOTE = (
    "Live, two emulated engines. Means over slices with their 95 % intervals; differences are between "
    "neighbouring slices"
)

TABLES = {"headline": Table(text=_headline, note=_NOTE), "all": Table(text=_all, note=_NOTE)}
