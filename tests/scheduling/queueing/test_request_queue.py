from typing import Any

from serve_app.request import PriorityClass
from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.queueing.fairness import FairnessMode, FairnessSettings
from serve_app.scheduling.queueing.request_queue import WaitingRoom
from serve_app.scheduling.request import Entry
from tests.builders import World, request


class ShortestFirst(OrderingPolicy):
    """Two queues by length, the shortest first in each."""

    def queue_of(self, entry: Entry) -> str:
        return "small" if entry.estimate.prompt_tokens <= 100 else "large"

    def key(self, entry: Entry) -> float:
        return float(entry.estimate.prompt_tokens)

    def score(self, head: Entry, now: float) -> float:
        return -float(head.estimate.prompt_tokens)


def entry(request_id: str, prompt_tokens: int, sequence: int, *pools: str, **fields: Any) -> Entry:
    wanted = request(request_id, prompt_tokens=prompt_tokens, **fields)
    return Entry(wanted, World().scheduler.estimator.estimate(wanted), sequence, pools or ("short", "long"))


def heads(room: WaitingRoom, pool: str = "short", *, at_home: bool = True) -> list[str]:
    found = room.heads(PriorityClass.DEFAULT, pool, 0.0, at_home=at_home)
    return [head.request.request_id for head in found]


def test_the_head_of_each_lane_comes_by_score_and_inside_a_lane_by_key() -> None:
    room = WaitingRoom(ShortestFirst(), FairnessSettings())
    for number, length in enumerate([500, 90, 300, 20]):
        room.add(entry(f"r{length}", length, number))
    assert heads(room) == ["r20", "r300"]


def test_a_request_that_came_back_stands_first_in_its_lane_and_is_named_apart() -> None:
    room = WaitingRoom(ShortestFirst(), FairnessSettings())
    room.add(entry("r20", 20, 1))
    for name, length, sequence in (("back", 90, 2), ("back-large", 900, 3)):
        returned = entry(name, length, sequence)
        returned.returned = True
        room.add(returned)
    assert heads(room) == ["back", "back-large"]
    assert [head.request.request_id for head in room.returned_heads("short", at_home=True)] == [
        "back",
        "back-large",
    ]


def test_equal_keys_keep_the_order_of_arrival() -> None:
    room = WaitingRoom(ShortestFirst(), FairnessSettings())
    for number in range(3):
        room.add(entry(f"r{number}", 50, number))
    taken = []
    for _ in range(3):
        (head,) = room.all_heads("short", at_home=True)
        taken.append(head.request.request_id)
        room.remove(head)
    assert taken == ["r0", "r1", "r2"]


def test_home_and_spill_are_asked_for_apart() -> None:
    room = WaitingRoom(ShortestFirst(), FairnessSettings())
    room.add(entry("at-home", 50, 1, "short", "long"))
    room.add(entry("visitor", 50, 2, "long", "short"))
    room.add(entry("bound", 50, 3, "long"))
    assert heads(room, "short") == ["at-home"]
    assert heads(room, "short", at_home=False) == ["visitor"]
    assert heads(room, "long") == ["visitor", "bound"]


def test_one_that_leaves_and_comes_back_is_there_once() -> None:
    room = WaitingRoom(ShortestFirst(), FairnessSettings())
    one = entry("r", 50, 1)
    room.add(one)
    room.remove(one)
    room.add(one)
    assert [e.request.request_id for e in room] == ["r"]
    assert len(room) == 1
    room.remove(one)
    assert heads(room) == []
    assert room.waiting_tokens == 0


def test_many_that_leave_from_the_middle_take_no_memory() -> None:
    room = WaitingRoom(ShortestFirst(), FairnessSettings())
    entries = [entry(f"r{n}", 50, n) for n in range(1_000)]
    for one in entries:
        room.add(one)
    for one in entries[1:]:
        room.remove(one)
    (lane,) = room._lanes()
    assert len(lane._heap) < 100
    assert heads(room) == ["r0"]


def test_counts_are_by_home_pool_and_length_queue() -> None:
    room = WaitingRoom(ShortestFirst(), FairnessSettings())
    room.add(entry("a", 50, 1))
    room.add(entry("b", 60, 2, "short"))
    room.add(entry("c", 500, 3))
    assert room.counts() == {("short", "small"): 2, ("short", "large"): 1}
    assert repr(room).startswith("<WaitingRoom 3 of 1 tenants")


def test_tenants_take_turns_across_length_queues_and_scores_decide_among_equals() -> None:
    room = WaitingRoom(ShortestFirst(), FairnessSettings())
    for number in range(3):
        room.add(entry(f"a{number}", 50, number, tenant="a"))
    room.add(entry("b", 400, 3, tenant="b"))
    room.add(entry("c", 80, 4, tenant="c"))
    taken = []
    while room:
        first = next(room.heads(PriorityClass.DEFAULT, "short", 0.0, at_home=True))
        taken.append(first.request.request_id)
        room.remove(first)
        room.charge(first)
    assert taken == ["a0", "c", "b", "a1", "a2"]


def test_without_fairness_the_score_alone_decides() -> None:
    room = WaitingRoom(ShortestFirst(), FairnessSettings(mode=FairnessMode.OFF))
    for number in range(3):
        room.add(entry(f"a{number}", 50, number, tenant="a"))
    room.add(entry("c", 80, 4, tenant="c"))
    assert heads(room) == ["a0", "c"]
    first = next(room.heads(PriorityClass.DEFAULT, "short", 0.0, at_home=True))
    room.remove(first)
    room.charge(first)
    assert heads(room) == ["a1", "c"]


def test_classes_are_asked_for_apart() -> None:
    room = WaitingRoom(ShortestFirst(), FairnessSettings())
    room.add(entry("batch", 50, 1, priority=PriorityClass.BATCH))
    room.add(entry("now", 90, 2, priority=PriorityClass.INTERACTIVE))
    assert heads(room) == []
    assert room.waiting_classes() == [PriorityClass.INTERACTIVE, PriorityClass.BATCH]
    assert room.waiting_of(PriorityClass.BATCH) == room.waiting_of(PriorityClass.BATCH, "t1") == 1
    assert room.waiting_of(PriorityClass.BATCH, "nobody") == 0


def test_work_ahead_is_what_the_others_get_before_oneself() -> None:
    room = WaitingRoom(ShortestFirst(), FairnessSettings())
    each = entry("probe", 100, 0).estimate.expected_tokens
    for number in range(10):
        room.add(entry(f"heavy{number}", 100, number, tenant="heavy"))
    room.add(entry("urgent", 100, 20, tenant="x", priority=PriorityClass.INTERACTIVE))
    # The urgent one, and one turn of the heavy tenant.
    assert room.work_ahead(request("mine", tenant="light")) == 2 * each
    assert room.work_ahead(request("mine", tenant="heavy")) == 11 * each
    unfair = WaitingRoom(ShortestFirst(), FairnessSettings(mode=FairnessMode.OFF))
    for number in range(10):
        unfair.add(entry(f"heavy{number}", 100, number, tenant="heavy"))
    assert unfair.work_ahead(request("mine", tenant="light")) == 10 * each


def test_queueing_anew_neither_moves_tenants_nor_loses_anybody() -> None:
    room = WaitingRoom(ShortestFirst(), FairnessSettings())
    for number in range(3):
        room.add(entry(f"a{number}", 50, number, tenant="a"))
    room.add(entry("b", 400, 3, tenant="b"))
    first = next(room.heads(PriorityClass.DEFAULT, "short", 0.0, at_home=True))
    room.remove(first)
    room.charge(first)
    counters = room.shares[PriorityClass.DEFAULT].counters()
    before = sorted(one.request.request_id for one in room)
    room.queue_anew()
    assert room.shares[PriorityClass.DEFAULT].counters() == counters
    assert sorted(one.request.request_id for one in room) == before
    assert heads(room) == ["b", "a1"]
    assert room.queue_names() == {"small", "large"}
