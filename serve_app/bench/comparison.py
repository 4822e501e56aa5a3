"""The difference of two endpoints that served the same requests in turns, with its uncertainty.

Latencies are of the requests that both have completed. Requests of one slice share its queue and its moment,
so they are no independent observations: the slices are. The standard error of a difference comes from
resampling whole slices (the bootstrap of clusters: Cameron, Gelbach, Miller, "Bootstrap-based improvements
for inference with clustered errors", 2008). The 95 % interval is the difference plus and minus that error,
times the point of Student's t for as many slices. Both sides of a pair are always drawn together, so what a
slice does to both cancels.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from serve_app.bench.interleave import AnswerPair
from serve_app.metrics.confidence import t_95
from serve_app.metrics.record import RequestRecord

FEW_SLICES = 6
"""Below so many slices an interval is very wide, and its error is hardly known."""

_RESAMPLES = 400
_SEED = 1

Figures = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """One figure of both endpoints.

    Attributes:
        base, other: at each endpoint.
        difference: other minus base.
        low, high: the 95 % interval of the difference; None when there is only one slice.
        n: requests that it is taken from.
    """

    base: float
    other: float
    difference: float
    low: float | None
    high: float | None
    n: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def as_json(self) -> dict[str, float | int | bool | None]:
        """All figures by name; `is_clear` says whether the interval leaves out zero."""
        return asdict(self) | {"is_clear": self.is_clear}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointComparison:
    """All differences.

    Attributes:
        latencies: in seconds, by latency and figure: `ttft_s`, `tpot_s`, `e2e_s`; `mean`, `p50`, `p99`.
        errors: share of the requests that did not complete.
        pairs, slices: requests that both got, and slices of them.
        completed_by_both: pairs that the latencies come from.
    """

    latencies: dict[str, dict[str, PairedDifference]]
    errors: PairedDifference
    pairs: int
    slices: int
    completed_by_both: int

    def as_json(self) -> dict[str, object]:
        """Everything by name."""
        return {
            "pairs": self.pairs,
            "completed_by_both": self.completed_by_both,
            "slices": self.slices,
            "latencies": {
                latency: {name: each.as_json() for name, each in figures.items()}
                for latency, figures in self.latencies.items()
            },
            "errors": self.errors.as_json(),
        }


_LATENCIES: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft_s": lambda record: record.ttft_s,
    "tpot_s": lambda record: record.tpot_s,
    "e2e_s": lambda record: record.e2e_s,
}


def compare(pairs: Sequence[AnswerPair]) -> EndpointComparison:
    """Compare the two endpoints over these pairs.

    Raises:
        ValueError: there are no pairs.
    """
    if not pairs:
        raise ValueError("no request went to both endpoints: there is nothing to compare")
    completed = [pair for pair in pairs if pair.base.completed and pair.other.completed]
    latencies = {}
    for name, latency in _LATENCIES.items():
        slices = _slices(completed, latency)
        if slices:
            latencies[name] = _differences(slices, _latency_figures, ("mean", "p50", "p99"))
    lost = _slices(pairs, lambda record: float(not record.completed))
    return EndpointComparison(
        latencies=latencies,
        errors=_differences(lost, _mean, ("share",))["share"],
        pairs=len(pairs),
        slices=len({pair.slice_number for pair in pairs}),
        completed_by_both=len(completed),
    )


def _slices(pairs: Iterable[AnswerPair], value_of: Callable[[RequestRecord], float | None]) -> list[Figures]:
    """For each slice an array of two rows, the values of both endpoints; pairs without one are left out."""
    slices: dict[int, list[tuple[float, float]]] = {}
    for pair in pairs:
        base, other = value_of(pair.base), value_of(pair.other)
        if base is not None and other is not None:
            slices.setdefault(pair.slice_number, []).append((base, other))
    return [np.array(values).T for values in slices.values()]


def _latency_figures(values: Figures) -> Figures:
    """Mean, median and 99th percentile of each row."""
    figures: Figures = np.vstack((values.mean(axis=1), np.quantile(values, (0.5, 0.99), axis=1)))
    return figures


def _mean(values: Figures) -> Figures:
    figures: Figures = values.mean(axis=1)[np.newaxis]
    return figures


def _differences(
    slices: list[Figures], figures_of: Callable[[Figures], Figures], names: Sequence[str]
) -> dict[str, PairedDifference]:
    """The figures of both rows over all slices, with the interval of their difference."""
    whole = np.concatenate(slices, axis=1)
    figures = figures_of(whole)
    half = _half_widths(slices, figures_of)
    found = {}
    for place, name in enumerate(names):
        base, other = (float(figure) for figure in figures[place])
        difference = other - base
        found[name] = PairedDifference(
            base=base,
            other=other,
            difference=difference,
            low=None if half is None else difference - float(half[place]),
            high=None if half is None else difference + float(half[place]),
            n=whole.shape[1],
        )
    return found


def _half_widths(slices: list[Figures], figures_of: Callable[[Figures], Figures]) -> Figures | None:
    """Half the width of the interval of each figure's difference."""

    def difference(drawn: Figures) -> Figures:
        base, other = figures_of(drawn).T
        found: Figures = other - base
        return found

    return half_widths(slices, difference)


def half_widths(slices: Sequence[Figures], figures_of: Callable[[Figures], Figures]) -> Figures | None:
    """Half the width of the 95 % interval of each figure, from resampled slices; None for a single slice.

    Args:
        slices: values of each, a column for each request.
        figures_of: the figures of some of these columns, as one row.
    """
    count = len(slices)
    if count == 1:
        return None
    rng = np.random.default_rng(_SEED)
    resampled = np.empty((_RESAMPLES, figures_of(slices[0]).shape[0]))
    for row in resampled:
        row[:] = figures_of(
            np.concatenate([slices[index] for index in rng.integers(0, count, count)], axis=1)
        )
    # Resampling knows the spread of `count` slices, not of the population that they are from.
    half: Figures = t_95(count - 1) * math.sqrt(count / (count - 1)) * resampled.std(axis=0, ddof=1)
    return half
