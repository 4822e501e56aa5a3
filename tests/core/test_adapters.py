"""LoRA adapter requests: placed on replicas that list the adapter, preferably where it ran last."""

from dataclasses import replace

from serve_app.core.commands import Command
from serve_app.core.events import Arrived, Finished, ReplicaJoined, Woke
from serve_app.errors import Outcome
from tests.builders import ManualDriver, concluded, dispatched, request, spec


def fleet(pool: str = "short", **adapters: tuple[str, ...]) -> ManualDriver:
    driver = ManualDriver()
    for replica_id, names in adapters.items():
        join(driver, replica_id, names, pool)
    return driver


def join(driver: ManualDriver, replica_id: str, names: tuple[str, ...], pool: str = "short") -> list[Command]:
    joined = driver.feed(ReplicaJoined(replace(spec(replica_id, pool), adapters=names)))
    return joined + driver.report(replica_id)


def arrive(driver: ManualDriver, request_id: str, adapter: str | None) -> list[Command]:
    found = request(request_id, arrived_at=driver.now)
    asked = replace(found.submission.spec, adapter=adapter)
    return driver.feed(Arrived(replace(found, submission=replace(found.submission, spec=asked))))


def test_it_is_sent_only_to_replicas_that_list_the_adapter() -> None:
    driver = fleet(s1=("a",), s2=())
    for number in range(3):
        assert dispatched(arrive(driver, f"a{number}", "a")) == [(f"a{number}", "s1")]
    assert arrive(driver, "waits", "a") == []
    assert driver.wait_reasons("waits") == "short: no replica with the adapter a accepts requests now"
    assert dispatched(arrive(driver, "base", None)) == [("base", "s2")]
    assert dispatched(driver.feed(Finished("a0", Outcome.COMPLETED))) == [("waits", "s1")]


def test_a_replica_that_recently_ran_the_adapter_is_preferred_unless_clearly_busier() -> None:
    driver = fleet(s1=("a", "b"), s2=("a", "b"))
    driver.feed(Finished("x", Outcome.COMPLETED))
    (first,) = dispatched(arrive(driver, "a0", "a"))
    assert dispatched(arrive(driver, "a1", "a")) == [("a1", first[1])]
    (other,) = dispatched(arrive(driver, "b0", "b"))
    assert other[1] != first[1]
    # The engine's queue is full there.
    assert dispatched(arrive(driver, "a2", "a")) == [("a2", first[1])]
    assert dispatched(arrive(driver, "a3", "a")) == [("a3", other[1])]


def test_a_pool_that_does_not_list_it_is_none_of_its_pools() -> None:
    driver = fleet(s1=())
    join(driver, "l1", ("a",), "long")
    assert dispatched(arrive(driver, "r", "a")) == [("r", "l1")]


def test_one_that_is_listed_nowhere_waits_for_the_grace_and_is_unknown_then() -> None:
    driver = fleet(s1=())
    assert arrive(driver, "r", "a") == []
    assert dispatched(join(driver, "s2", ("a",))) == [("r", "s2")]
    arrive(driver, "gone", "b")
    driver.report("s1", after_s=4.9)
    assert driver.scheduler.find("gone") is not None
    assert concluded(driver.feed(Woke(), after_s=0.1)) == [("gone", "rejected_unknown_model")]


def test_an_unloaded_adapter_receives_no_requests() -> None:
    driver = fleet(s1=("a",), s2=("a",))
    join(driver, "s1", ())
    for number in range(3):
        assert dispatched(arrive(driver, f"r{number}", "a")) == [(f"r{number}", "s2")]
