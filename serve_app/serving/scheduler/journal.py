"""The journal: distributes every event that the core has handled, in order, to subscribers.

- `Journal`: entries and the handlers of subscribers.
- `RequestHistory`: one record for each request, while it is open and ten minutes after its end.
- `RecentActivity`: the last minutes in slots of five seconds: outcomes, times to first token, service of
  tenants.
- `DecisionLogFile`: the bounded decision log, in the format of `core.decision_log`.

`Journal`. The live scheduler appends one entry per event, after executing the commands. Subscribers are the
decision log, metrics, the history of requests, usage, recent activity, outlooks of waiting requests, decode
stalls, the check of the prefix index, changes of replicas, the scheduled share, and the tuner's observations.
Each names a handler for every class of event and command that it records. Handlers of the event precede those
of its commands. Handlers of one class are called in the order of subscription. They must not feed the core.

A handler that raises misses its event or command, and affects neither scheduling nor other handlers. Errors
are counted by subscriber, and the first of each kind is logged.

`RequestHistory`. A record holds the gateway's description, every dispatch, and the end of the request.
Receipts, captures, counts of served requests and the tuner's outcomes are derived from these records on
demand.

`RecentActivity`. It is always recorded, so that the dashboard shows what preceded an incident. A slot has
counts, not single requests. It survives changes of settings, but not the process.
"""

import contextlib
import enum
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from time import time
from typing import Annotated, Any, NamedTuple, Protocol, TextIO

import msgspec

from serve_app.core import Scheduler
from serve_app.core.accounting.wait_causes import WaitBreakdown
from serve_app.core.commands import (
    Command,
    Conclude,
    ContextLearned,
    Dispatch,
    EngineSilent,
    ReportFresh,
    ReportStale,
)
from serve_app.core.decision_log import Decision, RunHeader, encode_decision, encode_end, encode_header
from serve_app.core.events import Arrived, Event, Finished, FirstToken, Resumed
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.programs.program import ProgramTurn
from serve_app.core.request import ScheduledRequest, TargetState
from serve_app.core.settings_base import ADVANCED, at_least, settings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Request, RequestTimes, Usage

logger = logging.getLogger("ray.serve")


@dataclass(slots=True, eq=False)
class Entry:
    """One event with its consequences and the requests that they concern.

    Requests are looked up once for all subscribers, because the core forgets ended ones.

    Attributes:
        core: the scheduler after the event.
        now: time on the scheduler's clock.
        scheduled: the request that arrived, received its first token or finished; None for other events, and
            for requests that the core does not know or has rejected at once.
        requests: the request of each `Dispatch` and `Conclude`; None for other commands.
        took_s: time that the core needed for the event.
    """

    core: Scheduler
    now: float
    event: Event
    commands: list[Command]
    scheduled: ScheduledRequest | None = None
    requests: list[ScheduledRequest | None] = field(default_factory=list)
    took_s: float = 0.0


class Subscriber(Protocol):
    """Observer of a scheduler."""

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handlers by class of event or command; `Entry` stands for every event.

        A handler of an event receives its entry; one of a command receives the entry, the command and its
        request, as in `Entry.requests`.
        """
        ...


class Journal:
    """Distributor of entries to the handlers of subscribers.

    Args:
        on_error: called with the class name of a subscriber that raised.

    Attributes:
        errors: number of errors, by class name of the subscriber.
    """

    def __init__(self, on_error: Callable[[str], None]) -> None:
        self.errors: dict[str, int] = {}
        self._on_error = on_error
        self._subscribers = 0
        self._handlers: dict[type, list[tuple[Subscriber, Callable[..., None]]]] = {}
        self._logged: set[tuple[str, type[Exception]]] = set()

    def __repr__(self) -> str:
        return f"<Journal {self._subscribers} subscribers, {sum(self.errors.values())} errors>"

    def subscribe(self, *subscribers: Subscriber) -> None:
        """Add subscribers for later entries."""
        self._subscribers += len(subscribers)
        for subscriber in subscribers:
            for kind, handler in subscriber.handlers().items():
                self._handlers.setdefault(kind, []).append((subscriber, handler))

    def append(self, entry: Entry) -> None:
        """Pass an entry to the handlers of its event and of its commands."""
        handlers = self._handlers
        for kind in (Entry, type(entry.event)):
            for subscriber, handler in handlers.get(kind, ()):
                try:
                    handler(entry)
                except Exception as error:  # noqa: BLE001 - an observer of any kind must not end scheduling
                    self.on_failure(subscriber, error)
        for command, request in zip(entry.commands, entry.requests, strict=True):
            for subscriber, handler in handlers.get(type(command), ()):
                try:
                    handler(entry, command, request)
                except Exception as error:  # noqa: BLE001 - as above
                    self.on_failure(subscriber, error)

    def on_failure(self, observer: object, error: Exception) -> None:
        """Count an error of an observer, and log the first of its kind."""
        name = type(observer).__name__
        self.errors[name] = self.errors.get(name, 0) + 1
        self._on_error(name)
        if (kind := (name, type(error))) not in self._logged:
            self._logged.add(kind)
            logger.error("event=observer_failed observer=%s", name, exc_info=error)


class ChangeLog:
    """Subscriber that logs changes of replicas and pools, for commands that concern no request."""

    def __init__(self, model: str) -> None:
        self._model = model

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handlers of the commands that concern no request."""
        return dict.fromkeys((ReportStale, ReportFresh, EngineSilent, ContextLearned), self._write)

    def _write(self, _entry: Entry, command: Command, _request: None) -> None:
        match command:
            case ReportStale(replica_id=replica_id, age_s=age_s):
                logger.warning("event=report_stale replica=%s age_s=%.2f", replica_id, age_s)
            case ReportFresh(replica_id=replica_id):
                logger.info("event=report_fresh replica=%s", replica_id)
            case EngineSilent(replica_id=replica_id, silent_s=silent_s) if silent_s:
                logger.warning("event=engine_silent replica=%s silent_s=%.1f", replica_id, silent_s)
            case EngineSilent(replica_id=replica_id):
                logger.info("event=engine_responsive replica=%s", replica_id)
            case ContextLearned(replica_id=replica_id, context_tokens=context_tokens):
                logger.info("event=context_learned replica=%s context_tokens=%s", replica_id, context_tokens)


RETENTION_S = 600.0
# About 30 MB.
MAX_ENDED = 20_000
# Ended requests of one pull of the tuner: ten seconds at 1,000 requests/s. Their records take 20 ms.
_MAX_PULLED = 10_000
# Age of an open request from which the outcomes since its arrival count as complete.
_OLDEST_S = 60.0
_NO_BREAKDOWN = WaitBreakdown()


@dataclass(slots=True, eq=False)
class Attempt:
    """One dispatch of a request.

    Attributes:
        number: serial number among all dispatches of the scheduler.
        at: time on the scheduler's clock.
        pools: pools that may serve it, its home first.
        prompt_tokens, output_tokens: estimates.
        prefill_s: learned duration of its prefill on an otherwise idle engine.
        predicted_wait_s: prediction of its whole wait, made at arrival.
        first_token_at: time of its first token; None before it, and for answers that are not streamed.
    """

    number: int
    at: float
    dispatch: Dispatch
    pools: tuple[str, ...]
    prompt_tokens: int
    prefill_tokens: int
    output_tokens: float
    prefill_s: float
    predicted_wait_s: float | None
    first_token_at: float | None = None


class StallCause(enum.StrEnum):
    """Cause of the longest gap of a stream; see `metrics.DecodeStalls`."""

    PREFILL = "prefill"
    KV_CACHE = "kv_cache"
    OTHER = "other"


class Stall(NamedTuple):
    """The longest gap of an answer.

    Attributes:
        prefill_tokens: tokens of the prefill that caused it; 0 for another cause.
    """

    seconds: float
    cause: StallCause
    prefill_tokens: int = 0


@dataclass(slots=True, eq=False)
class HistoryRecord:
    """Record of one request; times are on the scheduler's clock.

    Attributes:
        request: as it arrived; the hashes of its prompt are dropped at its end.
        arrived_unix_s: arrival in seconds since the epoch.
        home: pool for which it has waited; empty if it did not wait.
        turn: its turn in a program; None if it belongs to none.
        conclude: None while it is open.
        usage: the engine's token counts, after its end.
        times: the gateway's times, after its end; for a request that ended in the queue, slightly later.
        target: its latency target; None without one.
        stall: the longest gap of its stream, after its end; None without one.
        expected_tokens: estimate of its prompt at its admission; None if the tuner does not observe it. It
            observes no requests from before its first pull, none that an earlier scheduler admitted, and none
            that were rejected on arrival, because they are retried with other ids.
    """

    request: Request
    arrived_unix_s: float
    home: str
    turn: ProgramTurn | None
    attempts: list[Attempt] = field(default_factory=list)
    conclude: Conclude | None = None
    ended_at: float = math.inf
    usage: Usage | None = None
    times: RequestTimes | None = None
    target: TargetState | None = None
    stall: Stall | None = None
    expected_tokens: int | None = None

    @property
    def request_id(self) -> str:
        """Id on the channel."""
        return self.request.request_id

    @property
    def arrived_at(self) -> float:
        """Time of arrival."""
        return self.request.arrived_at

    @property
    def client_request_id(self) -> str:
        """Id that the client uses for it."""
        return self.request.client_request_id or self.request_id

    @property
    def last(self) -> Attempt | None:
        """Last dispatch; None before the first."""
        return self.attempts[-1] if self.attempts else None

    @property
    def pool(self) -> str:
        """Pool for which it waited last; empty if it was rejected at once."""
        return self.attempts[-1].dispatch.pool if self.attempts else self.home

    @property
    def waited(self) -> WaitBreakdown:
        """Causes of its wait, up to the last dispatch or the end in the queue."""
        waited = self.conclude.waited if self.conclude is not None else None
        if waited is None and self.attempts:
            waited = self.attempts[-1].dispatch.waited
        return waited or _NO_BREAKDOWN

    @property
    def ended_waiting(self) -> bool:
        """True if it ended in the queue."""
        return self.conclude is not None and not self.conclude.dispatched

    @property
    def wait_s(self) -> float | None:
        """Seconds from arrival to the last dispatch, or to the end in the queue; None before either.

        If an earlier scheduler dispatched it, they include the channel, and are known at its end.
        """
        if self.conclude is not None and self.ended_waiting:
            return self.waited.wait_s
        if self.attempts:
            return self.attempts[-1].dispatch.queue_wait_s
        return None if self.times is None else self.times.grant_s

    @property
    def outcome(self) -> RequestRecord | None:
        """Its outcome for the tuner, after its end; None if the tuner does not observe it."""
        if self.conclude is None or self.expected_tokens is None:
            return None
        last, usage = self.last, self.usage
        return RequestRecord(
            request_id=self.request_id,
            arrived_at=self.arrived_at,
            dispatched_at=last.at if last else None,
            first_token_at=last.first_token_at if last else None,
            finished_at=self.ended_at,
            outcome=self.conclude.conclusion.outcome,
            prompt_tokens=usage.prompt_tokens if usage else self.expected_tokens,
            output_tokens=usage.output_tokens if usage else 0,
            tenant=self.request.tenant,
            priority=self.request.priority,
            pool=last.dispatch.pool if last else "",
            replica=last.dispatch.replica_id if last else "",
            length_queue=last.dispatch.length_queue if last else "",
        )


class RequestHistory:
    """All open requests of a scheduler, and the most recent that have ended.

    Args:
        prefill_s: returns the learned duration of a prefill, by pool and tokens.
        most: maximum number of ended requests.
        since: start of the history, on the scheduler's clock.
        unix_clock: returns seconds since the epoch.

    Attributes:
        dispatches: number of dispatches so far.
        ends: number of ended requests so far.
        is_pulled: whether a tuner pulls outcomes; those of requests that arrive before are not observed.
        complete_since: all requests that ended later are included.
    """

    def __init__(
        self,
        prefill_s: Callable[[str, int], float],
        most: int = MAX_ENDED,
        *,
        since: float = -math.inf,
        unix_clock: Callable[[], float] = time,
    ) -> None:
        self._prefill_s = prefill_s
        self._unix_clock = unix_clock
        self._most = most
        self._open: dict[str, HistoryRecord] = {}
        self._ended: deque[HistoryRecord] = deque()
        self._ended_by_id: dict[str, HistoryRecord] = {}
        # Last request with each client-chosen id.
        self._by_client: dict[str, HistoryRecord] = {}
        self.dispatches = self.ends = 0
        self.is_pulled = False
        self.complete_since = since

    def __repr__(self) -> str:
        return f"<RequestHistory {len(self._ended)} ended, {len(self._open)} open>"

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handlers of the begin, the dispatches and the end of a request."""
        return {
            Arrived: self._begin,
            Resumed: self._begin,
            FirstToken: self._on_first_token,
            Dispatch: self._dispatched,
            Conclude: self._end,
        }

    def on_late_times(self, request_id: str, times: RequestTimes) -> None:
        """Add the times of a request that ended in the queue; repeated messages are ignored."""
        known = self._ended_by_id.get(request_id)
        if known is not None and known.times is None:
            known.times = times

    def find(self, request_id: str) -> HistoryRecord | None:
        """Return the request with this id, or the last one to which a client gave it.

        The id of an engine's answer, as SDKs show it, has a prefix before that of the request.
        """
        for name in (request_id, request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")):
            found = self._open.get(name) or self._ended_by_id.get(name) or self._by_client.get(name)
            if found is not None:
                return found
        return None

    def open(self) -> tuple[HistoryRecord, ...]:
        """Return all open requests, by arrival."""
        return tuple(self._open.values())

    def ended(self) -> tuple[HistoryRecord, ...]:
        """Return the recently ended requests, in order."""
        return tuple(self._ended)

    def ended_since(self, since: float) -> Iterator[HistoryRecord]:
        """Yield the requests that have ended since then, the latest first."""
        for known in reversed(self._ended):
            if known.ended_at < since:
                break
            yield known

    def outcomes_after(self, number: int) -> list[RequestRecord]:
        """Return the observed outcomes without the first `number` ended requests, in order.

        If a tuner has not pulled for long, new outcomes have replaced the oldest ones.
        """
        recent = list(islice(reversed(self._ended), min(self.ends - number, _MAX_PULLED)))
        return [outcome for known in reversed(recent) if (outcome := known.outcome) is not None]

    def completed_until(self, now: float) -> float:
        """Return the arrival of the oldest observed request that has not ended, or `now` without any.

        Batch work may wait for hours, and an answer may take an hour. Neither delays a judgement.
        """
        arrivals = (
            each.arrived_at
            for each in self._open.values()
            if each.expected_tokens is not None and each.request.priority is not PriorityClass.BATCH
        )
        return max(min(arrivals, default=now), now - _OLDEST_S)

    def attempts_since(self, since: float) -> Iterator[tuple[Attempt, HistoryRecord]]:
        """Yield the dispatches of all requests that had not ended by `since`; allows concurrent changes."""
        ended = self.ended()
        for known in self.open():
            for attempt in known.attempts:
                yield attempt, known
        for known in reversed(ended):
            if known.ended_at < since:
                break
            for attempt in known.attempts:
                yield attempt, known

    def _begin(self, entry: Entry) -> None:
        assert isinstance(entry.event, Arrived | Resumed)
        request, scheduled = entry.event.request, entry.scheduled
        home = scheduled.pools[0] if scheduled is not None and scheduled.queued and scheduled.pools else ""
        # Computed once, so that all documents about a request agree.
        arrived = self._unix_clock() - (entry.now - request.arrived_at)
        turn = None if scheduled is None else scheduled.turn
        known = HistoryRecord(request, arrived, home, turn)
        if scheduled is not None and self.is_pulled:
            known.expected_tokens = scheduled.estimate.expected_prompt_tokens
        self._open[request.request_id] = known
        if request.client_request_id:
            self._by_client[request.client_request_id] = known

    def _on_first_token(self, entry: Entry) -> None:
        assert isinstance(entry.event, FirstToken)
        known = self._open.get(entry.event.request_id)
        if known is not None and known.last is not None and known.last.first_token_at is None:
            known.last.first_token_at = entry.now

    def _dispatched(self, entry: Entry, dispatch: Dispatch, scheduled: ScheduledRequest) -> None:
        self.dispatches += 1
        known = self._open.get(dispatch.request_id)
        if known is None:
            return
        estimate, prediction, tokens = scheduled.estimate, scheduled.prediction, scheduled.prefill_tokens
        known.attempts.append(
            Attempt(
                self.dispatches,
                entry.now,
                dispatch,
                scheduled.pools,
                estimate.expected_prompt_tokens,
                tokens,
                estimate.expected_output_tokens,
                self._prefill_s(dispatch.pool, tokens),
                prediction.wait_s if prediction is not None else None,
            )
        )

    def _end(self, entry: Entry, conclude: Conclude, scheduled: ScheduledRequest) -> None:
        known, now, event = self._open.pop(conclude.request_id, None), entry.now, entry.event
        if known is None:
            return
        known.conclude, known.ended_at, known.usage = conclude, now, scheduled.usage
        known.target = scheduled.target
        if isinstance(event, Finished) and event.request_id == conclude.request_id:
            known.times = event.times
        if (submission := known.request.submission).prefix:
            # The hashes take up to some kilobytes and are no longer needed.
            known.request.submission = msgspec.structs.replace(submission, prefix=())
        self.ends += 1
        self._ended.append(known)
        self._ended_by_id[conclude.request_id] = known
        while len(self._ended) > self._most or self._ended[0].ended_at < now - RETENTION_S:
            self._forget(self._ended.popleft())

    def _forget(self, known: HistoryRecord) -> None:
        self.complete_since = known.ended_at
        for index, name in (
            (self._ended_by_id, known.request_id),
            (self._by_client, known.request.client_request_id),
        ):
            if index.get(name) is known:
                del index[name]


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


@settings(block="decision_log")
class DecisionLogSettings:
    """File and length of the decision log.

    Attributes:
        path: the file; `{incarnation}` is replaced, so that each scheduler writes its own.
    """

    path: str
    # About 600 bytes per event and four events per request: at most about 600 MB.
    max_events: Annotated[int, at_least(1), ADVANCED] = 1_000_000


class DecisionLogFile:
    """Buffered file of decisions.

    After `max_events` it ends with a line that says so; the beginning is retained, because a replay needs it.
    It also ends on errors of the file system, such as a full disk, which must not stop the scheduler.

    Attributes:
        end_reason: why recording has ended; empty while it is active.
    """

    def __init__(self, path: Path, max_events: int, header: RunHeader) -> None:
        self._path = path
        self._left = max_events
        self._file: TextIO | None = None
        self.end_reason = ""
        with self._ending_on_error():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
        self._write(encode_header(header))

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handler of every event."""
        return {Entry: self._record}

    def _record(self, entry: Entry) -> None:
        if self._file is None:
            return
        self._write(encode_decision(Decision(entry.now, entry.event, tuple(entry.commands))))
        self._left -= 1
        if self._left == 0 and not self.end_reason:
            self.end_reason = "max_events reached"
            self._write(encode_end(self.end_reason))
            self.close()

    def flush(self) -> None:
        """Write buffered lines."""
        with self._ending_on_error():
            if self._file is not None:
                self._file.flush()

    def close(self) -> None:
        """Write buffered lines, and close the file."""
        file, self._file = self._file, None
        with self._ending_on_error():
            if file is not None:
                file.close()

    def _write(self, line: str) -> None:
        with self._ending_on_error():
            if self._file is not None:
                self._file.write(line + "\n")

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            file, self._file = self._file, None
            self.end_reason = str(error)
            logger.warning("event=decision_log_ended path=%s reason=%r", self._path, error)
            with contextlib.suppress(OSError):
                # Closing retries the buffered write, and closes the file in any case.
                if file is not None:
                    file.close()
