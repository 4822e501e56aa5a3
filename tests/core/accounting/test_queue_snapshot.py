from serve_app.core.accounting.queue_snapshot import MAX_SUB_QUEUES
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.request import PriorityClass
from tests.builders import ONE_POOL, ManualDriver, one_replica


def saturated() -> ManualDriver:
    """Return a fleet on which three requests of tenant a run; two of b and one of c wait."""
    driver = one_replica(backpressure=BackpressureSettings(lag_factor=0.0))
    for number in range(3):
        driver.arrive(f"a{number}", tenant="a")
    driver.arrive("b1", tenant="b")
    driver.now += 2.0
    driver.arrive("b2", tenant="b")
    driver.arrive("c1", tenant="c", priority=PriorityClass.BATCH)
    return driver


def test_every_sub_queue_is_shown_by_its_head_the_longest_wait_first() -> None:
    driver = saturated()
    found = driver.scheduler.queue_snapshot(driver.now + 1.0)
    first, second = found.sub_queues
    assert (first.tenant, first.head, first.waiting, first.wait_s) == ("b", "b1", 2, 3.0)
    assert (second.priority, second.tenant, second.wait_s) == (PriorityClass.BATCH, "c", 1.0)
    assert first.reason == "only: every replica is at its limit"
    assert found.omitted == 0
    assert set(found.served[PriorityClass.DEFAULT]) == {"a", "b"}


def test_replicas_in_different_states_are_counted() -> None:
    driver = ManualDriver(routing=ONE_POOL, backpressure=BackpressureSettings(lag_factor=0.0))
    for number in range(3):
        driver.join(f"r{number}", "only")
    for number in range(9):
        driver.arrive(f"a{number}")
    first, *_ = driver.scheduler.ledger.of_pool("only")
    driver.scheduler.ledger.suspend(first, driver.now + 60.0)
    driver.arrive("waits")
    (head,) = driver.scheduler.queue_snapshot(driver.now).sub_queues
    assert head.reason == "only: no replica is open: 1 suspended, 2 at its limit"


def test_the_number_of_sub_queues_shown_is_bounded() -> None:
    driver = saturated()
    for number in range(MAX_SUB_QUEUES):
        driver.arrive(f"t{number}", tenant=f"t{number}")
    found = driver.scheduler.queue_snapshot(driver.now)
    assert len(found.sub_queues) == MAX_SUB_QUEUES
    assert found.omitted == 2
    assert found.sub_queues[0].head == "b1"


def test_a_snapshot_changes_nothing() -> None:
    driver = saturated()
    before = repr(driver.scheduler.queue), driver.scheduler.next_wakeup()
    driver.scheduler.queue_snapshot(driver.now)
    assert (repr(driver.scheduler.queue), driver.scheduler.next_wakeup()) == before


def test_each_length_queue_is_shown_by_its_most_urgent_head() -> None:
    driver = one_replica(policy="ewsjf", backpressure=BackpressureSettings(lag_factor=0.0))
    for number in range(3):
        driver.arrive(f"a{number}", prompt_tokens=40)
    driver.arrive("first", tenant="b", prompt_tokens=40)
    driver.now += 2.0
    driver.arrive("second", tenant="c", prompt_tokens=60)
    driver.arrive("long", tenant="c", prompt_tokens=600)
    found = {each.name: each for each in driver.scheduler.queue_snapshot(driver.now + 1.0).length_queues}
    assert list(found)[:3] == ["1-31", "32-63", "64-127"]
    assert (found["1-31"].waiting, found["1-31"].head, found["1-31"].longest_wait_s) == (0, None, None)
    short = found["32-63"]
    assert short.bounds is not None
    assert (short.bounds.min_tokens, short.bounds.max_tokens, short.bounds.bubble) == (32, 63, False)
    assert (short.waiting, short.longest_wait_s) == (2, 3.0)
    assert short.head is not None
    assert short.head.head == "first"
    assert short.head.reason
    assert found["512-1023"].waiting == 1


def test_queues_of_a_policy_without_bounds_are_shown_by_their_names() -> None:
    found = saturated().scheduler.queue_snapshot(3.0).length_queues
    assert [(each.name, each.bounds, each.waiting) for each in found] == [("all", None, 3)]
