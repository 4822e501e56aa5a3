"""Outcomes of requests since the tuner's last pull: lengths, classes, tenants and times, no text.

They are recorded from events and commands only, so they cost the scheduler one dictionary entry per request.
Losing them is harmless: without a tuner, new outcomes replace old ones. Requests rejected on arrival are
missing, because they are retried with other ids, and so are those that an earlier scheduler admitted.
"""

from collections import deque
from dataclasses import dataclass

from serve_app.core.commands import Command, Conclude, Dispatch
from serve_app.core.events import Event, Finished, FirstToken
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.request import ScheduledRequest
from serve_app.errors import Outcome
from serve_app.request import PriorityClass

_KEPT = 10_000
"""Maximum number of outcomes between two pulls: ten seconds at 1,000 requests/s; about 3 MB."""

# Age of an open request from which the outcomes since its arrival count as complete.
_OLDEST_S = 60.0
# Lookup by value, because calling an enum takes five times as long and there is a row per request.
_OUTCOMES = {outcome.value: outcome for outcome in Outcome}
_CLASSES = {priority.value: priority for priority in PriorityClass}

# Fields in the order of `_row`. Tuples are cheaper to send between actors than objects.
Row = tuple[str, float, float | None, float | None, float, str, int, int, str, str, str, str, str]


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    arrived_at: float
    prompt_tokens: int
    tenant: str
    priority: PriorityClass
    pool: str = ""
    replica: str = ""
    length_queue: str = ""
    dispatched_at: float | None = None
    first_token_at: float | None = None


class OutcomeWindow:
    """Outcomes of one scheduler since the last pull."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._rows: deque[Row] = deque(maxlen=_KEPT)

    def on_arrival(self, scheduled: ScheduledRequest) -> None:
        """Record an admitted request."""
        request = scheduled.request
        self._open[request.request_id] = _Open(
            arrived_at=request.arrived_at,
            prompt_tokens=scheduled.estimate.expected_prompt_tokens,
            tenant=request.tenant,
            priority=request.priority,
        )

    def on_event(self, event: Event, commands: list[Command], now: float) -> None:
        """Record an event that the scheduler has handled, with its commands."""
        if isinstance(event, FirstToken):
            started = self._open.get(event.request_id)
            if started is not None and started.first_token_at is None:
                started.first_token_at = now
        for command in commands:
            if isinstance(command, Dispatch):
                sent = self._open.get(command.request_id)
                if sent is not None:
                    # A request that is dispatched again after the loss of a replica has a new first token.
                    sent.dispatched_at, sent.first_token_at = now, None
                    sent.pool, sent.replica = command.pool, command.replica_id
                    sent.length_queue = command.length_queue
            elif isinstance(command, Conclude):
                over = self._open.pop(command.request_id, None)
                if over is not None:
                    self._rows.append(_row(command, over, event, now))

    def completed_until(self, now: float) -> float:
        """Return the arrival of the oldest request that has not ended, or `now` if there is none.

        Batch work may wait for hours, and an answer may take an hour. Neither delays a judgement.
        """
        arrivals = (
            each.arrived_at for each in self._open.values() if each.priority is not PriorityClass.BATCH
        )
        return max(min(arrivals, default=now), now - _OLDEST_S)

    def take(self) -> list[Row]:
        """Return and remove all outcomes since the last call, in order."""
        rows = list(self._rows)
        self._rows.clear()
        return rows

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<OutcomeWindow {len(self._rows)} outcomes, {len(self._open)} open requests>"


def _row(command: Conclude, over: _Open, event: Event, now: float) -> Row:
    prompt_tokens, output_tokens = over.prompt_tokens, 0
    if isinstance(event, Finished) and event.request_id == command.request_id and event.usage is not None:
        prompt_tokens, output_tokens = event.usage.prompt_tokens, event.usage.output_tokens
    return (
        command.request_id,
        over.arrived_at,
        over.dispatched_at,
        over.first_token_at,
        now,
        command.conclusion.outcome.value,
        prompt_tokens,
        output_tokens,
        over.tenant,
        over.priority.value,
        over.pool,
        over.replica,
        over.length_queue,
    )


def record_of(row: Row) -> RequestRecord:
    """Return the record of a row, with times on the scheduler's clock."""
    request_id, arrived_at, dispatched_at, first_token_at, finished_at, outcome = row[:6]
    prompt_tokens, output_tokens, tenant, priority, pool, replica, length_queue = row[6:]
    return RequestRecord(
        request_id=request_id,
        arrived_at=arrived_at,
        dispatched_at=dispatched_at,
        first_token_at=first_token_at,
        finished_at=finished_at,
        outcome=_OUTCOMES[outcome],
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tenant=tenant,
        priority=_CLASSES[priority],
        pool=pool,
        replica=replica,
        length_queue=length_queue,
    )
