"""Metrics that cost a request next to nothing: plain numbers, put into families when they are scraped.

Counting an event takes a sixth of the time of `prometheus_client`'s own metrics, which take a lock for each.
Whoever counts keeps the cell of its labels, so that labels are not looked up for each event. One thread
counts; another may draw the page up meanwhile.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from time import time
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
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

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, trace_id: str = "") -> None:
        """Count one value.

        Args:
            trace_id: of a trace that shows it; the latest one of each bucket is kept.
        """
        index = bisect_left(self._bounds, value)
        self._counts[index] += 1
        self._sum += value
        if trace_id:
            self._exemplars[index] = Exemplar({"trace_id": trace_id}, value, time())

    def buckets(self) -> tuple[list[tuple[str, float] | tuple[str, float, Exemplar]], float]:
        """Counts up to each bound, each with its exemplar, and the sum of all values."""
        # A copy: the bucket of everything must not be behind another one.
        counts, total = list(self._counts), self._sum
        names = (*map(floatToGoString, self._bounds), "+Inf")
        shown: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for index, (name, count) in enumerate(zip(names, accumulate(counts), strict=True)):
            exemplar = self._exemplars.get(index)
            shown.append((name, count) if exemplar is None else (name, count, exemplar))
        return shown, total


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
