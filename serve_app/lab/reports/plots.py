"""Plots of request records, common to all reports of runs, with any number of runs in each."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serve_app.core.metrics.record import RequestRecord
from serve_app.lab.reports.document import LineStyle, Plot, PlotAxis, Series, Unit

Floats = NDArray[np.float64]
Values = Mapping[str, Sequence[float]]
Records = Mapping[str, Sequence[RequestRecord]]

_CDF_POSITIONS = 400
# A distribution covers five decades at most, because shorter times are negligible.
_CDF_DECADES = 5.0
_TIME_BINS = 200
# Bins of lengths per octave, and the minimum number of requests for a mean and a P95.
_OCTAVE_PARTS = 2
_MIN_FOR_MEAN = 5
_MIN_FOR_P95 = 40


@dataclass(frozen=True, slots=True)
class Curves:
    """Lines over common positions.

    Attributes:
        positions: positions on the horizontal axis, ascending.
        lines: values by name, one per place; None where there is none.
    """

    positions: list[float]
    lines: dict[str, list[float | None]]

    def series(self, base: str | None) -> list[Series]:
        """Return the lines as series of a plot, coloured by position; `base` names the baseline, if any."""
        return [
            Series(
                name=name,
                values=values,
                style=LineStyle.BASELINE if name == base else LineStyle.LINE,
                colour=number,
            )
            for number, (name, values) in enumerate(self.lines.items())
        ]


def distributions(values: Values) -> Curves:
    """Return the cumulative distribution of each sample, at positions with equal ratios."""
    largest = max((max(sample) for sample in values.values() if len(sample)), default=0.0)
    if largest <= 0:
        return Curves([], {name: [] for name in values})
    positive = [value for sample in values.values() for value in sample if value > 0]
    smallest = max(min(positive), largest / 10**_CDF_DECADES)
    # Start just below the smallest value, so that a line begins at its lowest point.
    positions = np.geomspace(0.98 * smallest, largest, _CDF_POSITIONS)
    positions[-1] = largest
    lines: dict[str, list[float | None]] = {}
    for name, sample in values.items():
        ordered = np.sort(np.asarray(sample, dtype=np.float64))
        if not len(ordered):
            lines[name] = [None] * len(positions)
            continue
        shares = np.searchsorted(ordered, positions, side="right") / len(ordered)
        lines[name] = [float(share) for share in shares]
    return Curves([float(place) for place in positions], lines)


def ttfts(records: Sequence[RequestRecord]) -> list[float]:
    """Return the times to first token of completed requests, in seconds."""
    return [record.ttft_s for record in records if record.completed and record.ttft_s is not None]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None for too few values."""
    return float(np.mean(values)) if len(values) >= _MIN_FOR_MEAN else None


def p95(values: Sequence[float]) -> float | None:
    """Return the 95th percentile, or None for too few values."""
    return float(np.quantile(values, 0.95)) if len(values) >= _MIN_FOR_P95 else None


def by_length(records: Records, figure: Callable[[Sequence[float]], float | None]) -> Curves:
    """Return a figure of the TTFT by range of prompt lengths, with two ranges per octave."""
    bins: dict[int, dict[str, list[float]]] = {}
    for name, members in records.items():
        for record in members:
            if record.completed and record.ttft_s is not None:
                part = int(_OCTAVE_PARTS * math.log2(max(1, record.prompt_tokens)))
                bins.setdefault(part, {}).setdefault(name, []).append(record.ttft_s)
    parts = sorted(bins)
    return Curves(
        [2 ** ((part + 0.5) / _OCTAVE_PARTS) for part in parts],
        {name: [figure(bins[part].get(name, [])) for part in parts] for name in records},
    )


def without_first_token(records: Records) -> Curves:
    """Return the mean number of requests that have arrived and have no token yet, by bin of time."""
    spans = {
        name: np.array(
            [(record.arrived_at, record.first_token_at or record.finished_at) for record in members],
            dtype=np.float64,
        ).reshape(-1, 2)
        for name, members in records.items()
    }
    end_s = max((float(one[:, 1].max()) for one in spans.values() if len(one)), default=0.0)
    if end_s <= 0:
        return Curves([], {name: [] for name in records})
    edges = np.linspace(0.0, end_s, _TIME_BINS + 1)
    middles = [float(middle) for middle in (edges[:-1] + edges[1:]) / 2]
    return Curves(middles, {name: _occupied(one, edges) for name, one in spans.items()})


def over_time(records: Records, bins: int) -> Curves:
    """Return the mean TTFT of the requests by bin of arrival time."""
    end_s = max((record.arrived_at for members in records.values() for record in members), default=0.0)
    if end_s <= 0:
        return Curves([], {name: [] for name in records})
    width = end_s / bins
    lines: dict[str, list[float | None]] = {}
    for name, members in records.items():
        found: list[list[float]] = [[] for _ in range(bins)]
        for record in members:
            if record.completed and record.ttft_s is not None:
                found[min(bins - 1, int(record.arrived_at / width))].append(record.ttft_s)
        lines[name] = [mean(values) for values in found]
    return Curves([(place + 0.5) * width for place in range(bins)], lines)


def _occupied(spans: Floats, edges: Floats) -> list[float | None]:
    # The integral of the number within their span, up to each edge.
    seconds = [float(np.clip(np.minimum(spans[:, 1], edge) - spans[:, 0], 0.0, None).sum()) for edge in edges]
    return [float(value) for value in np.diff(seconds) / np.diff(edges)]


# Minimum requests per bin of time for a meaningful mean, and minimum and maximum number of bins.
_PER_BIN, _MIN_BINS, _MAX_BINS = 20, 6, 80
_TIME = PlotAxis(label="time", unit=Unit.SECONDS, logarithmic=None)


def distribution_plot(title: str, records: Records, base: str | None) -> Plot:
    """Return a plot of the TTFT distribution of completed requests."""
    values = {name: ttfts(members) for name, members in records.items()}
    curves = distributions(values)
    counts = sorted({len(each) for each in values.values()})
    count = " to ".join(f"{each:,}" for each in (counts[0], counts[-1]) if each) if counts else "0"
    if len(counts) == 1:
        count = f"{counts[0]:,}"
    return Plot(
        title=title,
        reading="Share of requests that had their first token by this time; the leftmost curve is best. "
        f"{count} requests per curve.",
        x=PlotAxis(label="TTFT", unit=Unit.SECONDS, logarithmic=True),
        y=PlotAxis(label="share of requests", unit=Unit.SHARE, logarithmic=None),
        positions=curves.positions,
        series=curves.series(base),
    )


def length_plots(records: Records, base: str | None) -> list[Plot]:
    """Return plots of the mean and the tail of the TTFT by prompt length."""
    plots = []
    for title, figure in (("Mean TTFT", mean), ("P95 TTFT", p95)):
        curves = by_length(records, figure)
        plots.append(
            Plot(
                title=f"{title} by prompt length",
                reading="Lower is better. One point per half octave of lengths; gaps have too few requests.",
                x=PlotAxis(label="prompt tokens", unit=Unit.COUNT, logarithmic=True, base=2),
                y=PlotAxis(label=title, unit=Unit.SECONDS, logarithmic=True),
                positions=curves.positions,
                series=curves.series(base),
            )
        )
    return plots


def waiting_plot(title: str, records: Records, base: str | None) -> Plot:
    """Return a plot of the requests without a first token over time. All records are on one clock from 0."""
    curves = without_first_token(records)
    last_s = max((each.arrived_at for members in records.values() for each in members), default=0.0)
    return Plot(
        title=title,
        reading="Lower is better. A line that keeps rising shows overload.",
        x=_TIME,
        y=PlotAxis(label="requests", unit=Unit.NUMBER),
        positions=curves.positions,
        series=curves.series(base),
        marks=[(last_s, "last arrival")],
    )


def ttft_over_time_plot(records: Records, base: str | None) -> Plot:
    """Return a plot of the mean TTFT by arrival time. All records are on one clock from 0."""
    most = max(map(len, records.values()), default=0)
    curves = over_time(records, max(_MIN_BINS, min(_MAX_BINS, most // _PER_BIN)))
    return Plot(
        title="Mean TTFT by time of arrival",
        reading="Lower is better. A line that keeps rising shows overload.",
        x=_TIME,
        y=PlotAxis(label="mean TTFT", unit=Unit.SECONDS),
        positions=curves.positions,
        series=curves.series(base),
    )
