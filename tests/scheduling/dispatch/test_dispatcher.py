from typing import Any

import pytest

from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from serve_app.routing.pools import RoutingSettings
from serve_app.scheduling.dispatch.backpressure import BackpressureSettings
from serve_app.scheduling.dispatch.class_floors import ClassFloorSettings
from serve_app.scheduling.events import DispatchFailed, DispatchFailure, Finished, FirstToken
from serve_app.scheduling.queueing.fairness import FairnessSettings
from tests.builders import Simulation, dispatched

INTERACTIVE, DEFAULT, BATCH = PriorityClass
# Without growth by pace, so that three go until the first of them starts.
FREE = BackpressureSettings(lag_factor=0.0)
# Batch work goes to engines with an empty queue and to no other.
STRICT = BackpressureSettings(lag_factor=0.0, batch_prefill_s=0.0)


def world(**changes: Any) -> Simulation:
    """One replica that takes three requests until the first of them starts."""
    made = Simulation(routing=RoutingSettings(pools=("only",)), **{"backpressure": FREE, **changes})
    made.join("r1", "only", kv_tokens=50_000, max_num_seqs=200)
    return made


def served_one_by_one(made: Simulation, first: list[str]) -> list[str]:
    """Who follows when each of those sent starts in turn."""
    order, sent = [], list(first)
    while sent:
        following = made.feed(FirstToken(sent.pop(0)))
        names = [name for name, _ in dispatched(following)]
        order += names
        sent += names
    return order


def test_a_newcomer_goes_right_after_what_was_already_sent() -> None:
    made = world()
    sent = [name for n in range(20) for name, _ in dispatched(made.arrive(f"a{n}", tenant="a"))]
    made.arrive("b", tenant="b", prompt_tokens=300)
    made.arrive("c", tenant="c")
    assert sent == ["a0", "a1", "a2"]
    assert served_one_by_one(made, sent)[:4] == ["b", "c", "a3", "a4"]


def test_interactive_goes_first_then_default_then_batch() -> None:
    made = world(class_floors=ClassFloorSettings(default_share=0.0, batch_share=0.0))
    sent = [name for n in range(3) for name, _ in dispatched(made.arrive(f"s{n}"))]
    made.arrive("batch", priority=BATCH)
    made.arrive("default", priority=DEFAULT)
    made.arrive("urgent", priority=INTERACTIVE)
    order = served_one_by_one(made, sent)
    assert order == ["urgent", "default", "batch"]


def test_batch_waits_for_an_engine_with_an_empty_queue() -> None:
    made = world(class_floors=ClassFloorSettings(batch_share=0.0), backpressure=STRICT)
    made.arrive("r1")
    assert made.arrive("b1", priority=BATCH) == []
    head = made.scheduler.find("b1")
    assert head is not None
    assert "empty queue" in made.scheduler.dispatcher.why_waiting(head, made.now)
    assert dispatched(made.feed(FirstToken("r1"))) == [("b1", "r1")]


def test_batch_joins_as_much_prefill_as_nobody_feels() -> None:
    """At the prior of 0.1 ms a token, 0.02 s are 200 tokens."""
    made = world(class_floors=ClassFloorSettings(batch_share=0.0))
    per_token_s = made.scheduler.prefill_cost.per_token_s
    enough = int(FREE.batch_prefill_s / per_token_s) + 1
    made.arrive("r1", prompt_tokens=enough - 50)
    assert dispatched(made.arrive("b1", priority=BATCH, prompt_tokens=100)) == [("b1", "r1")]
    assert made.arrive("b2", priority=BATCH, prompt_tokens=10) == []


def test_batch_gets_its_floor_beside_a_stream_of_urgent_requests() -> None:
    made = world(class_floors=ClassFloorSettings(batch_share=0.1), backpressure=STRICT)
    made.arrive("b1", priority=BATCH, tenant="night")
    made.arrive("b2", priority=BATCH, tenant="night")
    running = ["b1"]
    order: list[str] = []
    for n in range(40):
        commands = made.arrive(f"u{n}", priority=INTERACTIVE)
        if len(running) >= 3:
            commands += made.feed(FirstToken(running.pop(0)))
        names = [name for name, _ in dispatched(commands)]
        running += names
        order += names
    assert "b2" in order
    assert order.index("b2") >= 9


def test_service_is_charged_at_dispatch_and_settled_with_what_the_engine_counted() -> None:
    made = world(fairness=FairnessSettings(decode_weight=2.0))
    made.arrive("a", prompt_tokens=100, max_output_tokens=50, tenant="a")
    shares = made.scheduler.queue.shares[DEFAULT]
    assert shares.counters()["a"] > 0
    made.feed(FirstToken("a"))
    made.feed(Finished("a", Outcome.COMPLETED, Usage(prompt_tokens=100, output_tokens=7)))
    assert shares.counters()["a"] == pytest.approx(114)


def test_what_came_back_unserved_is_not_charged() -> None:
    made = world()
    made.arrive("a", tenant="a")
    made.feed(DispatchFailed("a", "r1", DispatchFailure.BUSY))
    assert made.scheduler.queue.shares[DEFAULT].counters()["a"] == 0


def test_a_request_that_came_back_goes_before_every_class() -> None:
    made = world()
    made.join("r2", "only", kv_tokens=50_000, max_num_seqs=200)
    sent = [name for n in range(6) for name, _ in dispatched(made.arrive(f"a{n}", priority=DEFAULT))]
    made.arrive("urgent", priority=INTERACTIVE)
    made.feed(DispatchFailed(sent[0], "r1", DispatchFailure.BUSY))
    other = [name for name in sent if made.scheduler.find(name).replica_id == "r2"]  # type: ignore[union-attr]
    assert dispatched(made.feed(FirstToken(other[0]))) == [(sent[0], "r2")]


def test_why_a_head_waits_is_told_in_words() -> None:
    made = world()
    for n in range(4):
        made.arrive(f"r{n}")
    head = made.scheduler.find("r3")
    assert head is not None
    assert made.scheduler.dispatcher.why_waiting(head, made.now).startswith(
        "only: every replica is saturated"
    )
    made = Simulation(routing=RoutingSettings(pools=("only",)))
    made.arrive("alone")
    head = made.scheduler.find("alone")
    assert head is not None
    assert made.scheduler.dispatcher.why_waiting(head, made.now) == "only: no replica is connected"
