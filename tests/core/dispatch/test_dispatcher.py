from typing import Any

import pytest

from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.dispatch.promotion import ClassFloorSettings
from serve_app.core.events import DispatchFailed, DispatchFailure, Finished, FirstToken
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from tests.builders import ONE_POOL, ManualDriver, dispatched, one_replica

INTERACTIVE, DEFAULT, BATCH = PriorityClass
# No growth by pace, so three are dispatched before the first of them starts.
FREE = BackpressureSettings(lag_factor=0.0)
# Batch work is dispatched only to engines with an empty queue.
STRICT = BackpressureSettings(lag_factor=0.0, batch_prefill_s=0.0)


def make_driver(**changes: Any) -> ManualDriver:
    """Return one replica that accepts three requests until the first of them starts."""
    limits = {"kv_tokens": 50_000, "max_num_seqs": 200}
    return one_replica(limits=limits, **{"backpressure": FREE, **changes})


def served_one_by_one(driver: ManualDriver, first: list[str]) -> list[str]:
    """Return the order of dispatch when dispatched requests start one by one."""
    order, sent = [], list(first)
    while sent:
        following = driver.feed(FirstToken(sent.pop(0)))
        names = [name for name, _ in dispatched(following)]
        order += names
        sent += names
    return order


def test_a_newcomer_is_dispatched_right_after_what_was_already_sent() -> None:
    driver = make_driver()
    sent = [name for n in range(20) for name, _ in dispatched(driver.arrive(f"a{n}", tenant="a"))]
    driver.arrive("b", tenant="b", prompt_tokens=300)
    driver.arrive("c", tenant="c")
    assert sent == ["a0", "a1", "a2"]
    assert served_one_by_one(driver, sent)[:4] == ["b", "c", "a3", "a4"]


def test_interactive_is_dispatched_first_then_default_then_batch() -> None:
    driver = make_driver(class_floors=ClassFloorSettings(default_share=0.0, batch_share=0.0))
    sent = [name for n in range(3) for name, _ in dispatched(driver.arrive(f"s{n}"))]
    driver.arrive("batch", priority=BATCH)
    driver.arrive("default", priority=DEFAULT)
    driver.arrive("urgent", priority=INTERACTIVE)
    order = served_one_by_one(driver, sent)
    assert order == ["urgent", "default", "batch"]


def test_batch_waits_for_an_engine_with_an_empty_queue() -> None:
    driver = make_driver(class_floors=ClassFloorSettings(batch_share=0.0), backpressure=STRICT)
    driver.arrive("r1")
    assert driver.arrive("b1", priority=BATCH) == []
    assert "capacity that other requests leave" in driver.wait_reasons("b1")
    assert dispatched(driver.feed(FirstToken("r1"))) == [("b1", "r1")]


def test_batch_joins_a_prefill_that_is_shorter_than_an_iteration() -> None:
    """At the prior of 0.1 ms per token, 0.02 s are 200 tokens."""
    driver = make_driver(class_floors=ClassFloorSettings(batch_share=0.0))
    per_token_s = driver.scheduler.prefill_costs.shared.per_token_s
    enough = int(FREE.batch_prefill_s / per_token_s) + 1
    driver.arrive("r1", prompt_tokens=enough - 50)
    assert dispatched(driver.arrive("b1", priority=BATCH, prompt_tokens=100)) == [("b1", "r1")]
    assert driver.arrive("b2", priority=BATCH, prompt_tokens=10) == []


def test_batch_gets_its_floor_share_during_interactive_traffic() -> None:
    driver = make_driver(class_floors=ClassFloorSettings(batch_share=0.1), backpressure=STRICT)
    driver.arrive("b1", priority=BATCH, tenant="night")
    driver.arrive("b2", priority=BATCH, tenant="night")
    running = ["b1"]
    order: list[str] = []
    for n in range(40):
        commands = driver.arrive(f"u{n}", priority=INTERACTIVE)
        if len(running) >= 3:
            commands += driver.feed(FirstToken(running.pop(0)))
        names = [name for name, _ in dispatched(commands)]
        running += names
        order += names
    assert "b2" in order
    assert order.index("b2") >= 9


def test_service_is_charged_at_dispatch_and_settled_with_what_the_engine_counted() -> None:
    driver = make_driver()
    driver.arrive("a", prompt_tokens=100, max_output_tokens=50, tenant="a")
    shares = driver.scheduler.queue.shares[DEFAULT]
    assert shares.counters()["a"] > 0
    driver.feed(FirstToken("a"))
    driver.feed(Finished("a", Outcome.COMPLETED, Usage(prompt_tokens=100, output_tokens=7)))
    assert shares.counters()["a"] == pytest.approx(114)


def test_a_request_that_was_returned_unserved_is_not_charged() -> None:
    driver = make_driver()
    driver.arrive("a", tenant="a")
    driver.feed(DispatchFailed("a", "r1", DispatchFailure.UNREACHABLE))
    assert driver.scheduler.queue.shares[DEFAULT].counters()["a"] == 0


def test_the_wait_reason_of_a_head_is_readable() -> None:
    driver = make_driver()
    for n in range(4):
        driver.arrive(f"r{n}")
    assert driver.wait_reasons("r3").startswith("only: every replica is at its limit")
    driver = ManualDriver(routing=ONE_POOL)
    driver.arrive("alone")
    assert driver.wait_reasons("alone") == "only: no replica is connected"
