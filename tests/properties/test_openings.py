"""Dispatch search that skips groups of heads: equal to the full search, in random histories."""

import pytest
from hypothesis import HealthCheck, settings

from serve_app.core import Scheduler
from serve_app.core import events as ev
from serve_app.core.commands import Command
from serve_app.core.dispatch import dispatcher as openings
from serve_app.core.dispatch.dispatcher import Openings
from serve_app.core.queueing.request_queue import HeadGroup
from tests.properties.test_scheduler_invariants import IsolatingMachine, SchedulerMachine


class FullSearch(Openings):
    """Skips no group."""

    def groups(self, pool: str, now: float, *, rank: int, reserves: bool) -> list[HeadGroup]:
        return [group for group in self._queue.groups.at(pool, rank) if group]


def compare(one: Scheduler) -> None:
    """From now on another scheduler gets the same events and must decide the same."""
    other = Scheduler(one.settings)
    dispatcher = other.dispatcher
    dispatcher._openings = FullSearch(other.queue, other.ledger, dispatcher._isolation, dispatcher._floors)
    decide = one.handle

    def handle(event: ev.Event, now: float) -> list[Command]:
        decided = decide(event, now)
        assert decided == other.handle(event, now)
        return decided

    one.handle = handle  # type: ignore[method-assign]


class ComparedMachine(SchedulerMachine):
    def __init__(self) -> None:
        super().__init__()
        compare(self.scheduler)


class ComparedIsolatingMachine(IsolatingMachine):
    def __init__(self) -> None:
        super().__init__()
        compare(self.scheduler)


@pytest.fixture(autouse=True)
def looks_at_groups_however_few_heads_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openings, "_FEW_HEADS", 0)


TestComparedMachine = ComparedMachine.TestCase
TestComparedIsolatingMachine = ComparedIsolatingMachine.TestCase
for tried in (TestComparedMachine, TestComparedIsolatingMachine):
    tried.settings = settings(
        max_examples=150,
        stateful_step_count=50,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
# Otherwise pytest would collect it as one more case.
del tried
