"""The heap of queued requests by a time."""

import math

from serve_app.core.queueing.expiry import ExpiryHeap
from serve_app.core.request import ScheduledRequest
from tests.builders import scheduled_request


def queued(number: int, expires_at: float) -> ScheduledRequest:
    scheduled = scheduled_request(f"r{number}", sequence=number)
    scheduled.queued, scheduled.expires_at = True, expires_at
    return scheduled


def test_requests_that_have_left_do_not_accumulate() -> None:
    heap, stays = ExpiryHeap(), queued(0, expires_at=1.0)
    heap.add(stays)
    for number in range(1, 1_000):
        leaves = queued(number, expires_at=10.0)
        heap.add(leaves)
        leaves.queued = False
    assert len(heap._heap) <= 64
    assert list(heap) == [stays]
    assert heap.next_at() == 1.0
    assert list(heap.pop_expired(5.0)) == [stays]
    assert heap.next_at() is None


def test_a_request_is_due_at_its_current_time_and_never_without_one() -> None:
    heap, moved = ExpiryHeap(), queued(1, expires_at=1.0)
    heap.add(moved)
    moved.expires_at = 3.0
    heap.add(moved)
    heap.add(queued(2, expires_at=math.inf))
    assert list(heap.pop_expired(2.0)) == []
    assert list(heap.pop_expired(3.0)) == [moved]
