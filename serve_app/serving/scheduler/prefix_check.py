"""Check of the prefix index: cached tokens that it predicted, against those that engines reported.

Prefix affinity is worth as much as its index is right. At the end of a request its engine states how many
prompt tokens it had cached. Engines that never state any, as vLLM without `--enable-prompt-tokens-details`,
are left out: their zero means unknown.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from serve_app.core.commands import Conclude
from serve_app.core.events import Finished
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.prefill_cost import DecayingRate
from serve_app.errors import Outcome
from serve_app.serving.metric_cells import Cells, CounterCell, HistogramCell
from serve_app.serving.scheduler.journal import Entry

# Time constant of what operators see: long enough for many requests, short enough for a change of engines.
_RECENT_S = 600.0


@dataclass(slots=True)
class _Recent:
    """Decaying sums of one pool."""

    requests: DecayingRate
    prompt: DecayingRate
    predicted: DecayingRate
    reported: DecayingRate


class PrefixCheck:
    """Observer of the ends of requests.

    Args:
        tokens: counter by model, pool and kind (`predicted`, `reported`).
        errors: histogram by model and pool: predicted minus reported tokens, as a share of the prompt.
    """

    def __init__(
        self, model: str, now: float, tokens: Cells[CounterCell], errors: Cells[HistogramCell]
    ) -> None:
        self._model = model
        self._began_at = now
        self._tokens = tokens
        self._errors = errors
        self._reporting: set[str] = set()
        self._recent: dict[str, _Recent] = {}

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handler of the ends of requests."""
        return {Conclude: self._on_conclusion}

    def _on_conclusion(self, entry: Entry, command: Conclude, scheduled: ScheduledRequest) -> None:
        usage, dispatch = scheduled.usage, scheduled.dispatch
        is_whole = isinstance(entry.event, Finished) and command.conclusion.outcome is Outcome.COMPLETED
        if not is_whole or usage is None or dispatch is None or not usage.prompt_tokens:
            return
        if usage.cached_tokens:
            self._reporting.add(dispatch.replica_id)
        elif dispatch.replica_id not in self._reporting:
            return
        predicted, reported = min(scheduled.cached_tokens, usage.prompt_tokens), usage.cached_tokens
        if not (predicted or reported):
            return
        self._tokens[self._model, dispatch.pool, "predicted"].inc(predicted)
        self._tokens[self._model, dispatch.pool, "reported"].inc(reported)
        self._errors[self._model, dispatch.pool].observe((predicted - reported) / usage.prompt_tokens)
        recent = self._recent.get(dispatch.pool)
        if recent is None:
            recent = _Recent(*(DecayingRate(_RECENT_S, self._began_at) for _ in range(4)))
            self._recent[dispatch.pool] = recent
        recent.requests.add(1, entry.now)
        recent.prompt.add(usage.prompt_tokens, entry.now)
        recent.predicted.add(predicted, entry.now)
        recent.reported.add(reported, entry.now)

    def describe(self, now: float) -> dict[str, dict[str, float]]:
        """Return the requests, prompt tokens and cached tokens of about the last ten minutes, by pool."""
        return {
            pool: {
                "requests": recent.requests.amount(now),
                "prompt_tokens": recent.prompt.amount(now),
                "predicted_tokens": recent.predicted.amount(now),
                "reported_tokens": recent.reported.amount(now),
            }
            for pool, recent in self._recent.items()
        }
