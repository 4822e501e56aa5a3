"""LoRA adapter requests: placed on replicas that list the adapter, preferably where it ran last."""

from serve_app.core.events import Finished, Woke
from serve_app.errors import Outcome
from tests.builders import ManualDriver, concluded, dispatched


def fleet(**adapters: tuple[str, ...]) -> ManualDriver:
    driver = ManualDriver()
    for replica_id, names in adapters.items():
        driver.join(replica_id, adapters=names)
    return driver


def test_it_is_sent_only_to_replicas_that_list_the_adapter() -> None:
    driver = fleet(s1=("a",), s2=())
    for number in range(3):
        assert dispatched(driver.arrive(f"a{number}", adapter="a")) == [(f"a{number}", "s1")]
    assert driver.arrive("waits", adapter="a") == []
    assert driver.wait_reasons("waits") == "short: no replica with the adapter a accepts requests now"
    assert dispatched(driver.arrive("base")) == [("base", "s2")]
    assert dispatched(driver.feed(Finished("a0", Outcome.COMPLETED))) == [("waits", "s1")]


def test_a_replica_that_recently_ran_the_adapter_is_preferred_unless_clearly_busier() -> None:
    driver = fleet(s1=("a", "b"), s2=("a", "b"))
    driver.feed(Finished("x", Outcome.COMPLETED))
    (first,) = dispatched(driver.arrive("a0", adapter="a"))
    assert dispatched(driver.arrive("a1", adapter="a")) == [("a1", first[1])]
    (other,) = dispatched(driver.arrive("b0", adapter="b"))
    assert other[1] != first[1]
    # The engine's queue is full there.
    assert dispatched(driver.arrive("a2", adapter="a")) == [("a2", first[1])]
    assert dispatched(driver.arrive("a3", adapter="a")) == [("a3", other[1])]


def test_a_pool_that_does_not_list_it_is_none_of_its_pools() -> None:
    driver = fleet(s1=())
    driver.join("l1", "long", adapters=("a",))
    assert dispatched(driver.arrive("r", adapter="a")) == [("r", "l1")]


def test_one_that_is_listed_nowhere_waits_for_the_grace_and_is_unknown_then() -> None:
    driver = fleet(s1=())
    assert driver.arrive("r", adapter="a") == []
    assert dispatched(driver.join("s2", adapters=("a",))) == [("r", "s2")]
    driver.arrive("gone", adapter="b")
    driver.report("s1", after_s=4.9)
    assert driver.scheduler.find("gone") is not None
    assert concluded(driver.feed(Woke(), after_s=0.1)) == [("gone", "rejected_unknown_model")]


def test_an_unloaded_adapter_receives_no_requests() -> None:
    driver = fleet(s1=("a",), s2=("a",))
    driver.join("s1")
    for number in range(3):
        assert dispatched(driver.arrive(f"r{number}", adapter="a")) == [(f"r{number}", "s2")]
