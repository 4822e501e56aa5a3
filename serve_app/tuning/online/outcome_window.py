"""What became of the requests since the tuner last asked: lengths, classes, tenants and times, no text.

Noted from events and commands alone, so that it costs the scheduler a dictionary entry for each request. All
of it is soft: without a tuner old outcomes make room for new ones. Requests that were refused at the door are
not here, since they come again as others, nor are those that an earlier scheduler had let in.
"""

from collections import deque
from dataclasses import dataclass

from serve_app.errors import Outcome
from serve_app.metrics.record import RequestRecord
from serve_app.request import PriorityClass
from serve_app.scheduling.commands import Command, Conclude, Dispatch
from serve_app.scheduling.events import Event, Finished, FirstToken
from serve_app.scheduling.request import ScheduledRequest

_KEPT = 10_000
"""Outcomes kept between two pulls: ten seconds at 1,000 requests/s; about 3 MB."""

# In the order of `_row`. Tuples travel between actors at a third of the cost of objects.
Row = tuple[str, float, float | None, float | None, float, str, int, int, str, str, str, str, str]


@dataclass(slots=True)
class _Open:
    """A request that is not over."""

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
    """The outcomes of one scheduler since the last pull."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._rows: deque[Row] = deque(maxlen=_KEPT)

    def on_arrival(self, entry: ScheduledRequest) -> None:
        """A request was let in."""
        request = entry.request
        self._open[request.request_id] = _Open(
            arrived_at=request.arrived_at,
            prompt_tokens=entry.estimate.expected_prompt_tokens,
            tenant=request.tenant,
            priority=request.priority,
        )

    def fed(self, event: Event, commands: list[Command], now: float) -> None:
        """The scheduler has handled an event."""
        if isinstance(event, FirstToken):
            started = self._open.get(event.request_id)
            if started is not None and started.first_token_at is None:
                started.first_token_at = now
        for command in commands:
            if isinstance(command, Dispatch):
                sent = self._open.get(command.request_id)
                if sent is not None:
                    # Sent again after a replica was lost, it waits for its first token anew.
                    sent.dispatched_at, sent.first_token_at = now, None
                    sent.pool, sent.replica = command.pool, command.replica_id
                    sent.length_queue = command.length_queue
            elif isinstance(command, Conclude):
                over = self._open.pop(command.request_id, None)
                if over is not None:
                    self._rows.append(_row(command, over, event, now))

    def settled_until(self, now: float) -> float:
        """When the oldest request arrived that is not over yet; `now`, when none is open."""
        return min((each.arrived_at for each in self._open.values()), default=now)

    def take(self) -> list[Row]:
        """All outcomes since the last call, in order; they are kept no longer."""
        rows = list(self._rows)
        self._rows.clear()
        return rows

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<OutcomeWindow {len(self._rows)} outcomes, {len(self._open)} requests under way>"


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
        command.outcome.value,
        prompt_tokens,
        output_tokens,
        over.tenant,
        over.priority.value,
        over.pool,
        over.replica,
        over.length_queue,
    )


def record_of(row: Row) -> RequestRecord:
    """The record of a row, times on the scheduler's clock."""
    request_id, arrived_at, dispatched_at, first_token_at, finished_at, outcome = row[:6]
    prompt_tokens, output_tokens, tenant, priority, pool, replica, length_queue = row[6:]
    return RequestRecord(
        request_id=request_id,
        arrived_at=arrived_at,
        dispatched_at=dispatched_at,
        first_token_at=first_token_at,
        finished_at=finished_at,
        outcome=Outcome(outcome),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tenant=tenant,
        priority=PriorityClass(priority),
        pool=pool,
        replica=replica,
        length_queue=length_queue,
    )
