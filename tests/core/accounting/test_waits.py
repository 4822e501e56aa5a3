"""Every cause of a wait, produced on purpose."""

from serve_app.core import events as ev
from serve_app.core.accounting.wait_causes import WaitBreakdown, WaitCause
from serve_app.core.accounting.waits import current_cause, wait_so_far
from serve_app.core.commands import Command, Conclude, Dispatch
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from tests.builders import ManualDriver, fill, one_replica, two_pools

SECOND = 1_000_000_000


def steady(**limits: int) -> ManualDriver:
    """Return one replica with fresh reports."""
    return one_replica(limits=dict(limits), backpressure=BackpressureSettings(report_limit_s=1_000.0))


def waited(commands: list[Command], request_id: str) -> WaitBreakdown:
    """Return the breakdown of a request that these commands dispatched or concluded."""
    found = [
        command.waited
        for command in commands
        if isinstance(command, Dispatch | Conclude) and command.request_id == request_id
    ]
    assert len(found) == 1
    assert found[0] is not None
    return found[0]


def finish(driver: ManualDriver, request_id: str, *, after_s: float = 0.0) -> list[Command]:
    """Finish a request, which frees one slot."""
    usage = Usage(prompt_tokens=50, output_tokens=5)
    return driver.feed(ev.Finished(request_id, Outcome.COMPLETED, usage), after_s=after_s)


def test_an_immediately_dispatched_request_has_no_breakdown() -> None:
    (command,) = steady().arrive("a")

    assert isinstance(command, Dispatch)
    assert command.waited is None


def test_a_request_that_gets_the_next_slot_waited_for_busy_engines() -> None:
    driver = steady()
    fill(driver)
    driver.arrive("waits")

    found = waited(finish(driver, "f0", after_s=2.0), "waits")

    assert found == WaitBreakdown({WaitCause.ENGINES_BUSY: 2 * SECOND}, {})
    assert found.wait_s == 2.0
    assert found.main_cause is WaitCause.ENGINES_BUSY


def test_slots_that_others_took_are_counted_by_class_and_tenant() -> None:
    driver = steady()
    fill(driver)
    driver.arrive("waits", tenant="me", priority=PriorityClass.DEFAULT)
    for number, (tenant, priority) in enumerate(
        [("other", PriorityClass.INTERACTIVE), ("me", PriorityClass.INTERACTIVE)]
    ):
        driver.arrive(f"ahead{number}", tenant=tenant, priority=priority)
        commands = finish(driver, f"f{number}", after_s=1.0)
        assert [c.request_id for c in commands if isinstance(c, Dispatch)] == [f"ahead{number}"]

    found = waited(finish(driver, "f2", after_s=3.0), "waits")

    assert found.causes == {WaitCause.HIGHER_CLASS: 2 * SECOND, WaitCause.ENGINES_BUSY: 3 * SECOND}
    assert found.ahead == {WaitCause.HIGHER_CLASS: 2}


def test_a_tenants_own_requests_and_those_of_others_are_counted_separately() -> None:
    driver = steady()
    fill(driver, tenant="first")
    driver.arrive("mine0", tenant="me")
    driver.arrive("waits", tenant="me")
    driver.arrive("theirs", tenant="other")
    order: list[str] = []
    commands: list[Command] = []
    for number in range(3):
        commands = finish(driver, f"f{number}", after_s=1.0)
        order += [c.request_id for c in commands if isinstance(c, Dispatch)]

    assert order == ["mine0", "theirs", "waits"]
    found = waited(commands, "waits")
    assert found.causes == {
        WaitCause.OWN_REQUESTS: SECOND,
        WaitCause.OTHER_TENANTS: SECOND,
        WaitCause.ENGINES_BUSY: SECOND,
    }
    assert found.ahead == {WaitCause.OWN_REQUESTS: 1, WaitCause.OTHER_TENANTS: 1}
    imposed = {(priority, tenant): s for (_, priority, tenant), s in driver.scheduler.waits.imposed.items()}
    # `mine0` took a slot that `theirs` waited for; `theirs` took one that `waits` waited for since then.
    assert imposed == {(PriorityClass.DEFAULT, "me"): 1.0, (PriorityClass.DEFAULT, "other"): 1.0}


def test_reading_a_wait_before_it_ends_does_not_change_it() -> None:
    """Two schedulers get the same requests; one request's wait is read after each event in one of them."""
    ended = []
    for looks in (True, False):
        driver = steady()
        fill(driver, tenant="first")
        for name, tenant in (("mine", "me"), ("waits", "me"), ("theirs", "other")):
            driver.arrive(name, tenant=tenant)
        commands: list[Command] = []
        for number in range(3):
            if looks and "waits" not in {c.request_id for c in commands if isinstance(c, Dispatch)}:
                scheduled = driver.find("waits")
                driver.now += 0.25
                so_far = wait_so_far(scheduled, driver.now)
                assert so_far.wait_s == driver.now - scheduled.request.arrived_at
                assert current_cause(scheduled) is WaitCause.ENGINES_BUSY
                driver.now -= 0.25
            commands = finish(driver, f"f{number}", after_s=1.0)
        ended.append(waited(commands, "waits"))

    assert ended[0] == ended[1]
    assert ended[0].wait_s == 3.0


def test_the_wait_of_a_request_that_joins_others_begins_at_its_arrival() -> None:
    driver = steady()
    fill(driver)
    driver.arrive("waits")
    driver.feed(ev.Woke(), after_s=1.0)
    driver.arrive("later")

    so_far = wait_so_far(driver.find("later"), driver.now + 2.0)
    cancelled = waited(driver.feed(ev.Cancelled("later"), after_s=2.0), "later")

    assert so_far.causes == cancelled.causes == {WaitCause.ENGINES_BUSY: 2 * SECOND}


def test_a_large_request_waits_for_kv_cache_while_small_ones_pass() -> None:
    driver = steady(kv_tokens=10_000, max_model_len=10_000)
    driver.arrive("running", prompt_tokens=5_000)
    driver.feed(ev.FirstToken("running"))
    assert not driver.arrive("huge", prompt_tokens=9_000)

    assert [type(command) for command in driver.arrive("small", tenant="other")] == [Dispatch]
    finish(driver, "small")
    found = waited(finish(driver, "running", after_s=4.0), "huge")

    assert found.causes == {WaitCause.KV_CACHE: 4 * SECOND}
    assert not found.ahead


def test_batch_work_waits_for_an_engine_without_a_queue() -> None:
    driver = steady()
    driver.arrive("f0", prompt_tokens=900)
    driver.arrive("f1", prompt_tokens=900)
    driver.arrive("batch", priority=PriorityClass.BATCH)

    assert not driver.feed(ev.Woke(), after_s=1.0)
    commands = driver.feed(ev.FirstToken("f0"), after_s=1.0) + driver.feed(ev.FirstToken("f1"))
    found = waited(commands, "batch")

    assert found.causes == {WaitCause.ENGINE_QUEUE: 2 * SECOND}


def test_no_replica_a_stale_report_and_busy_engines_follow_each_other() -> None:
    driver = one_replica()
    fill(driver)
    driver.arrive("waits")
    driver.feed(ev.Woke(), after_s=1.0)
    # The report is stale from here on.
    driver.feed(ev.Woke(), after_s=2.5)
    driver.feed(ev.ReplicaLost("r1"), after_s=1.0)

    commands = driver.join("r2", "only") if driver.feed(ev.Woke(), after_s=1.0) == [] else []
    found = waited(commands, "waits")

    assert list(found.causes) == [WaitCause.ENGINES_BUSY, WaitCause.NO_REPLICA, WaitCause.STALE_REPORT]
    assert sum(found.causes.values()) == int(driver.now * 1e9)


def test_a_request_for_an_adapter_waits_for_its_replicas() -> None:
    driver = two_pools(no_replica_grace_s=30.0)
    driver.join("s2", "short", adapters=("a",))
    for number in range(3):
        driver.arrive(f"f{number}", adapter="a")
    driver.arrive("waits", adapter="a")

    usage = Usage(prompt_tokens=50, output_tokens=5)
    found = waited(driver.feed(ev.Finished("f0", Outcome.COMPLETED, usage), after_s=2.0), "waits")

    assert found.causes == {WaitCause.PARTICULAR_REPLICA: 2 * SECOND}


def test_an_earlier_attempt_and_its_backoff_are_wait_causes() -> None:
    driver = steady()
    driver.join("r2", "only")
    commands = driver.arrive("often")
    for after_s in (1.0, 2.0):
        replica_id = next(c.replica_id for c in commands if isinstance(c, Dispatch))
        busy = ev.DispatchFailed("often", replica_id, ev.DispatchFailure.ENGINE_ERROR)
        commands = driver.feed(busy, after_s=after_s)
    assert commands == []
    waiting = driver.find("often")
    assert current_cause(waiting) is WaitCause.BACKOFF
    so_far = wait_so_far(waiting, driver.now + 0.5)
    assert so_far.causes == {WaitCause.EARLIER_ATTEMPT: 3 * SECOND, WaitCause.BACKOFF: SECOND // 2}
    wake_at = driver.scheduler.next_wakeup()
    assert wake_at is not None
    rest_s = wake_at - driver.now
    found = waited(driver.feed(ev.Woke(), after_s=rest_s), "often")

    assert found.causes[WaitCause.EARLIER_ATTEMPT] == 3 * SECOND
    assert found.causes[WaitCause.BACKOFF] == sum(found.causes.values()) - 3 * SECOND
    assert sum(found.causes.values()) == int(driver.now * 1e9)


def test_the_wait_before_this_scheduler_is_a_separate_cause() -> None:
    driver = steady()
    fill(driver)
    driver.now = 10.0
    driver.report("r1")
    driver.arrive("old", arrived_at=4.0)

    found = waited(finish(driver, "f0", after_s=1.0), "old")

    assert found.causes == {WaitCause.BEFORE_SCHEDULER: 6 * SECOND, WaitCause.ENGINES_BUSY: SECOND}


def test_a_request_that_expires_or_is_cancelled_in_the_queue_has_causes() -> None:
    driver = steady()
    fill(driver)
    driver.arrive("expires", expires_at=driver.now + 2.0)
    driver.arrive("cancelled")

    expired = waited(driver.feed(ev.Woke(), after_s=2.0), "expires")
    cancelled = waited(driver.feed(ev.Cancelled("cancelled")), "cancelled")

    assert expired.causes == cancelled.causes == {WaitCause.ENGINES_BUSY: 2 * SECOND}


def test_the_message_about_an_expired_request_has_its_main_cause() -> None:
    driver = steady()
    fill(driver)
    driver.arrive("expires", expires_at=driver.now + 2.0)

    (command,) = driver.feed(ev.Woke(), after_s=2.0)

    assert isinstance(command, Conclude)
    assert command.conclusion.message == (
        "the queue timeout of the request ended after 2.0 s; main cause: no engine accepted more requests"
    )


def test_no_account_remains_for_an_empty_queue() -> None:
    driver = steady()
    fill(driver)
    driver.arrive("waits")
    assert len(driver.scheduler.queue.waits) == 1

    finish(driver, "f0", after_s=1.0)

    assert len(driver.scheduler.queue.waits) == 0
