"""The journal: distributes every event that the core has handled, in order, to subscribers.

The live scheduler appends one entry per event, after executing the commands. Subscribers are the decision
log, metrics, the history of requests, usage, recent activity, outlooks of waiting requests, and the tuner's
outcomes, each in its own module. Each names a handler for every class of event and command that it records.
Handlers of the event precede those of its commands. Handlers of one class are called in the order of
subscription. They must not feed the core.

A handler that raises misses its event or command, and affects neither scheduling nor other handlers. Errors
are counted by subscriber, and the first of each kind is logged.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from serve_app.core import Scheduler
from serve_app.core.commands import (
    Command,
    ContextLearned,
    EngineSilent,
    ReportFresh,
    ReportStale,
)
from serve_app.core.events import Event
from serve_app.core.request import ScheduledRequest

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
