"""What the tuner tells of itself: its searches, and what it decided.

The tuner has no page of its own. It tells its scheduler, so its counts begin anew with its process.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class TunerFigures(Collector):
    """The tuner's counts as it last told them.

    Attributes:
        shown: what it told, see `ParameterLoop.document`; empty without a tuner.
        frozen: nothing may be tried.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.shown: Mapping[str, Any] = {}
        self.frozen = False

    def __repr__(self) -> str:
        return f"<TunerFigures {self._model}>"

    def collect(self) -> Iterator[Metric]:
        """Yield the families; prometheus_client asks for them at each page."""
        counts: Mapping[str, Any] = self.shown.get("counts", {})
        text = "Searches of the tuner that ended."
        searches = CounterMetricFamily("ewsjf_tuner_searches", text, labels=("model",))
        text = "Candidates that the tuner tried in its twin."
        trials = CounterMetricFamily("ewsjf_tuner_trials", text, labels=("model",))
        text = "Decisions of the tuner about values that it tried in production."
        decisions = CounterMetricFamily("ewsjf_tuner_decisions", text, labels=("model", "decision"))
        text = "1 while the tuner may try nothing, by command or because it failed."
        frozen = GaugeMetricFamily("ewsjf_tuner_frozen", text, labels=("model",))
        if counts:
            searches.add_metric((self._model,), counts["searches"])
            trials.add_metric((self._model,), counts["trials"])
            for decision, count in counts["decisions"].items():
                decisions.add_metric((self._model, decision), count)
            frozen.add_metric((self._model,), self.frozen)
        yield from (searches, trials, decisions, frozen)
