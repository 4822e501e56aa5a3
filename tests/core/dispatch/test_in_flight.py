"""Requests in flight: suspensions of replicas, put-backs, and overdue first tokens."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.commands import Command, Conclude, EngineSilent, Revoke
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
from serve_app.request import PriorityClass, Usage
from tests.builders import ONE_POOL, ManualDriver, concluded, dispatched, one_replica, request

LOST, BUSY, ENGINE_ERROR = DispatchFailure.LOST, DispatchFailure.BUSY, DispatchFailure.ENGINE_ERROR
UNREACHABLE = DispatchFailure.UNREACHABLE


def pool_of(count: int, **changes: Any) -> ManualDriver:
    driver = ManualDriver(routing=ONE_POOL, **changes)
    for number in range(count):
        driver.join(f"s{number}", "only")
    return driver


def suspended(driver: ManualDriver) -> set[str]:
    return {state.spec.replica_id for state in driver.scheduler.ledger if state.suspension.active}


def fail(
    driver: ManualDriver, failure: DispatchFailure, request_id: str = "r", message: str = ""
) -> list[Command]:
    replica_id = driver.find(request_id).replica_id
    assert replica_id is not None
    return driver.feed(DispatchFailed(request_id, replica_id, failure, message))


@pytest.mark.parametrize("failure", [UNREACHABLE, LOST])
def test_a_broken_connection_suspends_immediately_until_the_next_report(failure: DispatchFailure) -> None:
    driver = pool_of(1)
    driver.arrive("r")
    fail(driver, failure)
    assert suspended(driver) == {"s0"}
    assert dispatched(driver.report("s0", after_s=0.2)) == [("r", "s0")]


def test_each_further_suspension_lasts_longer_until_the_replica_serves_again() -> None:
    driver = pool_of(1)
    lasted = []
    for number in range(8):
        driver.arrive(f"r{number}")
        fail(driver, UNREACHABLE, f"r{number}")
        driver.feed(Cancelled(f"r{number}"))
        began = driver.now
        while suspended(driver):
            driver.report("s0", after_s=0.1)
        lasted.append(driver.now - began)
    assert lasted == sorted(lasted)
    assert lasted[0] == pytest.approx(0.1)
    assert 5.0 < lasted[-1] <= 10.1
    driver.arrive("good")
    driver.feed(Finished("good", Outcome.COMPLETED))
    driver.arrive("last")
    fail(driver, UNREACHABLE, "last")
    driver.report("s0", after_s=0.1)
    assert not suspended(driver)


def test_at_most_half_of_a_pool_is_suspended() -> None:
    driver = pool_of(4)
    for number in range(4):
        driver.arrive(f"r{number}")
        fail(driver, UNREACHABLE, f"r{number}")
        fail(driver, UNREACHABLE, f"r{number}")
    assert len(suspended(driver)) == 2


def test_a_busy_engine_is_suspended_when_it_rejects_three_in_a_row() -> None:
    driver = pool_of(1)
    for number in range(3):
        assert not suspended(driver)
        driver.arrive(f"r{number}")
        fail(driver, BUSY, f"r{number}")
        driver.feed(Finished(f"r{number}", Outcome.CANCELLED))
    assert suspended(driver) == {"s0"}


def test_a_shorter_pause_does_not_end_a_longer_one() -> None:
    driver = pool_of(1)
    driver.arrive("a")
    driver.arrive("b")
    for request_id, pause_s in (("a", 10.0), ("b", 1.0)):
        driver.feed(DispatchFailed(request_id, "s0", DispatchFailure.BUSY, retry_after_s=pause_s))
    driver.report("s0", after_s=5.0)
    assert suspended(driver) == {"s0"}
    driver.report("s0", after_s=5.0)
    assert not suspended(driver)


@pytest.mark.parametrize(
    ("replicas", "failure", "served"),
    # A busy engine that serves in between, and requests that fail everywhere.
    [(1, BUSY, True), (4, ENGINE_ERROR, False)],
)
def test_other_failures_suspend_no_replica(replicas: int, failure: DispatchFailure, served: bool) -> None:
    driver = pool_of(replicas)
    for number in range(50):
        driver.arrive(f"r{number}")
        fail(driver, failure, f"r{number}")
        if served:
            driver.feed(FirstToken(f"r{number}"))
        driver.feed(Finished(f"r{number}", Outcome.COMPLETED if served else Outcome.FAILED))
    assert not suspended(driver)


def test_a_replica_that_fails_requests_that_others_serve_is_suspended() -> None:
    driver = pool_of(2)
    for number in range(3):
        assert not suspended(driver)
        driver.arrive(f"r{number}")
        assert driver.find(f"r{number}").replica_id == "s0"
        fail(driver, ENGINE_ERROR, f"r{number}")
        driver.feed(FirstToken(f"r{number}"))
        driver.feed(Finished(f"r{number}", Outcome.COMPLETED))
    assert suspended(driver) == {"s0"}


def test_a_replica_that_joins_again_has_no_suspensions() -> None:
    driver = pool_of(1)
    for number in range(4):
        driver.arrive(f"r{number}")
        fail(driver, UNREACHABLE, f"r{number}")
        driver.feed(Cancelled(f"r{number}"))
        driver.report("s0", after_s=20.0)
    driver.join("s0", "only")
    state = driver.scheduler.ledger["s0"]
    assert (state.suspension.active, state.suspension.count, state.suspension.faults) == (False, 0, 0)


# -- put-backs: one budget, one deadline, backoff, another replica, quarantine ----------------------------


def run_until_over(driver: ManualDriver, failure: DispatchFailure) -> tuple[list[float], Conclude]:
    """Let every dispatch of `r` fail; return the dispatch times and the conclusion."""
    dispatches: list[float] = [driver.now]
    commands: list[Command] = []
    for _ in range(10_000):
        scheduled = driver.scheduler.find("r")
        if scheduled is None:
            break
        if scheduled.replica_id is not None:
            commands = fail(driver, failure, message="no")
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
    assert "it was put back, and its backoff ends in" in driver.wait_reasons("r")
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


# -- requests whose first token is overdue ----------------------------------------------------------------

SILENT: dict[str, Any] = {"received": None, "waiting": None, "running": None, "kv_usage_ratio": None}


def two_servers(**load: Any) -> ManualDriver:
    """Return two servers of one pool, without metrics unless `load` states some."""
    driver = ManualDriver()
    for name in ("s1", "s2"):
        driver.join(name, kv_tokens=None, max_num_seqs=100, stall_timeout_s=60.0)
        driver.report(name, **{**SILENT, **load})
    return driver


def revoked(driver: ManualDriver, after_s: float) -> list[tuple[str, str]]:
    """Let time pass in reports, and return what is revoked."""
    found = []
    for _ in range(round(2 * after_s)):
        for name in ("s1", "s2"):
            load = driver.scheduler.ledger[name].report
            assert load is not None
            values = {field: getattr(load, field) for field in SILENT}
            commands = driver.report(name, after_s=0.25, **values)
            found += [(each.request_id, each.replica_id) for each in commands if isinstance(each, Revoke)]
    return found


def serve(driver: ManualDriver, request_id: str, first_s: float = 0.1) -> str:
    """Serve a request whole, and return its replica."""
    ((_, replica_id),) = dispatched(driver.arrive(request_id))
    sent_at = driver.now
    assert revoked(driver, first_s - 0.5) == []
    driver.feed(FirstToken(request_id), after_s=sent_at + first_s - driver.now)
    driver.feed(Finished(request_id, Outcome.COMPLETED, Usage(prompt_tokens=40, output_tokens=10)))
    return replica_id


def put_back(driver: ManualDriver, request_id: str, replica_id: str) -> list[tuple[str, str]]:
    return dispatched(driver.feed(DispatchFailed(request_id, replica_id, DispatchFailure.REVOKED)))


def test_a_request_that_hangs_is_moved_to_another_server_once() -> None:
    driver = two_servers()
    ((_, hung),) = dispatched(driver.arrive("a"))
    other = "s2" if hung == "s1" else "s1"
    assert revoked(driver, 4.5) == []
    assert revoked(driver, 1.0) == [("a", hung)]
    assert put_back(driver, "a", hung) == [("a", other)]
    # Never back and forth: its second server may take as long as it wants.
    assert revoked(driver, 30.0) == []
    driver.feed(FirstToken("a"))
    assert driver.find("a").started


def test_a_server_without_any_sign_of_life_is_named_and_gets_nothing_more() -> None:
    driver = two_servers()
    ((_, hung),) = dispatched(driver.arrive("a"))
    commands = []
    for _ in range(60):
        for name in ("s1", "s2"):
            commands += driver.report(name, after_s=0.1, **SILENT)
    (silent,) = [each for each in commands if isinstance(each, EngineSilent)]
    assert silent.replica_id == hung
    assert silent.silent_s >= 5.0
    assert {serve(driver, f"b{n}") for n in range(6)} == {"s2" if hung == "s1" else "s1"}


def test_the_limit_follows_the_slowest_recent_first_token() -> None:
    driver = two_servers()
    for number in range(20):
        serve(driver, f"r{number}", first_s=4.0)
    ((_, slow),) = dispatched(driver.arrive("a"))
    assert revoked(driver, 11.5) == []
    assert revoked(driver, 1.5) == [("a", slow)]


def test_without_another_server_that_accepts_it_a_request_stays() -> None:
    driver = two_servers()
    driver.report("s2", **SILENT, draining=True)
    driver.arrive("a")
    for _ in range(100):
        commands = driver.report("s1", after_s=0.2, **SILENT)
        assert not any(isinstance(each, Revoke) for each in commands)


def test_an_engine_that_reports_its_queue_and_computes_keeps_its_requests() -> None:
    driver = two_servers(received=0, waiting=2, running=5, kv_usage_ratio=0.5)
    driver.arrive("a")
    for _ in range(100):
        for name in ("s1", "s2"):
            load = {"received": 1, "waiting": 2, "running": 5, "kv_usage_ratio": 0.5, "computes": True}
            commands = driver.report(name, after_s=0.1, **load)
            assert not any(isinstance(each, Revoke) for each in commands)


def test_moves_are_a_small_share_of_the_work() -> None:
    driver = two_servers()
    for number in range(40):
        driver.arrive(f"r{number}")
    # Twenty of forty hang. The first few are moved, and then one for each twenty dispatches.
    moved = revoked(driver, 60.0)
    assert len(moved) == 8
    for request_id, replica_id in moved:
        put_back(driver, request_id, replica_id)
    assert len(revoked(driver, 60.0)) == 0


def test_a_wake_up_finds_an_overdue_start_without_reports() -> None:
    driver = two_servers()
    driver.arrive("a")
    driver.report("s1", after_s=2.0, **SILENT)
    driver.report("s2", after_s=2.0, **SILENT)
    wake_at = driver.scheduler.next_wakeup()
    assert wake_at is not None
    driver.now = 5.0
    commands = driver.feed(Woke())
    assert [each.request_id for each in commands if isinstance(each, Revoke)] == ["a"]
