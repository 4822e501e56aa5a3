"""The journal: distributes every event that the core has handled, in order, to subscribers.

The live scheduler appends one entry per event, after executing the commands. Subscribers are the decision
log, metrics, the history of requests, usage, recent activity, outlooks of waiting requests, and the tuner's
outcomes, each in its own module. They are called in the order of subscription, and must not feed the core.

A subscriber that raises misses the entry, and affects neither scheduling nor the others. Its errors are
counted, and the first of each kind is logged.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from serve_app.core import Scheduler
from serve_app.core.commands import (
    Command,
    Conclude,
    ContextLearned,
    Dispatch,
    EngineSilent,
    ReportFresh,
    ReportStale,
)
from serve_app.core.events import Event
from serve_app.core.request import ScheduledRequest
from serve_app.serving.channel.request_book import GatewayRequest

logger = logging.getLogger("ray.serve")


@dataclass(slots=True, eq=False)
class Entry:
    """One event with its consequences and the requests that they concern.

    Requests are looked up once for all subscribers, because core and request book forget ended ones.

    Attributes:
        core: the scheduler after the event.
        now: time on the scheduler's clock.
        took_s: the core's processing time.
        scheduled: the request that arrived, received its first token or finished; None for other events, and
            for requests that the core does not know.
        gateway_request: the gateway's description of a new request; None for other events.
        dispatched: each `Dispatch` with its request.
        concluded: each `Conclude` with the gateway's description of its request.
    """

    core: Scheduler
    now: float
    event: Event
    commands: list[Command]
    took_s: float = 0.0
    scheduled: ScheduledRequest | None = None
    gateway_request: GatewayRequest | None = None
    dispatched: list[tuple[Dispatch, ScheduledRequest]] = field(default_factory=list)
    concluded: list[tuple[Conclude, GatewayRequest]] = field(default_factory=list)


class Subscriber(Protocol):
    """Observer of a scheduler."""

    def on_entry(self, entry: Entry) -> None:
        """Process an entry."""
        ...


class Journal:
    """List of subscribers that receive each entry.

    Args:
        on_error: called with the class name of a subscriber that raised.

    Attributes:
        errors: number of errors, by class name of the subscriber.
    """

    def __init__(self, on_error: Callable[[str], None]) -> None:
        self.errors: dict[str, int] = {}
        self._on_error = on_error
        self._subscribers: list[tuple[Subscriber, Callable[[Entry], None]]] = []
        self._logged: set[tuple[str, type[Exception]]] = set()

    def __repr__(self) -> str:
        return f"<Journal {len(self._subscribers)} subscribers, {sum(self.errors.values())} errors>"

    def subscribe(self, *subscribers: Subscriber) -> None:
        """Add subscribers for later entries."""
        self._subscribers += [(each, each.on_entry) for each in subscribers]

    def append(self, entry: Entry) -> None:
        """Pass an entry to all subscribers."""
        for subscriber, on_entry in self._subscribers:
            try:
                on_entry(entry)
            except Exception as error:  # noqa: BLE001 - an observer of any kind must not end scheduling
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

    def on_entry(self, entry: Entry) -> None:
        """Log the commands of an entry that concern no request."""
        if len(entry.commands) > len(entry.dispatched) + len(entry.concluded):
            for command in entry.commands:
                self._write(command)

    def _write(self, command: Command) -> None:
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
