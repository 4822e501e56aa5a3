"""Metrics that cost a request next to nothing: plain numbers, put into families when they are scraped.

Counting an event takes a sixth of the time of `prometheus_client`'s own metrics, which take a lock for each.
Whoever counts keeps the cell of its labels, so that labels are not looked up for each event. One thread
counts; another may draw the page up meanwhile.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class CounterCell:
    """The count of one set of labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Count so many more."""
        self.value += amount


class HistogramCell:
    """What was observed under one set of labels.

    Args:
        bounds: upper bounds of the buckets, ascending, without the infinite one.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Counts up to each bound, and the sum of all values."""
        # A copy: the bucket of everything must not be behind another one.
        counts, total = list(self._counts), self._sum
        names = (*map(floatToGoString, self._bounds), "+Inf")
        return list(zip(names, map(float, accumulate(counts)), strict=True)), total


_Cell = TypeVar("_Cell", CounterCell, HistogramCell)


class CellFamily(Collector, Generic[_Cell]):
    """A metric: its cells by their labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str], make: Callable[[], _Cell]) -> None:
        self.name, self._text, self._labels = name, text, tuple(labels)
        self._make: Callable[[], _Cell] = make
        self._cells: dict[tuple[str, ...], _Cell] = {}

    def __repr__(self) -> str:
        return f"<CellFamily {self.name} {len(self._cells)}>"

    def labels(self, *values: str) -> _Cell:
        """The cell of these labels, in the order of their names."""
        cell = self._cells.get(values)
        if cell is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self.name} has the labels {', '.join(self._labels)}, got {values}")
            cell = self._cells[values] = self._make()
        return cell

    def collect(self) -> Iterator[Metric]:
        """Yield the family; prometheus_client asks for it at each page."""
        # A list is made at once; cells may come while a page is drawn up in another thread.
        cells = list(self._cells.items())
        if self._make is CounterCell:
            counter = CounterMetricFamily(self.name, self._text, labels=self._labels)
            for values, cell in cells:
                assert isinstance(cell, CounterCell)
                counter.add_metric(values, cell.value)
            yield counter
            return
        histogram = HistogramMetricFamily(self.name, self._text, labels=self._labels)
        for values, cell in cells:
            assert isinstance(cell, HistogramCell)
            buckets, total = cell.buckets()
            histogram.add_metric(values, buckets, total)
        yield histogram


def counters(
    registry: CollectorRegistry, name: str, text: str, labels: Sequence[str]
) -> CellFamily[CounterCell]:
    """A metric of counts, registered; its samples end in `_total`."""
    family = CellFamily(name, text, labels, CounterCell)
    registry.register(family)
    return family


def histograms(
    registry: CollectorRegistry, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]
) -> CellFamily[HistogramCell]:
    """A metric of distributions, registered."""
    limits = tuple(map(float, bounds))
    family: CellFamily[HistogramCell] = CellFamily(name, text, labels, lambda: HistogramCell(limits))
    registry.register(family)
    return family
