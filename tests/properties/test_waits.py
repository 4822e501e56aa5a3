"""Causes of waits in random histories: they add up, and the shared accounts match a slow reference.

The reference has a list of spans for each request. It shares the judgement of what a request lacks with the
accounts, but neither their sums by kind nor their handling of newcomers.

These histories are the longest part of the property tests, and check all other invariants as well.
"""

from collections import Counter

from hypothesis import HealthCheck, settings

from serve_app.core import events as ev
from serve_app.core.accounting.wait_causes import WaitBreakdown, WaitCause, nanoseconds
from serve_app.core.accounting.waits import BUSY, INDEX_OF, WaitUpdater
from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica_state import Running
from serve_app.core.scheduler import Scheduler
from tests.properties.recording_machine import FLOORS
from tests.properties.test_engine_time import EngineTimeMachine
from tests.properties.test_scheduler_invariants import IsolatingMachine, ThreePoolsMachine

_CAUSE_OF = {index: cause for cause, index in INDEX_OF.items()}


class SlowWaitUpdater(WaitUpdater):
    """Records causes for each request separately."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.__dict__.update(scheduler.waits.__dict__)
        self.scheduler = scheduler
        self.since: dict[str, int] = {}
        self.spent: dict[str, Counter[WaitCause]] = {}
        self.ahead: dict[str, Counter[WaitCause]] = {}
        # Waited-for requests after the last event.
        self.waited_for: dict[str, int] = {}

    def on_dispatch(self, taker: ScheduledRequest, running: Running, now: float) -> None:
        at, replica = nanoseconds(now), running.replica
        for waiting in self.scheduler.queue:
            account = waiting.waits.account if waiting.waits is not None else None
            if account is None or account.pool != replica.spec.pool or account.state != BUSY:
                continue
            lacking = self._lacking(account, replica, now)
            if (
                lacking is WaitCause.ENGINE_QUEUE
                and taker.request.priority.rank < waiting.request.priority.rank
            ):
                lacking = None
            cause = lacking or _order(waiting, taker, by_floor=running.by_floor)
            self._spend(waiting.request.request_id, cause, at)
            if lacking is None:
                self.ahead.setdefault(waiting.request.request_id, Counter())[cause] += 1
        super().on_dispatch(taker, running, now)

    def update(self, now: float) -> None:
        at = nanoseconds(now)
        before = {
            waiting.request.request_id: (account, account.state)
            for waiting in self.scheduler.queue
            if waiting.waits is not None and (account := waiting.waits.account) is not None
        }
        super().update(now)
        for waiting in self.scheduler.queue:
            request_id = waiting.request.request_id
            tally = waiting.waits
            if request_id not in before:
                # It is new in this event, or its key has changed with its pools.
                if request_id in self.waited_for:
                    self._spend(request_id, _CAUSE_OF[self.waited_for[request_id]], at)
                self.since[request_id] = at
            elif (
                tally is None
                or tally.account is None
                or before[request_id] != (tally.account, tally.account.state)
            ):
                self._spend(request_id, _CAUSE_OF[before[request_id][1]], at)
        self.waited_for = {
            waiting.request.request_id: account.state
            for waiting in self.scheduler.queue
            if waiting.waits is not None and (account := waiting.waits.account) is not None
        }

    def _spend(self, request_id: str, cause: WaitCause, at: int) -> None:
        self.spent.setdefault(request_id, Counter())[cause] += at - self.since[request_id]
        self.since[request_id] = at


def _order(waiting: ScheduledRequest, taker: ScheduledRequest, *, by_floor: bool) -> WaitCause:
    mine, theirs = waiting.request, taker.request
    if by_floor and (theirs.tenant, theirs.priority) != (mine.tenant, mine.priority):
        return WaitCause.OTHERS_FLOOR
    if theirs.priority is not mine.priority:
        is_higher = theirs.priority.rank < mine.priority.rank
        return WaitCause.HIGHER_CLASS if is_higher else WaitCause.LOWER_CLASS
    return WaitCause.OWN_REQUESTS if theirs.tenant == mine.tenant else WaitCause.OTHER_TENANTS


class WaitsMachine(EngineTimeMachine):
    """Checks the wait breakdown of every command."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler.waits = self.slow = SlowWaitUpdater(self.scheduler)
        self.arrived_at: dict[str, float] = {}
        self.resumed: set[str] = set()
        self.simple: dict[str, bool] = {}

    def feed(self, event: ev.Event) -> None:
        if isinstance(event, ev.Arrived | ev.Resumed):
            self.arrived_at[event.request.request_id] = event.request.arrived_at
        elif isinstance(event, ev.DispatchFailed):
            self.simple[event.request_id] = False
        handle = self.scheduler.handle
        seen = []

        def watched(event: ev.Event, now: float):  # type: ignore[no-untyped-def]
            seen.extend(commands := handle(event, now))
            return commands

        self.scheduler.handle = watched  # type: ignore[method-assign]
        try:
            super().feed(event)
        finally:
            self.scheduler.handle = handle  # type: ignore[method-assign]
        for command in seen:
            if isinstance(command, Dispatch | Conclude) and command.waited is not None:
                self.wait_causes_add_up(command.request_id, command.waited)

    def wait_causes_add_up(self, request_id: str, waited: WaitBreakdown) -> None:
        now = nanoseconds(self.now)
        assert sum(waited.causes.values()) == now - nanoseconds(self.arrived_at[request_id])
        assert all(spent > 0 for spent in waited.causes.values())
        assert all(count > 0 for count in waited.ahead.values())
        assert WaitCause.BEFORE_SCHEDULER not in waited.causes
        if not self.simple.get(request_id, True):
            return
        spent = self.slow.spent.get(request_id, Counter()).copy()
        left = now - self.slow.since[request_id]
        rest = Counter(waited.causes)
        rest.subtract(spent)
        # What is unattributed at the end has one cause, that of the current state.
        assert {cause: ns for cause, ns in rest.items() if ns} in ([{}] if not left else _one_cause(left))
        assert waited.ahead == dict(self.slow.ahead.get(request_id, Counter()))


def _one_cause(left: int) -> list[dict[WaitCause, int]]:
    return [{cause: left} for cause in INDEX_OF]


class IsolatingWaitsMachine(WaitsMachine, IsolatingMachine):
    pass


class ThreePoolsWaitsMachine(WaitsMachine, ThreePoolsMachine):
    pass


class FloorsWaitsMachine(IsolatingWaitsMachine):
    floors = FLOORS


TestWaits = WaitsMachine.TestCase
TestIsolatingWaits = IsolatingWaitsMachine.TestCase
TestThreePoolsWaits = ThreePoolsWaitsMachine.TestCase
TestFloorsWaits = FloorsWaitsMachine.TestCase
for case, examples in (
    (TestWaits, 100),
    (TestIsolatingWaits, 100),
    (TestThreePoolsWaits, 60),
    (TestFloorsWaits, 100),
):
    case.settings = settings(
        max_examples=examples, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow]
    )
# Otherwise pytest would collect it as one more case.
del case
