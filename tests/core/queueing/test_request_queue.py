"""The request queue and its head groups."""

import math
import random
from typing import Any

from serve_app.core.policies.protocol import OrderingPolicy
from serve_app.core.queueing.fairness import FairnessMode, FairnessSettings
from serve_app.core.queueing.request_queue import HeadQuery, RequestQueue
from serve_app.core.request import Attempts, ScheduledRequest
from serve_app.core.routing.replica_state import PrefillClass
from serve_app.request import PriorityClass
from tests.builders import request, scheduled_request


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
    pools = pools or ("short", "long")
    return scheduled_request(
        request_id, sequence=sequence, pools=pools, prompt_tokens=prompt_tokens, **fields
    )


def queue_of(*requests: ScheduledRequest, mode: FairnessMode = FairnessMode.TOKENS) -> RequestQueue:
    """Queue these requests in the order of `ShortestFirst`."""
    queue = RequestQueue(ShortestFirst(), FairnessSettings(mode=mode))
    for each in requests:
        queue.add(each)
    return queue


def of_tenant(tenant: str, count: int, prompt_tokens: int = 50) -> list[ScheduledRequest]:
    return [scheduled(f"{tenant}{number}", prompt_tokens, number, tenant=tenant) for number in range(count)]


def query(queue: RequestQueue, pool: str, *, position: int) -> HeadQuery:
    """Query all heads of the default class for a pool."""
    groups = [group for group in queue.groups.at(pool, position) if group.priority is PriorityClass.DEFAULT]
    return HeadQuery(PriorityClass.DEFAULT, groups)


def dispatch_first(queue: RequestQueue) -> str:
    """Take the first request of the default class and charge its tenant."""
    first = next(queue.turns(query(queue, "short", position=0), 0.0))[0]
    queue.remove(first)
    queue.charge(first)
    return first.request.request_id


def heads(queue: RequestQueue, pool: str = "short", *, position: int = 0) -> list[str]:
    turns = queue.turns(query(queue, pool, position=position), 0.0)
    return [head.request.request_id for turn in turns for head in turn]


def test_heads_of_sub_queues_are_ordered_by_score_and_requests_inside_by_key() -> None:
    queue = queue_of(*(scheduled(f"r{length}", length, n) for n, length in enumerate([500, 90, 300, 20])))
    assert heads(queue) == ["r20", "r300"]


def test_a_returned_request_is_first_in_its_sub_queue_and_listed_separately() -> None:
    queue = queue_of(scheduled("r20", 20, 1))
    for name, length, sequence in (("back", 90, 2), ("back-large", 900, 3)):
        returned = scheduled(name, length, sequence)
        returned.attempts = Attempts(returned=True)
        queue.add(returned)
    assert heads(queue) == ["back", "back-large"]
    listed = [head.request.request_id for head in queue.put_back_heads("short", position=0)]
    assert listed == ["back", "back-large"]


def test_equal_keys_are_in_order_of_arrival() -> None:
    queue = queue_of(*(scheduled(f"r{number}", 50, number) for number in range(3)))
    taken = []
    for _ in range(3):
        ((head, _),) = queue.sub_queue_heads()
        taken.append(head.request.request_id)
        queue.remove(head)
    assert taken == ["r0", "r1", "r2"]


def test_heads_at_home_and_heads_that_spill_are_separate() -> None:
    queue = queue_of(
        scheduled("at-home", 50, 1, "short", "long"),
        scheduled("spilling", 50, 2, "long", "short"),
        scheduled("bound", 50, 3, "long"),
    )
    assert heads(queue, "short") == ["at-home"]
    assert heads(queue, "short", position=1) == ["spilling"]
    assert heads(queue, "long") == ["spilling", "bound"]


def test_a_request_that_leaves_and_returns_is_in_the_queue_once() -> None:
    one = scheduled("r", 50, 1)
    queue = queue_of(one)
    queue.remove(one)
    queue.add(one)
    assert [each.request.request_id for each in queue] == ["r"]
    assert len(queue) == 1
    queue.remove(one)
    assert heads(queue) == []
    assert queue.waiting_tokens == 0


def test_shares_order_tenants_across_length_queues_and_scores_decide_among_equals() -> None:
    queue = queue_of(
        *of_tenant("a", 3), scheduled("b", 400, 3, tenant="b"), scheduled("c", 80, 4, tenant="c")
    )
    assert [dispatch_first(queue) for _ in range(5)] == ["a0", "c", "b", "a1", "a2"]
    assert len(queue) == 0


def test_without_fairness_the_score_alone_decides() -> None:
    queue = queue_of(*of_tenant("a", 3), scheduled("c", 80, 4, tenant="c"), mode=FairnessMode.OFF)
    assert heads(queue) == ["a0", "c"]
    dispatch_first(queue)
    assert heads(queue) == ["a1", "c"]


def test_classes_are_separate() -> None:
    queue = queue_of(
        scheduled("batch", 50, 1, priority=PriorityClass.BATCH),
        scheduled("now", 90, 2, priority=PriorityClass.INTERACTIVE),
    )
    assert heads(queue) == []
    assert queue.waiting_classes() == [PriorityClass.INTERACTIVE, PriorityClass.BATCH]
    assert queue.waiting_of(PriorityClass.BATCH, "t1") == 1
    assert queue.waiting_of(PriorityClass.BATCH, "unknown") == 0


def test_work_ahead_is_what_others_are_served_before_a_request() -> None:
    heavy = of_tenant("heavy", 10, prompt_tokens=100)
    each = heavy[0].estimate.expected_tokens
    urgent = scheduled("urgent", 100, 20, tenant="x", priority=PriorityClass.INTERACTIVE)
    queue = queue_of(*heavy, urgent)
    # The urgent request, and one of the heavy tenant.
    assert queue.work_ahead(request("mine", tenant="light")) == 2 * each
    assert queue.work_ahead(request("mine", tenant="heavy")) == 11 * each
    unfair = queue_of(*of_tenant("heavy", 10, prompt_tokens=100), mode=FairnessMode.OFF)
    assert unfair.work_ahead(request("mine", tenant="light")) == 10 * each


def test_reassigning_length_queues_changes_no_share_and_loses_no_request() -> None:
    queue = queue_of(*of_tenant("a", 3), scheduled("b", 400, 3, tenant="b"))
    dispatch_first(queue)
    counters = queue.shares[PriorityClass.DEFAULT].counters()
    before = sorted(one.request.request_id for one in queue)
    queue.reassign_length_queues()
    assert queue.shares[PriorityClass.DEFAULT].counters() == counters
    assert sorted(one.request.request_id for one in queue) == before
    assert heads(queue) == ["b", "a1"]
    assert queue.queue_names() == {"small", "large"}


def test_a_group_knows_its_smallest_and_first_starved_head_and_counts_its_requests_after_any_change() -> None:
    rng, queue = random.Random(5), queue_of()
    group = queue.groups.of(PriorityClass.DEFAULT, ("short",), PrefillClass.SHORT)
    present: list[ScheduledRequest] = []
    for number in range(3_000):
        if present and rng.random() < 0.48:
            queue.remove(present.pop(rng.randrange(len(present))))
        else:
            tokens, tenant = rng.randrange(30, 2_000), f"t{rng.randrange(7)}"
            one = scheduled(f"r{number}", tokens, number, "short", tenant=tenant)
            one.starved_at = number + 60.0
            if rng.random() < 0.1:
                one.attempts = Attempts(put_backs=1)
            if rng.random() < 0.1:
                one.expect_cached(20)
            queue.add(one)
            present.append(one)
        heads = [head for head, _ in queue.sub_queue_heads()]
        assert len(group) == len(heads)
        assert group.restricted == sum(each.attempts.put_backs for each in present)
        assert group.cached == sum(each.cached_tokens > 0 for each in present)
        assert set(group.tenants) == {head.request.tenant for head in heads}
        smallest = min(heads, key=lambda one: (one.estimate.expected_tokens, one.sequence), default=None)
        assert group.smallest() is smallest
        starved = min(heads, key=lambda one: one.starved_at, default=None)
        assert group.first_starved(math.inf) is starved
        assert starved is None or group.first_starved(starved.starved_at) is None
