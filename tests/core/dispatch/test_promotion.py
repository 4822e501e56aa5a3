from typing import Any

from serve_app.core.dispatch.promotion import Promotion, PromotionSettings
from serve_app.core.policies.protocol import OrderingPolicy
from serve_app.core.queueing.fairness import FairnessSettings
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.request import PriorityClass
from tests.builders import scheduled_request

INTERACTIVE, DEFAULT, BATCH = PriorityClass


class Waiting:
    """Queued requests, and the promotions among them."""

    def __init__(self, **settings: float) -> None:
        self.queue = RequestQueue(OrderingPolicy(), FairnessSettings())
        self.promotion = Promotion(PromotionSettings(**settings), self.queue)
        self.number = 0

    def add(self, arrived_at: float, **changes: Any) -> ScheduledRequest:
        self.number += 1
        one = scheduled_request(f"r{self.number}", arrived_at=arrived_at, **changes)
        one.starved_at = self.promotion.starved_at(one)
        self.queue.add(one)
        return one


def test_the_oldest_request_of_each_tenant_beyond_its_starvation_bound_is_promoted() -> None:
    waiting = Waiting(default_s=10.0)
    heads = [waiting.add(at) for at in (95.0, 80.0, 70.0)]
    other = waiting.add(75.0, tenant="other")
    assert waiting.promotion.among([*heads, other], 100.0) == [heads[2], other]
    assert waiting.promotion.among(heads, 79.0) == []


def test_each_class_has_its_own_limit() -> None:
    waiting = Waiting(interactive_s=1.0, default_s=50.0)
    heads = [waiting.add(80.0), waiting.add(98.0, priority=INTERACTIVE)]
    assert waiting.promotion.among(heads, 100.0) == [heads[1]]


def test_under_overload_promotions_are_a_share_of_the_dispatches_of_a_tenant() -> None:
    waiting = Waiting(default_s=1.0, promoted_share=0.2)
    preferred, starved = waiting.add(0.5), waiting.add(0.0)
    idle = waiting.add(0.0, tenant="idle")
    promoted = 0
    for _ in range(1_000):
        first = (waiting.promotion.among([preferred, starved], 100.0) or [preferred])[0]
        promoted += first is starved
        waiting.promotion.on_dispatch(first, 100.0)
    # Both heads are beyond their starvation bound: whichever is first while a promotion is due uses it.
    assert 190 <= promoted <= 260
    assert waiting.promotion.among([idle], 100.0) == [idle]
