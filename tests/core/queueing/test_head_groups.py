"""Head groups: the smallest head of many sub-queues, and the first beyond its starvation bound."""

import math
import random

from serve_app.core.queueing.fairness import FairnessSettings
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica_state import PrefillClass
from serve_app.request import PriorityClass
from tests.builders import scheduled_request
from tests.core.queueing.test_request_queue import ShortestFirst

GROUP = (PriorityClass.DEFAULT, ("short",), PrefillClass.SHORT)


def waiting(number: int, tenant: str, prompt_tokens: int) -> ScheduledRequest:
    scheduled = scheduled_request(
        f"r{number}",
        sequence=number,
        pools=("short",),
        tenant=tenant,
        prompt_tokens=prompt_tokens,
        arrived_at=float(number),
    )
    scheduled.starved_at = number + 60.0
    return scheduled


def test_a_group_has_its_smallest_and_its_first_starved_head_after_any_change() -> None:
    rng, queue = random.Random(5), RequestQueue(ShortestFirst(), FairnessSettings())
    present: list[ScheduledRequest] = []
    for number in range(3_000):
        if present and rng.random() < 0.48:
            queue.remove(present.pop(rng.randrange(len(present))))
        else:
            present.append(waiting(number, f"t{rng.randrange(7)}", rng.randrange(1, 2_000)))
            queue.add(present[-1])
        heads = [head for head, _ in queue.sub_queue_heads()]
        group = queue.groups.of(*GROUP)
        assert bool(group) == bool(heads)
        if heads:
            assert group.smallest() is min(
                heads, key=lambda one: (one.estimate.expected_tokens, one.sequence)
            )
            assert group.first_starved(math.inf) is min(heads, key=lambda one: one.starved_at)
            assert set(group.tenants) == {head.request.tenant for head in heads}


def test_requests_that_exclude_replicas_are_counted_while_they_wait_in_the_group() -> None:
    queue = RequestQueue(ShortestFirst(), FairnessSettings())
    one = waiting(1, "a", 50)
    one.put_backs = 1
    one.expect_cached(20)
    queue.add(one)
    group = queue.groups.of(*GROUP)
    assert (group.restricted, group.cached) == (1, 1)
    queue.remove(one)
    assert (group.restricted, group.cached) == (0, 0)
