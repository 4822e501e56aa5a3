"""The document of what is queued, for how long and why."""

from typing import Any

from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.queueing.floors import FloorSettings
from serve_app.request import PriorityClass
from serve_app.serving.scheduler.documents import MAX_SUB_QUEUES, queue_document
from tests.builders import ONE_POOL, ManualDriver, one_replica


def saturated(**changes: Any) -> ManualDriver:
    """Return a fleet on which three requests of tenant a run; two of b and one of c wait."""
    driver = one_replica(backpressure=BackpressureSettings(lag_factor=0.0), **changes)
    for number in range(3):
        driver.arrive(f"a{number}", tenant="a")
    driver.arrive("b1", tenant="b")
    driver.now += 2.0
    driver.arrive("b2", tenant="b")
    driver.arrive("c1", tenant="c", priority=PriorityClass.BATCH)
    return driver


def shown(driver: ManualDriver, *, after_s: float = 0.0) -> dict[str, Any]:
    return queue_document(driver.scheduler, driver.now + after_s, MAX_SUB_QUEUES)


def test_every_sub_queue_is_shown_by_its_head_the_longest_wait_first() -> None:
    driver = saturated()
    found = shown(driver, after_s=1.0)
    first, second = found["sub_queues"]
    assert (first["tenant"], first["head"], first["waiting"], first["wait_s"]) == ("b", "b1", 2, 3.0)
    assert (second["priority"], second["tenant"], second["wait_s"]) == (PriorityClass.BATCH, "c", 1.0)
    assert first["reason"] == "only: every replica is at its limit"
    assert found["sub_queues_omitted"] == 0
    assert set(found["served"]["default"]) == {"a", "b"}


def test_floors_are_shown_with_what_they_were_served_those_behind_most_first() -> None:
    floors = FloorSettings(tenants={"idle": 5.0, "b": 1_000.0}, classes={PriorityClass.BATCH: 20.0})
    driver = saturated(floors=floors)
    found = shown(driver, after_s=1.0)["floors"]
    assert (found["tokens_per_s"], found["served_tokens_per_s"] > 0) == (1_025.0, True)
    assert [(each["subject"], each["waiting"], each["behind_s"]) for each in found["subjects"]] == [
        ("tenant b", True, 3.0),
        ("class batch", True, 1.0),
        ("tenant idle", False, 0.0),
    ]


def test_replicas_in_different_states_are_counted() -> None:
    driver = ManualDriver(routing=ONE_POOL, backpressure=BackpressureSettings(lag_factor=0.0))
    for number in range(3):
        driver.join(f"r{number}", "only")
    for number in range(9):
        driver.arrive(f"a{number}")
    first, *_ = driver.scheduler.ledger.of_pool("only")
    driver.scheduler.ledger.suspend(first, driver.now + 60.0)
    driver.arrive("waits")
    (head,) = shown(driver)["sub_queues"]
    assert head["reason"] == "only: no replica is open: 1 suspended, 2 at its limit"


def test_the_number_of_sub_queues_shown_is_bounded() -> None:
    driver = saturated()
    for number in range(MAX_SUB_QUEUES):
        driver.arrive(f"t{number}", tenant=f"t{number}")
    found = shown(driver)
    assert len(found["sub_queues"]) == MAX_SUB_QUEUES
    assert found["sub_queues_omitted"] == 2
    assert found["sub_queues"][0]["head"] == "b1"


def test_a_snapshot_changes_nothing() -> None:
    driver = saturated()
    before = repr(driver.scheduler.queue), driver.scheduler.next_wakeup()
    shown(driver)
    assert (repr(driver.scheduler.queue), driver.scheduler.next_wakeup()) == before


def test_each_length_queue_is_shown_by_its_most_urgent_head() -> None:
    driver = one_replica(policy="ewsjf", backpressure=BackpressureSettings(lag_factor=0.0))
    for number in range(3):
        driver.arrive(f"a{number}", prompt_tokens=40)
    driver.arrive("first", tenant="b", prompt_tokens=40)
    driver.now += 2.0
    driver.arrive("second", tenant="c", prompt_tokens=60)
    driver.arrive("long", tenant="c", prompt_tokens=600)
    found = {each["name"]: each for each in shown(driver, after_s=1.0)["length_queues"]}
    assert list(found)[:3] == ["1-31", "32-63", "64-127"]
    assert (found["1-31"]["waiting"], found["1-31"]["head"], found["1-31"]["longest_wait_s"]) == (
        0,
        None,
        None,
    )
    short = found["32-63"]
    assert short["bounds"] == {"name": "32-63", "min_tokens": 32, "max_tokens": 63, "bubble": False}
    assert (short["waiting"], short["longest_wait_s"]) == (2, 3.0)
    assert short["head"]["head"] == "first"
    assert short["head"]["reason"]
    assert found["512-1023"]["waiting"] == 1


def test_queues_of_a_policy_without_bounds_are_shown_by_their_names() -> None:
    found = shown(saturated())["length_queues"]
    assert [(each["name"], each["bounds"], each["waiting"]) for each in found] == [("all", None, 3)]
