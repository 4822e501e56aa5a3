from typing import Any

from serve_app.request import PriorityClass
from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.queueing.fairness import FairnessMode, FairnessSettings
from serve_app.scheduling.queueing.request_queue import RequestQueue
from serve_app.scheduling.request import ScheduledRequest
from tests.builders import Simulation, request


class ShortestFirst(OrderingPolicy):
    """Two queues by length, the shortest first in each."""

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        return "small" if scheduled.estimate.prompt_tokens <= 100 else "large"

    def key(self, scheduled: ScheduledRequest) -> float:
        return float(scheduled.estimate.prompt_tokens)

    def score(self, head: ScheduledRequest, now: float) -> float:
        return -float(head.estimate.prompt_tokens)


def scheduled(
    request_id: str, prompt_tokens: int, sequence: int, *pools: str, **fields: Any
) -> ScheduledRequest:
    wanted = request(request_id, prompt_tokens=prompt_tokens, **fields)
    return ScheduledRequest(
        wanted, Simulation().scheduler.estimator.estimate(wanted), sequence, pools or ("short", "long")
    )


def heads(queue: RequestQueue, pool: str = "short", *, at_home: bool = True) -> list[str]:
    found = queue.heads(PriorityClass.DEFAULT, pool, 0.0, at_home=at_home)
    return [head.request.request_id for head in found]


def test_the_head_of_each_lane_comes_by_score_and_inside_a_lane_by_key() -> None:
    queue = RequestQueue(ShortestFirst(), FairnessSettings())
    for number, length in enumerate([500, 90, 300, 20]):
        queue.add(scheduled(f"r{length}", length, number))
    assert heads(queue) == ["r20", "r300"]


def test_a_request_that_came_back_stands_first_in_its_lane_and_is_named_apart() -> None:
    queue = RequestQueue(ShortestFirst(), FairnessSettings())
    queue.add(scheduled("r20", 20, 1))
    for name, length, sequence in (("back", 90, 2), ("back-large", 900, 3)):
        returned = scheduled(name, length, sequence)
        returned.returned = True
        queue.add(returned)
    assert heads(queue) == ["back", "back-large"]
    assert [head.request.request_id for head in queue.returned_heads("short", at_home=True)] == [
        "back",
        "back-large",
    ]


def test_equal_keys_keep_the_order_of_arrival() -> None:
    queue = RequestQueue(ShortestFirst(), FairnessSettings())
    for number in range(3):
        queue.add(scheduled(f"r{number}", 50, number))
    taken = []
    for _ in range(3):
        (head,) = queue.all_heads("short", at_home=True)
        taken.append(head.request.request_id)
        queue.remove(head)
    assert taken == ["r0", "r1", "r2"]


def test_home_and_spill_are_asked_for_apart() -> None:
    queue = RequestQueue(ShortestFirst(), FairnessSettings())
    queue.add(scheduled("at-home", 50, 1, "short", "long"))
    queue.add(scheduled("visitor", 50, 2, "long", "short"))
    queue.add(scheduled("bound", 50, 3, "long"))
    assert heads(queue, "short") == ["at-home"]
    assert heads(queue, "short", at_home=False) == ["visitor"]
    assert heads(queue, "long") == ["visitor", "bound"]


def test_one_that_leaves_and_comes_back_is_there_once() -> None:
    queue = RequestQueue(ShortestFirst(), FairnessSettings())
    one = scheduled("r", 50, 1)
    queue.add(one)
    queue.remove(one)
    queue.add(one)
    assert [e.request.request_id for e in queue] == ["r"]
    assert len(queue) == 1
    queue.remove(one)
    assert heads(queue) == []
    assert queue.waiting_tokens == 0


def test_many_that_leave_from_the_middle_take_no_memory() -> None:
    queue = RequestQueue(ShortestFirst(), FairnessSettings())
    requests = [scheduled(f"r{n}", 50, n) for n in range(1_000)]
    for one in requests:
        queue.add(one)
    for one in requests[1:]:
        queue.remove(one)
    (sub_queue,) = queue._lanes()
    assert len(sub_queue._heap) < 100
    assert heads(queue) == ["r0"]


def test_counts_are_by_home_pool_and_length_queue() -> None:
    queue = RequestQueue(ShortestFirst(), FairnessSettings())
    queue.add(scheduled("a", 50, 1))
    queue.add(scheduled("b", 60, 2, "short"))
    queue.add(scheduled("c", 500, 3))
    assert queue.counts() == {("short", "small"): 2, ("short", "large"): 1}
    assert repr(queue).startswith("<RequestQueue 3 of 1 tenants")


def test_tenants_take_turns_across_length_queues_and_scores_decide_among_equals() -> None:
    queue = RequestQueue(ShortestFirst(), FairnessSettings())
    for number in range(3):
        queue.add(scheduled(f"a{number}", 50, number, tenant="a"))
    queue.add(scheduled("b", 400, 3, tenant="b"))
    queue.add(scheduled("c", 80, 4, tenant="c"))
    taken = []
    while queue:
        first = next(queue.heads(PriorityClass.DEFAULT, "short", 0.0, at_home=True))
        taken.append(first.request.request_id)
        queue.remove(first)
        queue.charge(first)
    assert taken == ["a0", "c", "b", "a1", "a2"]


def test_without_fairness_the_score_alone_decides() -> None:
    queue = RequestQueue(ShortestFirst(), FairnessSettings(mode=FairnessMode.OFF))
    for number in range(3):
        queue.add(scheduled(f"a{number}", 50, number, tenant="a"))
    queue.add(scheduled("c", 80, 4, tenant="c"))
    assert heads(queue) == ["a0", "c"]
    first = next(queue.heads(PriorityClass.DEFAULT, "short", 0.0, at_home=True))
    queue.remove(first)
    queue.charge(first)
    assert heads(queue) == ["a1", "c"]


def test_classes_are_asked_for_apart() -> None:
    queue = RequestQueue(ShortestFirst(), FairnessSettings())
    queue.add(scheduled("batch", 50, 1, priority=PriorityClass.BATCH))
    queue.add(scheduled("now", 90, 2, priority=PriorityClass.INTERACTIVE))
    assert heads(queue) == []
    assert queue.waiting_classes() == [PriorityClass.INTERACTIVE, PriorityClass.BATCH]
    assert queue.waiting_of(PriorityClass.BATCH) == queue.waiting_of(PriorityClass.BATCH, "t1") == 1
    assert queue.waiting_of(PriorityClass.BATCH, "nobody") == 0


def test_work_ahead_is_what_the_others_get_before_oneself() -> None:
    queue = RequestQueue(ShortestFirst(), FairnessSettings())
    each = scheduled("probe", 100, 0).estimate.expected_tokens
    for number in range(10):
        queue.add(scheduled(f"heavy{number}", 100, number, tenant="heavy"))
    queue.add(scheduled("urgent", 100, 20, tenant="x", priority=PriorityClass.INTERACTIVE))
    # The urgent one, and one turn of the heavy tenant.
    assert queue.work_ahead(request("mine", tenant="light")) == 2 * each
    assert queue.work_ahead(request("mine", tenant="heavy")) == 11 * each
    unfair = RequestQueue(ShortestFirst(), FairnessSettings(mode=FairnessMode.OFF))
    for number in range(10):
        unfair.add(scheduled(f"heavy{number}", 100, number, tenant="heavy"))
    assert unfair.work_ahead(request("mine", tenant="light")) == 10 * each


def test_queueing_anew_neither_moves_tenants_nor_loses_anybody() -> None:
    queue = RequestQueue(ShortestFirst(), FairnessSettings())
    for number in range(3):
        queue.add(scheduled(f"a{number}", 50, number, tenant="a"))
    queue.add(scheduled("b", 400, 3, tenant="b"))
    first = next(queue.heads(PriorityClass.DEFAULT, "short", 0.0, at_home=True))
    queue.remove(first)
    queue.charge(first)
    counters = queue.shares[PriorityClass.DEFAULT].counters()
    before = sorted(one.request.request_id for one in queue)
    queue.queue_anew()
    assert queue.shares[PriorityClass.DEFAULT].counters() == counters
    assert sorted(one.request.request_id for one in queue) == before
    assert heads(queue) == ["b", "a1"]
    assert queue.queue_names() == {"small", "large"}
