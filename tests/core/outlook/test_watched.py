"""Queue updates of watched requests, and the expected order."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.dispatch.promotion import ClassFloorSettings
from serve_app.core.events import (
    Arrived,
    Cancelled,
    DispatchFailed,
    DispatchFailure,
    Event,
    Finished,
    ReplicaLost,
    ReplicaReported,
    Woke,
)
from serve_app.core.outlook.watched import MAX_UPDATES, CalibrationError, WatchedRequests
from serve_app.core.queueing.fairness import FairnessMode, FairnessSettings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from tests.builders import ManualDriver, fill, one_replica, report, request, two_pools
from tests.core.outlook.builders import ordered, ordered_requests, updates
from tests.core.programs.builders import fleet

USAGE = Usage(prompt_tokens=40, output_tokens=10)


class ServedQueue:
    """One replica that serves requests one by one, and the requests that wait for it.

    Attributes:
        errors: of the sent estimates.
        started: dispatch times, in order.
    """

    def __init__(self, service_s: float = 1.0, **changes: Any) -> None:
        self.driver: ManualDriver = one_replica(limits={"max_num_seqs": 1}, **changes)
        self.watched = WatchedRequests(self.driver.scheduler)
        self.service_s = service_s
        self.errors: list[CalibrationError] = []
        self.started: dict[str, float] = {}
        self._arrived = 0
        self._running: list[str] = []
        fill(self.driver)
        self._running += ["f0", "f1", "f2"]

    @property
    def now(self) -> float:
        return self.driver.now

    def feed(self, event: Event, after_s: float = 0.0) -> None:
        for command in self.driver.feed(event, after_s=after_s):
            if isinstance(command, Dispatch):
                self._running.append(command.request_id)
                self.started[command.request_id] = self.now
                scheduled = self.driver.find(command.request_id)
                self.errors += self.watched.on_dispatch(scheduled, self.now)
            elif isinstance(command, Conclude):
                outcome = command.conclusion.outcome
                self.errors += self.watched.on_conclusion(command.request_id, outcome, self.now)

    def arrive(self, count: int = 1, *, watch: bool = True, **fields: Any) -> list[str]:
        names = [f"r{self._arrived + number}" for number in range(count)]
        self._arrived += count
        for name in names:
            self.feed(Arrived(request(name, arrived_at=self.now, **fields)))
            if watch:
                assert self.watched.watch(name, self.now)
        return names

    def serve(self, count: int = 1) -> None:
        """Finish this many requests, one after another."""
        for _ in range(count):
            if self._running:
                self.feed(Finished(self._running.pop(0), Outcome.COMPLETED, USAGE), after_s=self.service_s)
            self.report()

    def report(self, after_s: float = 0.0) -> None:
        """Report exactly what was dispatched."""
        sent, has = 3 + len(self.started), len(self._running)
        self.feed(ReplicaReported("r1", report(received=sent, waiting=has)), after_s=after_s)

    def learn(self, count: int = 60) -> None:
        """Play this many requests and update the watch throughout."""
        self.arrive(count)
        for _ in range(count):
            self.serve()
            updates(self.watched, self.now)
        self.arrive(3, watch=False)
        self.report()
        self.errors.clear()


def test_a_request_that_does_not_wait_is_not_watched() -> None:
    line = ServedQueue()
    assert not line.watched.watch("f0", 0.0)
    assert not line.watched.watch("nobody", 0.0)
    assert updates(line.watched, 0.0) == {}


def test_positions_fall_as_others_are_served_and_the_order_is_preserved() -> None:
    line = ServedQueue()
    names = line.arrive(12)
    outlooks = updates(line.watched, line.now)
    places = {name: [outlook.position] for name, outlook in outlooks.items()}
    assert list(places.values()) == [[number + 1] for number in range(12)]
    # Before the first dispatch only the position is known.
    assert all(outlook.start is None for outlook in outlooks.values())
    for _ in range(12):
        for name, outlook in updates(line.watched, line.now).items():
            places[name].append(outlook.position)
        line.serve()
    assert list(line.started) == names
    for name, seen in places.items():
        assert seen == sorted(seen, reverse=True), name
        assert seen[-1] <= 2  # two may be dispatched at once


def test_in_a_steady_queue_the_expected_start_is_the_actual_one() -> None:
    line = ServedQueue()
    line.learn()
    names = line.arrive(20)
    outlooks = updates(line.watched, line.now)
    starts = [outlooks[name].start for name in names]
    asked_at = line.now
    line.serve(23)
    for name, start in zip(names, starts, strict=True):
        assert start is not None
        assert start.low <= start.middle <= start.high
        assert start.middle == pytest.approx(line.started[name] - asked_at, rel=0.4, abs=1.0)
    assert len(line.errors) == 40
    assert sum(one.verdict == "inside" for one in line.errors) >= 30
    assert max(abs(one.error_s) for one in line.errors) < 8.0


def test_watching_does_not_change_the_estimate() -> None:
    line = ServedQueue()
    line.learn()
    watched = line.arrive(4)
    unwatched = line.arrive(1, watch=False)[0]
    order = ordered_requests(line.driver.scheduler, line.now)
    outlooks = {
        each.request.request_id: line.watched.expected(each, order, line.now) for each in order if each.queued
    }
    assert {name: outlooks[name] for name in watched} == updates(line.watched, line.now)
    asked_at, expected = line.now, outlooks[unwatched]
    assert expected is not None
    assert expected.position == len(order)
    line.serve(len(order) + 1)
    assert expected.start is not None
    assert expected.start.low < line.started[unwatched] - asked_at < expected.start.high


def test_a_request_outside_the_order_has_no_estimate() -> None:
    line = ServedQueue()
    line.arrive(2)
    order = ordered_requests(line.driver.scheduler, line.now)
    assert line.watched.expected(order[1], order[:1], line.now) is None


def test_updates_come_at_most_once_a_second_and_only_with_changes() -> None:
    line = ServedQueue()
    line.arrive(2)
    assert set(updates(line.watched, line.now)) == {"r0", "r1"}
    assert updates(line.watched, line.now + 0.5) == {}
    assert updates(line.watched, line.now + 1.5) == {}
    line.report(after_s=1.0)
    line.serve()
    assert set(updates(line.watched, line.now)) == {"r1"}


def test_a_queue_without_progress_is_reported_after_a_while() -> None:
    line = ServedQueue()
    line.arrive()
    updates(line.watched, 0.0)
    for second in range(1, 15):
        assert updates(line.watched, float(second)) == {}, second
    assert set(updates(line.watched, 15.0)) == {"r0"}


def test_a_position_may_rise() -> None:
    line = ServedQueue()
    line.arrive()
    assert updates(line.watched, line.now)["r0"].position == 1
    line.report(after_s=1.5)
    line.arrive(3, watch=False, priority=PriorityClass.INTERACTIVE)
    assert updates(line.watched, line.now)["r0"].position == 4


def test_no_start_is_expected_while_no_replica_is_alive() -> None:
    line = ServedQueue(no_replica_grace_s=60.0)
    line.learn()
    line.arrive(4)
    before = updates(line.watched, line.now)
    assert all(outlook.start is not None for outlook in before.values())
    line.feed(ReplicaLost("r1"), after_s=1.5)
    after = updates(line.watched, line.now)
    assert after
    assert all(outlook.start is None for outlook in after.values())


def test_expiry_after_the_interval_counts_as_an_underestimate() -> None:
    line = ServedQueue()
    line.learn()
    line.arrive(3, expires_at=line.now + 400.0)
    updates(line.watched, line.now)
    for _ in range(500):
        line.report(after_s=1.0)
        line.feed(Woke())
    verdicts = [(one.estimate, one.verdict) for one in line.errors]
    assert ("first", "after") in verdicts
    assert {verdict for _, verdict in verdicts} == {"after"}
    assert len(line.watched) == 0


def test_a_request_that_leaves_is_not_counted() -> None:
    line = ServedQueue()
    line.learn()
    names = line.arrive(3)
    updates(line.watched, line.now)
    for name in names:
        line.feed(Cancelled(name))
    assert line.errors == []
    assert len(line.watched) == 0
    assert updates(line.watched, line.now) == {}


def test_nothing_is_computed_while_no_request_is_watched() -> None:
    line = ServedQueue()
    line.arrive(5, watch=False)
    assert list(line.watched.updates(line.now)) == []
    line.serve(5)
    assert line.errors == []


def test_unwatched_requests_also_improve_the_estimates() -> None:
    line = ServedQueue()
    line.arrive(59, watch=False)
    (last,) = line.arrive(1)
    widths = []
    for _ in range(50):
        if (outlook := updates(line.watched, line.now).get(last)) and outlook.start:
            widths.append(outlook.start.high / outlook.start.low)
        line.serve()
    assert widths[-1] < widths[0] / 2, widths


def test_an_update_works_in_parts_and_allows_changes_between_them() -> None:
    line = ServedQueue(max_waiting=5_000)
    names = line.arrive(1_600, tenant="t1")
    parts = line.watched.updates(line.now)
    assert next(parts) == []
    line.feed(Cancelled("r5"))
    line.serve()
    tail = [outlook.request_id for part in parts for outlook in part]
    assert set(names) - set(tail) == {"r5", *line.started}


def test_one_call_sends_a_bounded_number_of_updates_and_the_next_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve_app.core.outlook.watched.MAX_UPDATES", 4)
    assert MAX_UPDATES > 4
    line = ServedQueue()
    names = line.arrive(10)
    first, second, third = (updates(line.watched, line.now + at) for at in (0.0, 0.25, 0.5))
    assert (len(first), len(second), len(third)) == (4, 4, 2)
    assert {*first, *second, *third} == set(names)


def test_estimates_of_requests_that_left_are_not_held_until_the_end_of_their_interval() -> None:
    line = ServedQueue(service_s=10.0)
    line.learn()
    line.arrive(20)
    updates(line.watched, line.now)
    due = line.watched._estimates._due
    most = 2 * len(due) + 64
    for number in range(500):
        line.feed(Arrived(request(f"leaves{number}", arrived_at=line.now)))
        updates(line.watched, line.now)
        line.feed(Cancelled(f"leaves{number}"))
        assert len(line.watched._estimates._due) <= most


# -- expected order ---------------------------------------------------------------------------------------

NO_SHARES = FairnessSettings(mode=FairnessMode.OFF)
FLOORS = (
    ClassFloorSettings(default_share=0.0, batch_share=0.0),
    ClassFloorSettings(default_share=0.1, batch_share=0.0),
    ClassFloorSettings(),
)
WAITING = st.lists(
    st.tuples(st.integers(10, 200), st.sampled_from("abcde"), st.sampled_from(PriorityClass)),
    min_size=2,
    max_size=40,
    # The order of equal scores is not predicted.
    unique_by=lambda request: request[0],
)


@settings(max_examples=60, deadline=None)
@given(
    waiting=WAITING,
    policy=st.sampled_from(["fcfs", "sjf", "ewsjf"]),
    floors=st.sampled_from(FLOORS),
    is_fair=st.booleans(),
)
# A lower class has its floor.
@example(
    waiting=[(100, "a", PriorityClass.INTERACTIVE)] * 40 + [(100, "a", PriorityClass.DEFAULT)] * 4,
    policy="fcfs",
    floors=FLOORS[1],
    is_fair=False,
)
def test_the_expected_order_is_that_of_dispatch_if_nothing_else_arrives(
    waiting: list[tuple[int, str, PriorityClass]], policy: str, floors: ClassFloorSettings, is_fair: bool
) -> None:
    fairness = FairnessSettings(mode=FairnessMode.REQUESTS) if is_fair else NO_SHARES
    line = ServedQueue(0.0, policy=policy, class_floors=floors, fairness=fairness)
    names = [
        name
        for tokens, tenant, priority in waiting
        for name in line.arrive(watch=False, prompt_tokens=tokens, tenant=tenant, priority=priority)
    ]
    expected = ordered(line.driver.scheduler, line.now)
    line.serve(len(names) + 3)
    assert sorted(expected) == sorted(names) == sorted(line.started)
    # The turns of tenants are expected only on average.
    assert is_fair or list(line.started) == expected


def test_turns_that_wait_for_room_are_placed_as_if_they_had_it() -> None:
    driver = fleet("s1", fairness=NO_SHARES)
    driver.start_turn("running", "a")
    driver.start_turn("b1", "b")
    driver.arrive("between")
    driver.start_turn("c1", "c")
    assert driver.find("b1").parked
    assert ordered(driver.scheduler, driver.now) == ["b1", "between", "c1"]
    watched = WatchedRequests(driver.scheduler)
    assert watched.watch("c1", driver.now)
    assert updates(watched, driver.now)["c1"].position == 3


def test_tenants_take_turns_by_their_shares() -> None:
    driver = one_replica(fairness=FairnessSettings(mode=FairnessMode.REQUESTS, weights={"b": 2.0}))
    fill(driver)
    for number in range(12):
        driver.arrive(f"a{number}", tenant="a")
    for number in range(12):
        driver.arrive(f"b{number}", tenant="b")
    first = Counter(name[0] for name in ordered(driver.scheduler, driver.now)[:9])
    assert first["b"] == pytest.approx(2 * first["a"], abs=1)


def test_a_put_back_request_is_first() -> None:
    driver = one_replica()
    fill(driver)
    driver.arrive("waits", priority=PriorityClass.INTERACTIVE)
    failure = DispatchFailure.UNREACHABLE
    driver.feed(DispatchFailed("f0", "r1", failure))
    returned = driver.find("f0")
    assert returned.queued
    assert ordered(driver.scheduler, driver.now) == ["f0", "waits"]


def test_each_home_pool_has_a_separate_order() -> None:
    driver = two_pools()
    for number in range(6):
        driver.arrive(f"short{number}")
        driver.arrive(f"long{number}", prompt_tokens=900)
    shorts, longs = (ordered(driver.scheduler, driver.now, home) for home in ("short", "long"))
    assert shorts
    assert longs
    assert all(name.startswith("short") for name in shorts)
    assert all(name.startswith("long") for name in longs)
    assert len(shorts) + len(longs) == len(driver.scheduler.queue)
