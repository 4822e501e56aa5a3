"""A journal of one subscriber, whose errors fail the test, and its entries."""

import pytest

from serve_app.core import Scheduler
from serve_app.core.commands import Command, Conclude, Dispatch
from serve_app.core.events import Arrived, Event
from serve_app.serving.scheduler.journal import Entry, Journal, Subscriber


def pass_to(subscriber: Subscriber, entry: Entry) -> None:
    journal = Journal(pytest.fail)
    journal.subscribe(subscriber)
    journal.append(entry)


def entry_of(core: Scheduler, now: float, event: Event, commands: list[Command]) -> Entry:
    """Return the entry of an event that the core has handled, as the live scheduler builds it."""
    entry = Entry(core, now, event, commands)
    if isinstance(event, Arrived):
        entry.scheduled = core.find(event.request.request_id)
    for command in commands:
        if isinstance(command, Dispatch):
            entry.requests.append(core.requests[command.request_id])
        else:
            entry.requests.append(core.ended[command.request_id] if isinstance(command, Conclude) else None)
    return entry
