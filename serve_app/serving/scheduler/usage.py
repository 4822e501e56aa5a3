"""Ledger of usage: requests and tokens per API key, model name and day (UTC).

It counts requests that ended in an engine, with the engine's token counts. Engines count at the end of an
answer, so an answer that its client cancels counts with its estimate. Otherwise clients could evade their
budgets. Lines of past days do not change, even if the clock is set back slightly. If the clock was far ahead,
the wrong day is abandoned once the clock is right, so that later days are not affected. The ledger outlives
its scheduler through persisted state. A scheduler that is killed loses what was counted since the last write.

Learned state may be discarded if it does not fit; usage may not, so it has its own document. While the store
cannot be read at the start, nothing is overwritten; new counts are added to the stored ones later.
"""

import asyncio
import contextvars
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from prometheus_client import CollectorRegistry

from serve_app.core.commands import Conclude
from serve_app.core.events import DispatchFailed, Finished
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.snapshot import Count, decoded
from serve_app.request import Usage
from serve_app.serving.metric_cells import counters
from serve_app.serving.scheduler.gauges import BoundedNames
from serve_app.serving.scheduler.journal import Entry
from serve_app.serving.state import StatePersister, StateStore

USAGE_KIND = "usage"

# A quarter, for billing; older days are dropped.
_KEPT_DAYS = 92
# Keys with their own metrics; further ones are counted together.
_MAX_LABELS = 1_000

# Requests, prompt tokens, cached tokens, generated tokens.
_Figures = tuple[int, ...]
_NOTHING = (0, 0, 0, 0)
_DAY_S = 86_400.0
_Day = dict[str, dict[str, _Figures]]


class _State(Struct):
    """Figures by day, key and model."""

    days: dict[str, dict[str, dict[str, tuple[Count, Count, Count, Count]]]]


class UsageLedger:
    """Usage of each key; the clock returns seconds since the epoch."""

    def __init__(
        self, model: str, registry: CollectorRegistry, clock: Callable[[], float] = time.time
    ) -> None:
        self._model, self._clock = model, clock
        self._days: dict[str, _Day] = {}
        # Days in a returned state; they are copied before further counting.
        self._handed_out: set[str] = set()
        self._label = BoundedNames(_MAX_LABELS)
        text = "Requests that ended in an engine, by API key."
        self._requests = counters(registry, "ewsjf_key_requests", text, ("model", "key"))
        text = "Tokens by API key, as counted by the engines."
        self._tokens = counters(registry, "ewsjf_key_tokens", text, ("model", "key", "kind"))

    def __repr__(self) -> str:
        return f"<UsageLedger {self._model} days={len(self._days)}>"

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handler of the ends of requests."""
        return {Conclude: self._on_conclusion}

    def _on_conclusion(self, entry: Entry, conclude: Conclude, scheduled: ScheduledRequest) -> None:
        """Count a request that ended in an engine and had a key."""
        submission, event = scheduled.request.submission, entry.event
        ended_in_engine = conclude.dispatched and not isinstance(event, DispatchFailed)
        if submission.key is not None and submission.key.key_id and ended_in_engine:
            is_reported = isinstance(event, Finished)
            usage = scheduled.used_after(conclude.conclusion.outcome) if is_reported else None
            self.add(submission.key.key_id, submission.spec.model, usage)

    def add(self, key_id: str, model: str, usage: Usage | None) -> None:
        """Count a request under the model name that it used, with the engine's counts if it sent any."""
        usage = usage or Usage(prompt_tokens=0, output_tokens=0)
        counted = (1, usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
        _count(self._today().setdefault(key_id, {}), model, counted)
        label = self._label(key_id)
        self._requests[self._model, label].inc()
        for kind, amount in zip(("prompt", "cached", "generated"), counted[1:], strict=True):
            self._tokens[self._model, label, kind].inc(amount)

    def rows(self) -> list[dict[str, Any]]:
        """Return all lines, the oldest day first."""
        names = ("requests", "prompt_tokens", "cached_tokens", "generated_tokens")
        return [
            {"day": day, "key": key_id, "model": model, **dict(zip(names, figures, strict=True))}
            for day, key_id, model, figures in _lines(self._days)
        ]

    def spent(self, keys: Iterable[str]) -> dict[str, dict[str, dict[str, _Figures]]]:
        """Return what keys have used in the current day and month: by key, period and model."""
        today = _day_of(self._clock())
        found: dict[str, dict[str, dict[str, _Figures]]] = {}
        wanted = set(keys)
        for day in self._days:
            if day[:7] != today[:7]:
                continue
            for key_id in wanted & self._days[day].keys():
                for model, figures in self._days[day][key_id].items():
                    for period in ("day", "month") if day == today else ("month",):
                        _count(found.setdefault(key_id, {}).setdefault(period, {}), model, figures)
        return found

    def state(self) -> dict[str, Any]:
        """Return the state as plain values that later requests do not change."""
        self._handed_out.update(self._days)
        return {"days": dict(self._days)}

    def add_stored(self, document: Mapping[str, Any]) -> None:
        """Add a state that another process has stored.

        Raises:
            ValueError: the state is invalid; nothing was added.
        """
        for day, key_id, model, figures in _lines(decoded(document, _State).days):
            _count(self._days.setdefault(day, {}).setdefault(key_id, {}), model, figures)

    def _today(self) -> _Day:
        now = self._clock()
        # If the clock was set back by less than a day, continue with the last day.
        tomorrow = _day_of(now + _DAY_S)
        day = max(_day_of(now), max((each for each in self._days if each <= tomorrow), default=""))
        if day not in self._days:
            self._days[day] = {}
            for old in sorted(self._days)[:-_KEPT_DAYS]:
                if old != day:
                    del self._days[old]
        elif day in self._handed_out:
            self._handed_out.discard(day)
            self._days[day] = {key_id: dict(models) for key_id, models in self._days[day].items()}
        return self._days[day]


def _count(sums: dict[str, _Figures], model: str, figures: _Figures) -> None:
    """Add figures to those of a model."""
    sums[model] = tuple(map(sum, zip(sums.get(model, _NOTHING), figures, strict=True)))


def _lines(
    days: Mapping[str, Mapping[str, Mapping[str, _Figures]]],
) -> Iterator[tuple[str, str, str, _Figures]]:
    for day in sorted(days):
        for key_id, models in days[day].items():
            for model, figures in models.items():
                yield day, key_id, model, figures


def _day_of(moment: float) -> str:
    return _name_of(int(moment // _DAY_S))


# Called twice at the end of each request.
@functools.lru_cache(maxsize=4)
def _name_of(day: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(day * _DAY_S))


class PersistentUsage:
    """Persistent ledger of one model; must be constructed on a running event loop.

    Args:
        state_uri: see `StateStore`; None disables persistence.
        scope: unique to the application and model.
        registry: exports the counts since the start of this process.

    Attributes:
        ledger: the current counts.
    """

    def __init__(
        self, model: str, state_uri: str | None, scope: str, interval_s: float, registry: CollectorRegistry
    ) -> None:
        self.ledger = UsageLedger(model, registry)
        self._model, self._interval_s = model, interval_s
        self._keeper: StatePersister | None = None
        self._restored = False
        self._retry: asyncio.Task[None] | None = None
        if state_uri is not None:
            store = StateStore(state_uri, USAGE_KIND, scope)
            self._keeper = StatePersister(store, model, self._take, interval_s)

    def __repr__(self) -> str:
        return f"<PersistentUsage {self.ledger}>"

    async def load(self) -> None:
        """Read the stored state; while the store is unreachable, retry in the background."""
        if self._keeper is None or self._restored or self._retry is not None:
            return
        self._restored = await self._keeper.load(self.ledger.add_stored)
        if not self._restored:
            loop = asyncio.get_running_loop()
            self._retry = loop.create_task(self._try_again(self._keeper), context=contextvars.Context())

    def start(self) -> None:
        """Start periodic writes."""
        if self._keeper is not None:
            self._keeper.start()

    async def save(self) -> None:
        """Write the state now."""
        if self._keeper is not None:
            await self._keeper.save()

    async def close(self) -> None:
        """Write the state a last time."""
        keeper, self._keeper = self._keeper, None
        if self._retry is not None:
            self._retry.cancel()
        if keeper is not None:
            await keeper.close()

    def shown(self) -> dict[str, Any]:
        """Return all lines, for operators and billing."""
        return {"model": self._model, "rows": self.ledger.rows()}

    def _take(self) -> Mapping[str, Any] | None:
        return self.ledger.state() if self._restored else None

    async def _try_again(self, keeper: StatePersister) -> None:
        while not self._restored:
            await asyncio.sleep(self._interval_s)
            self._restored = await keeper.load(self.ledger.add_stored)
