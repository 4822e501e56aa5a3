"""Dispatch search that skips groups of heads: equal to the full search, in random histories."""

import pytest
from hypothesis import HealthCheck, settings

from serve_app.core import Scheduler
from serve_app.core import events as ev
from serve_app.core.commands import Command
from serve_app.core.dispatch import dispatcher
from serve_app.core.dispatch import dispatcher as candidate_groups
from serve_app.core.dispatch.dispatcher import CandidateGroups
from serve_app.core.queueing.request_queue import HeadGroup
from tests.properties.test_scheduler_invariants import IsolatingMachine, SchedulerMachine


class FullSearch(CandidateGroups):
    """Skips no group."""

    def groups(self, pool: str, limit: int, now: float, *, position: int, reserves: bool) -> list[HeadGroup]:
        return [group for group in self._queue.groups.at(pool, position) if group]


def compare(one: Scheduler) -> None:
    """Feed the same events to a second scheduler, and require the same decisions from now on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "CandidateGroups", FullSearch)
        other = Scheduler(one.settings)
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
def groups_are_tested_even_with_few_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate_groups, "_FEW_HEADS", 0)


TestComparedMachine = ComparedMachine.TestCase
TestComparedIsolatingMachine = ComparedIsolatingMachine.TestCase
for compared in (TestComparedMachine, TestComparedIsolatingMachine):
    compared.settings = settings(
        max_examples=60,
        stateful_step_count=50,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
# Otherwise pytest would collect it as one more case.
del compared
