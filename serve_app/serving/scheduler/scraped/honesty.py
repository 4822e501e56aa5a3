"""How honest waiting requests were told when they would start."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from serve_app.request import PriorityClass
from serve_app.scheduling.outlook.watched import VERDICTS, Honesty
from serve_app.serving.metric_cells import CounterCell, HistogramCell, counters, histograms

# Actual minus expected: below zero where requests started sooner than told.
_ERROR_BOUNDS_S = (-60, -30, -10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 2, 5, 10, 30, 60)


class HonestyMetrics:
    """Counters and histograms of one model's estimates."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        self._model = model
        text = (
            "Estimates of their start that requests were told in the queue, the first and the last of each, "
            "by whether the start was inside the interval, before or after it."
        )
        labels = ("model", "class", "told")
        self._verdicts = counters(registry, "ewsjf_queue_estimates", text, (*labels, "verdict"))
        text = "Actual start minus the one that a waiting request was told to expect, the first and the last."
        name = "ewsjf_queue_estimate_error_seconds"
        self._errors = histograms(registry, name, text, labels, _ERROR_BOUNDS_S)
        self._cells: dict[tuple[PriorityClass, str], tuple[dict[str, CounterCell], HistogramCell]] = {}

    def __repr__(self) -> str:
        return f"<HonestyMetrics {self._model}>"

    def observe(self, honesty: Iterable[Honesty]) -> None:
        """Count what came of estimates."""
        for one in honesty:
            verdicts, errors = self._cells_of(one.priority, one.told)
            verdicts[one.verdict].inc()
            errors.observe(one.error_s)

    def _cells_of(self, priority: PriorityClass, told: str) -> tuple[dict[str, CounterCell], HistogramCell]:
        cells = self._cells.get((priority, told))
        if cells is None:
            labels = self._model, priority.value, told
            # All verdicts at once: a rate of what has not happened yet is 0, not nothing.
            verdicts = {verdict: self._verdicts.labels(*labels, verdict) for verdict in VERDICTS}
            cells = self._cells[priority, told] = verdicts, self._errors.labels(*labels)
        return cells
