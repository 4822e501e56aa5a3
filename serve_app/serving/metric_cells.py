"""Metrics that cost a request next to nothing: plain numbers, put into families when they are scraped.

Counting an event takes a sixth of the time of `prometheus_client`'s own metrics, which take a lock for each.
Labels may be members of a `StrEnum`, which are found faster than their `value` is read. One thread counts;
another may draw the page up at the same time.
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


class Cells(dict[tuple[str, ...], _Cell], Generic[_Cell]):
    """Cells of a metric by the values of its labels. A missing cell is created on access.

    Args:
        name: of the metric, for the message.
        labels: their names.
    """

    def __init__(self, name: str, labels: tuple[str, ...], make: Callable[[], _Cell]) -> None:
        super().__init__()
        self._name, self._labels = name, labels
        self._make: Callable[[], _Cell] = make

    def __missing__(self, values: tuple[str, ...]) -> _Cell:
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {', '.join(self._labels)}, got {values}")
        cell = self[values] = self._make()
        return cell


class _Family(Collector):
    """Writes the cells of one metric."""

    def __init__(self, collected: Callable[[], Metric]) -> None:
        self._collected = collected

    def collect(self) -> Iterator[Metric]:
        """Yield the family; prometheus_client asks for it at each page."""
        yield self._collected()


def counters(
    registry: CollectorRegistry, name: str, text: str, labels: tuple[str, ...]
) -> Cells[CounterCell]:
    """A metric of counts, registered; its samples end in `_total`."""
    cells = Cells(name, labels, CounterCell)

    def collected() -> Metric:
        family = CounterMetricFamily(name, text, labels=labels)
        # Copied at once: cells may be added while another thread renders a page.
        for values, cell in list(cells.items()):
            family.add_metric(values, cell.value)
        return family

    registry.register(_Family(collected))
    return cells


def histograms(
    registry: CollectorRegistry, name: str, text: str, labels: tuple[str, ...], bounds: Sequence[float]
) -> Cells[HistogramCell]:
    """A metric of distributions, registered."""
    limits = tuple(map(float, bounds))
    cells = Cells(name, labels, lambda: HistogramCell(limits))

    def collected() -> Metric:
        family = HistogramMetricFamily(name, text, labels=labels)
        for values, cell in list(cells.items()):
            buckets, total = cell.buckets()
            family.add_metric(values, buckets, total)
        return family

    registry.register(_Family(collected))
    return cells
