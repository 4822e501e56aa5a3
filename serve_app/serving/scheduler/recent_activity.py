"""The last minutes of one model in slots of five seconds: outcomes, times to first token, service of tenants.

It is always recorded, so that the dashboard shows what preceded an incident. A slot has counts, not single
requests. It survives changes of settings, but not the process.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from serve_app.core.commands import Conclude
from serve_app.core.events import Arrived, FirstToken
from serve_app.core.request import ScheduledRequest
from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from serve_app.serving.scheduler.journal import Entry

SLOT_S = 5.0
SLOTS = 120
# Per slot; further tenants are counted together. Bounds the memory at some MB.
_MAX_TENANTS = 500
_OTHERS = "(others)"
# Sized for a person on a page.
_TENANTS_SHOWN = 50
# Slots in which a queue must be longer each time to have grown, and by how many requests in all.
_GROWTH_SLOTS, _LEAST_GROWTH = 4, 10
# Times are counted in steps of 10 % from a millisecond on.
_MIN_S = 0.001
_STEP = math.log(1.1)


def _step_of(seconds: float) -> int:
    return max(0, math.ceil(math.log(max(seconds, _MIN_S) / _MIN_S) / _STEP))


def _quantile_s(steps: Counter[int], share: float) -> float | None:
    """Return a quantile of the counted times, at most 10 % too high; None if there are none."""
    wanted = share * steps.total()
    for step in sorted(steps):
        wanted -= steps[step]
        if wanted <= 0:
            return round(_MIN_S * math.exp(step * _STEP), 6)
    return None


@dataclass(slots=True)
class _Slot:
    """Counts of one period; `number` is its index on the loop's clock."""

    number: int
    outcomes: Counter[tuple[PriorityClass, Outcome]] = field(default_factory=Counter)
    first_tokens: dict[PriorityClass, Counter[int]] = field(default_factory=dict)
    tokens: Counter[tuple[PriorityClass, str]] = field(default_factory=Counter)
    peak_waiting: int = 0
    document: dict[str, Any] | None = None

    def add(self, other: "_Slot") -> None:
        """Add the counts of another slot."""
        self.outcomes.update(other.outcomes)
        self.tokens.update(other.tokens)
        for priority, steps in other.first_tokens.items():
            self.first_tokens.setdefault(priority, Counter()).update(steps)

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return outcomes and quantiles of times to first token, by class."""
        outcomes: dict[PriorityClass, dict[str, int]] = {priority: {} for priority in PriorityClass}
        for (priority, outcome), count in self.outcomes.items():
            outcomes[priority][outcome.value] = count
        return {
            priority.value: {
                "outcomes": outcomes[priority],
                "first_tokens": steps.total(),
                "ttft_p50_s": _quantile_s(steps, 0.5),
                "ttft_p95_s": _quantile_s(steps, 0.95),
                "ttft_p99_s": _quantile_s(steps, 0.99),
            }
            for priority in PriorityClass
            for steps in (self.first_tokens.get(priority, Counter()),)
        }

    def served(self) -> dict[str, Any]:
        """Return the tokens of each tenant and class as counted by engines, most first."""
        shown = self.tokens.most_common(_TENANTS_SHOWN)
        return {
            "rows": [
                {"priority": priority.value, "tenant": tenant, "tokens": count}
                for (priority, tenant), count in shown
            ],
            "omitted": len(self.tokens) - len(shown),
            "tokens": self.tokens.total(),
        }


def _sum_of(slots: Iterable[_Slot]) -> _Slot:
    total = _Slot(0)
    for slot in slots:
        total.add(slot)
    return total


class RecentActivity:
    """Slots of recent activity, the latest last; the clock is that of the entries, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._slots: deque[_Slot] = deque(maxlen=SLOTS)
        self._now_ends = -math.inf
        # Cached sum of the slots before the current one.
        self._closed: tuple[int, _Slot] | None = None

    def __repr__(self) -> str:
        return f"<RecentActivity slots={len(self._slots)}>"

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handlers of what is counted."""
        return {
            Arrived: self._on_arrival,
            FirstToken: self._on_first_token,
            Conclude: self._on_conclusion,
        }

    def _on_arrival(self, entry: Entry) -> None:
        slot = self._slot(entry.now)
        slot.peak_waiting = max(slot.peak_waiting, len(entry.core.queue))

    def _on_first_token(self, entry: Entry) -> None:
        scheduled, now = entry.scheduled, entry.now
        # A gateway that reconnects may repeat a first token; only the first report counts.
        if scheduled is not None and scheduled.started_at == now and scheduled.request.spec.streamed:
            firsts, priority = self._slot(now).first_tokens, scheduled.request.priority
            if priority not in firsts:
                firsts[priority] = Counter()
            firsts[priority][_step_of(now - scheduled.request.arrived_at)] += 1

    def _on_conclusion(self, entry: Entry, command: Conclude, scheduled: ScheduledRequest) -> None:
        slot, usage, request = self._slot(entry.now), scheduled.usage, scheduled.request
        priority = request.priority
        slot.outcomes[priority, command.conclusion.outcome] += 1
        if usage is not None:
            key = priority, request.tenant
            if key not in slot.tokens and len(slot.tokens) >= _MAX_TENANTS:
                key = priority, _OTHERS
            slot.tokens[key] += usage.prompt_tokens + usage.output_tokens

    def document(self) -> dict[str, Any]:
        """Return all slots, the oldest first; slots without events are omitted."""
        now = self._clock()
        current = int(now // SLOT_S)
        recent = [slot for slot in self._slots if slot.number > current - SLOTS]
        if self._closed is None or self._closed[0] != current:
            self._closed = current, _sum_of(slot for slot in recent if slot.number < current)
        total = _sum_of([self._closed[1], *(slot for slot in recent if slot.number == current)])
        return {
            "slot_s": SLOT_S,
            "slots": SLOTS,
            "known_s": min(now - self._began, SLOT_S * SLOTS),
            "current": current,
            "series": [self._document_of(slot, current) for slot in recent],
            "last_minute": _sum_of(slot for slot in recent if slot.number > current - 60 / SLOT_S).summary(),
            "last_minutes": total.summary(),
            "tenants": total.served(),
        }

    def grown_from(self) -> int | None:
        """Return the length of the queue from which it has grown for 20 s, or None if it has not."""
        last = int(self._clock() // SLOT_S)
        slots = [each for each in self._slots if last - _GROWTH_SLOTS <= each.number + 1 <= last]
        peaks = [each.peak_waiting for each in slots]
        if len(peaks) <= _GROWTH_SLOTS or peaks[-1] - peaks[0] < _LEAST_GROWTH:
            return None
        return peaks[0] if all(before < after for before, after in pairwise(peaks)) else None

    def _slot(self, now: float) -> _Slot:
        if now >= self._now_ends:
            number = int(now // SLOT_S)
            self._slots.append(_Slot(number))
            self._now_ends = (number + 1) * SLOT_S
        return self._slots[-1]

    def _document_of(self, slot: _Slot, current: int) -> dict[str, Any]:
        if slot.document is not None:
            return slot.document
        found: dict[str, Any] = {"number": slot.number, "peak_waiting": slot.peak_waiting, "outcomes": {}}
        for (_, outcome), count in slot.outcomes.items():
            found["outcomes"][outcome.value] = found["outcomes"].get(outcome.value, 0) + count
        found["ttft_p50_s"] = {name.value: _quantile_s(each, 0.5) for name, each in slot.first_tokens.items()}
        found["ttft_p95_s"] = {
            name.value: _quantile_s(each, 0.95) for name, each in slot.first_tokens.items()
        }
        if slot.number < current:
            # It no longer changes.
            slot.document = found
        return found
