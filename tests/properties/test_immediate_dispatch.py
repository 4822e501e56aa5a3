"""Shortcut for an empty queue: equal to the full decision, in random histories."""

import pytest
from hypothesis import HealthCheck, settings

from serve_app.core import Scheduler
from serve_app.core import events as ev
from serve_app.core.commands import Command
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica_state import Running
from tests.builders import dispatched, two_pools
from tests.properties.test_scheduler_invariants import IsolatingMachine, SchedulerMachine


def all_join_the_queue(scheduler: Scheduler) -> None:
    def choose_immediate(scheduled: ScheduledRequest, now: float) -> Running | None:
        return None

    scheduler.dispatcher.choose_immediate = choose_immediate  # type: ignore[method-assign]


def compare(one: Scheduler) -> None:
    """Feed the same events to a scheduler that queues every request, and require the same decisions."""
    other = Scheduler(one.settings)
    all_join_the_queue(other)
    decide = one.handle

    def handle(event: ev.Event, now: float) -> list[Command]:
        decided = decide(event, now)
        assert decided == other.handle(event, now)
        assert remembered(one) == remembered(other)
        return decided

    one.handle = handle  # type: ignore[method-assign]


def remembered(scheduler: Scheduler) -> list[object]:
    """Return the state after a dispatch that influences later decisions."""
    dispatcher = scheduler.dispatcher
    return [
        scheduler.next_wakeup(),
        repr(scheduler.ledger),
        [shares.counters() for shares in scheduler.queue.shares.values()],
        dispatcher._floors._credit,
    ]


class ComparedMachine(SchedulerMachine):
    def __init__(self) -> None:
        super().__init__()
        compare(self.scheduler)


class ComparedIsolatingMachine(IsolatingMachine):
    def __init__(self) -> None:
        super().__init__()
        compare(self.scheduler)


class ComparedEwsjfMachine(ComparedIsolatingMachine):
    policy = "ewsjf"


def test_a_single_request_joins_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the histories would compare nothing."""
    driver = two_pools(policy="ewsjf")
    joined: list[str] = []
    monkeypatch.setattr(driver.scheduler.queue, "add", lambda one: joined.append(one.request.request_id))
    assert dispatched(driver.arrive("a")) == [("a", "s1")]
    assert not joined


TestComparedMachine = ComparedMachine.TestCase
TestComparedIsolatingMachine = ComparedIsolatingMachine.TestCase
TestComparedEwsjfMachine = ComparedEwsjfMachine.TestCase
for tried in (TestComparedMachine, TestComparedIsolatingMachine, TestComparedEwsjfMachine):
    tried.settings = settings(
        max_examples=60, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow]
    )
# Otherwise pytest would collect it as one more case.
del tried
