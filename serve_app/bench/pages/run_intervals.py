"""Intervals of the figures of one run, from its tenths.

Requests that are in the system together share its queue, so they are no independent observations. The run
is cut into parts of equal time, and whole parts are resampled, as in `comparison`. What lasts longer than a
part, such as a queue that never empties, makes neighbouring parts alike, and the interval too narrow.
"""

from collections.abc import Callable, Sequence

import numpy as np

from serve_app.bench.comparison import Figures, half_widths
from serve_app.metrics.confidence import ConfidenceInterval
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.statistics import Distribution

PARTS = 10
"""Parts of a run."""

# With less in a part there is hardly a figure to resample.
_LEAST_IN_A_PART = 5
_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def latency_intervals(
    records: Sequence[RequestRecord], value_of: Callable[[RequestRecord], float | None]
) -> dict[str, ConfidenceInterval]:
    """Mean and percentiles of a latency with their intervals, by name; bounds are None for too few requests.

    Args:
        records: of requests that completed, on a clock from 0.
    """
    timed = [(record.arrived_at, value) for record in records if (value := value_of(record)) is not None]
    if not timed:
        return {}
    whole = Distribution.of(value for _, value in timed)
    parts = _parts(timed)
    half = half_widths(parts, _figures) if len(parts) > 1 else None
    found = {}
    for place, name in enumerate(("mean", *_QUANTILES)):
        figure = getattr(whole, name)
        low, high = (
            (None, None) if half is None else (figure - float(half[place]), figure + float(half[place]))
        )
        found[name] = ConfidenceInterval(figure, low, high, len(parts))
    return found


def _parts(timed: Sequence[tuple[float, float]]) -> list[Figures]:
    """The values of each part of the run, in rows of one; a single part when there are too few."""
    if len(timed) < PARTS * _LEAST_IN_A_PART:
        return [np.array([[value for _, value in timed]])]
    first = min(at for at, _ in timed)
    width = (max(at for at, _ in timed) - first) / PARTS
    parts: dict[int, list[float]] = {}
    for at, value in timed:
        parts.setdefault(min(PARTS - 1, int((at - first) / width)) if width > 0 else 0, []).append(value)
    return [np.array([values]) for _, values in sorted(parts.items())]


def _figures(values: Figures) -> Figures:
    row = values[0]
    figures: Figures = np.array([row.mean(), *np.quantile(row, list(_QUANTILES.values()))])
    return figures
