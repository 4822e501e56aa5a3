"""The journal: every event that the core has handled, in order, for all that observe a scheduler.

The live scheduler appends one entry for each event, after the commands were carried out. A subscriber is one
file with one job: the decision log, metrics, the history of requests, usage, recent activity, estimates for
waiting requests, the tuner's outcomes, recordings. Subscribers are called in the order in which they
subscribed, and none may feed the core.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from serve_app.scheduling import Scheduler
from serve_app.scheduling.commands import Command, Conclude, Dispatch
from serve_app.scheduling.events import Event
from serve_app.scheduling.request import ScheduledRequest
from serve_app.serving.channel.request_book import GatewayRequest


@dataclass(slots=True, eq=False)
class Entry:
    """One event and its consequences, with the requests that they concern.

    Requests are looked up once, for all subscribers: the core and the gateways' book forget a request with
    its end.

    Attributes:
        core: the scheduler, after the event.
        now: on the scheduler's clock.
        took_s: the core's time for the event.
        scheduled: the request that arrived, gave its first token or finished; None for any other event, and
            where the core does not know the request.
        told: what the gateway says of a request that is new here; None for any other event.
        dispatched: the request of each `Dispatch`.
        concluded: what gateways have said of the request of each `Conclude`.
    """

    core: Scheduler
    now: float
    event: Event
    commands: list[Command]
    took_s: float = 0.0
    scheduled: ScheduledRequest | None = None
    told: GatewayRequest | None = None
    dispatched: list[tuple[Dispatch, ScheduledRequest]] = field(default_factory=list)
    concluded: list[tuple[Conclude, GatewayRequest]] = field(default_factory=list)


class Subscriber(Protocol):
    """An observer of a scheduler."""

    def on_entry(self, entry: Entry) -> None:
        """Take note of an event."""
        ...


class Journal:
    """Passes each entry on to all subscribers."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[Entry], None]] = []

    def __repr__(self) -> str:
        return f"<Journal {len(self._subscribers)} subscribers>"

    def subscribe(self, *subscribers: Subscriber) -> None:
        """Pass entries on to these from now on."""
        self._subscribers += [each.on_entry for each in subscribers]

    def append(self, entry: Entry) -> None:
        """Record an event."""
        for on_entry in self._subscribers:
            on_entry(entry)
