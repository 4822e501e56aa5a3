"""Put-backs: one budget, one deadline, backoff, another replica, quarantine."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.commands import Command, Conclude
from serve_app.core.events import (
    Arrived,
    Cancelled,
    DispatchFailed,
    DispatchFailure,
    Finished,
    FirstToken,
    PartitionChanged,
    ReplicaLost,
    Woke,
)
from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from tests.builders import ONE_POOL, ManualDriver, concluded, dispatched, one_replica, request

LOST, BUSY, ENGINE_ERROR = DispatchFailure.LOST, DispatchFailure.BUSY, DispatchFailure.ENGINE_ERROR
UNREACHABLE = DispatchFailure.UNREACHABLE


def pool_of(count: int, **changes: Any) -> ManualDriver:
    driver = ManualDriver(routing=ONE_POOL, **changes)
    for number in range(count):
        driver.join(f"s{number}", "only")
    return driver


def fail(driver: ManualDriver, failure: DispatchFailure, request_id: str = "r") -> list[Command]:
    replica_id = driver.find(request_id).replica_id
    assert replica_id is not None
    return driver.feed(DispatchFailed(request_id, replica_id, failure))


def run_until_over(driver: ManualDriver, failure: DispatchFailure) -> tuple[list[float], Conclude]:
    """Let every dispatch of `r` fail; return the dispatch times and the conclusion."""
    dispatches: list[float] = [driver.now]
    commands: list[Command] = []
    for _ in range(10_000):
        scheduled = driver.scheduler.find("r")
        if scheduled is None:
            break
        if scheduled.replica_id is not None:
            commands = driver.feed(DispatchFailed("r", scheduled.replica_id, failure, "no"))
        else:
            # Reports arrive five times per second, and the scheduler wakes when it asked to.
            wake_at = driver.scheduler.next_wakeup()
            assert wake_at is not None
            driver.now = min(max(wake_at, driver.now), driver.now + 0.2)
            commands = driver.feed(Woke())
            for state in list(driver.scheduler.ledger):
                commands += driver.report(state.spec.replica_id)
        dispatches += [driver.now for _ in dispatched(commands)]
    (end,) = (command for command in commands if isinstance(command, Conclude))
    return dispatches, end


@pytest.mark.parametrize("failure", [BUSY, UNREACHABLE])
def test_a_request_rejected_everywhere_is_retried_with_backoff_until_its_limit(
    failure: DispatchFailure,
) -> None:
    driver = pool_of(3, max_put_backs=9)
    driver.arrive("r")
    dispatches, end = run_until_over(driver, failure)
    assert len(dispatches) == 9
    waits = [after - before for before, after in itertools.pairwise(dispatches)]
    assert waits[0] == 0
    # A suspended replica also delays some attempts until a report.
    assert all(wait >= 0.1 * 2**number for number, wait in enumerate(waits[1:]))
    assert sum(waits) < 20
    assert (end.conclusion.outcome, end.dispatched) == (Outcome.FAILED, True)
    assert "put back 9 times" in end.conclusion.message


def test_put_backs_do_not_extend_the_deadline() -> None:
    driver = pool_of(3)
    driver.arrive("r", expires_at=2.0)
    dispatches, end = run_until_over(driver, BUSY)
    assert driver.now == pytest.approx(2.0)
    assert len(dispatches) < 8
    assert end.conclusion.outcome is Outcome.EXPIRED
    assert "put back 6 times; last failure: no" in end.conclusion.message


def test_a_request_waits_for_others_rather_than_for_the_replica_that_failed_it() -> None:
    driver = ManualDriver(routing=ONE_POOL)
    driver.join("s0", "only")
    driver.join("s1", "only", kv_tokens=1_000)
    driver.arrive("big", prompt_tokens=900, max_output_tokens=90)
    driver.arrive("r", prompt_tokens=900, max_output_tokens=90)
    assert {driver.find(name).replica_id for name in ("big", "r")} == {"s0"}
    driver.arrive("full", prompt_tokens=900, max_output_tokens=90)
    driver.feed(DispatchFailed("full", "s0", ENGINE_ERROR))
    assert driver.find("full").replica_id == "s1"
    assert dispatched(driver.feed(DispatchFailed("r", "s0", ENGINE_ERROR))) == []
    assert "failed on every open replica" in driver.wait_reasons("r")
    assert dispatched(driver.feed(Finished("full", Outcome.COMPLETED))) == [("r", "s1")]


def test_the_only_replica_is_tried_again() -> None:
    driver = one_replica("s0")
    driver.arrive("r")
    assert dispatched(driver.feed(DispatchFailed("r", "s0", ENGINE_ERROR))) == [("r", "s0")]


def test_a_request_lost_on_two_replicas_fails() -> None:
    driver = pool_of(3)
    driver.arrive("r")
    assert dispatched(driver.feed(DispatchFailed("r", "s0", LOST))) == [("r", "s1")]
    (end,) = driver.feed(DispatchFailed("r", "s1", LOST, "the engine died"))
    assert isinstance(end, Conclude)
    assert (end.conclusion.outcome, end.dispatched) == (Outcome.FAILED, True)
    assert "the engine died" in end.conclusion.message


def test_of_the_requests_on_a_dead_engine_only_the_one_that_kills_engines_fails() -> None:
    """Quarantine: a replica has one suspect that has not begun, so the second death shows the cause."""
    driver = pool_of(1)
    names = ("poison", "r1", "r2")
    for name in names:
        driver.arrive(name)
    driver.join("s1", "only")
    driver.feed(ReplicaLost("s0"))
    sent = [driver.feed(DispatchFailed(name, "s0", LOST)) for name in names]
    assert [dispatched(commands) for commands in sent] == [[("poison", "s1")], [], []]
    assert "another request in quarantine" in driver.wait_reasons("r1")
    driver.join("s2", "only")
    assert driver.find("r1").replica_id == "s2"
    driver.feed(ReplicaLost("s1"))
    assert concluded(driver.feed(DispatchFailed("poison", "s1", LOST))) == [("poison", "failed")]
    # One answer has begun, which ends its quarantine: the next suspect may use that replica.
    assert dispatched(driver.feed(FirstToken("r1"))) == [("r2", "s2")]


def test_other_requests_may_run_beside_one_in_quarantine() -> None:
    driver = pool_of(1)
    driver.arrive("r")
    driver.feed(ReplicaLost("s0"))
    driver.join("s1", "only")
    fail(driver, LOST)
    assert driver.find("r").replica_id == "s1"
    assert dispatched(driver.arrive("other")) == [("other", "s1")]


@pytest.mark.parametrize(
    ("failure", "first"), [(UNREACHABLE, "back"), (LOST, "back"), (ENGINE_ERROR, "urgent"), (BUSY, "urgent")]
)
def test_only_a_request_that_lost_its_replica_precedes_all_others(
    failure: DispatchFailure, first: str
) -> None:
    driver = ManualDriver(routing=ONE_POOL)
    size = {"prompt_tokens": 900, "max_output_tokens": 90}
    driver.join("s0", "only", kv_tokens=1_000)
    driver.arrive("back", **size)
    driver.join("s1", "only", kv_tokens=1_000)
    driver.arrive("blocks", **size)
    driver.feed(ReplicaLost("s0"))
    driver.arrive("urgent", priority=PriorityClass.INTERACTIVE, **size)
    driver.feed(DispatchFailed("back", "s0", failure))
    assert dispatched(driver.feed(Finished("blocks", Outcome.COMPLETED))) == [(first, "s1")]


def test_a_request_in_backoff_waits_counts_and_can_be_cancelled() -> None:
    driver = one_replica("s0", policy="ewsjf")
    driver.arrive("r")
    assert dispatched(fail(driver, BUSY)) == [("r", "s0")]
    assert dispatched(fail(driver, BUSY)) == []
    scheduler = driver.scheduler
    assert (len(scheduler.queue), len(scheduler.queue.backoff), len(scheduler)) == (1, 1, 1)
    assert [each.request.request_id for each in scheduler.queue] == ["r"]
    # It does not delay others, and learned queues do not move it.
    assert dispatched(driver.arrive("other")) == [("other", "s0")]
    interval = LengthInterval(min_tokens=1, max_tokens=100, mean_tokens=50.0, count=9)
    driver.feed(PartitionChanged(Partition((interval,))))
    wake_at = scheduler.next_wakeup()
    assert wake_at is not None
    assert driver.now < wake_at < math.inf
    assert concluded(driver.feed(Cancelled("r"))) == [("r", "cancelled")]
    assert (len(scheduler.queue), len(scheduler.queue.backoff)) == (0, 0)


def test_a_new_scheduler_retains_the_put_backs_and_the_quarantine() -> None:
    driver = pool_of(2, max_put_backs=4)
    driver.feed(Arrived(request("r", attempts=3)))
    assert concluded(fail(driver, BUSY)) == [("r", "failed")]
    driver = pool_of(2)
    driver.feed(Arrived(replace(request("r", attempts=1), lost=True)))
    assert concluded(fail(driver, LOST)) == [("r", "failed")]
