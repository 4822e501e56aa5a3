"""Who waits where, for how long, and why not longer or shorter? A look at the queue, for people."""

import heapq
from dataclasses import dataclass

from serve_app.request import PriorityClass
from serve_app.scheduling.dispatch.dispatcher import Dispatcher
from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.queueing.request_queue import RequestQueue
from serve_app.scheduling.request import ScheduledRequest

# A page that nobody would read to its end is not worth the scheduler's time.
MOST_LANES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SubQueueView:
    """One sub_queue, by its head.

    Attributes:
        pools: where its requests may go, their home first.
        prefill_class: of their prefills, see `isolation`.
        waiting: requests in the sub_queue.
        head: the request that goes first.
        wait_s: how long the head has waited.
        score: what the policy says of the head now; comparable inside one policy only.
        why: why the head is not being dispatched right now.
    """

    priority: PriorityClass
    tenant: str
    pools: tuple[str, ...]
    length_queue: str
    prefill_class: int
    waiting: int
    head: str
    wait_s: float
    score: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """All sub_queues, or those whose heads have waited longest, and what each tenant has been served.

    Attributes:
        sub_queues: the longest wait first.
        left_out: sub_queues beyond those.
        served: service over weight by class and tenant, in the units of the fairness mode.
        b_short_tokens: the budget up to which a request is at home in the first pool, as it stands.
    """

    sub_queues: tuple[SubQueueView, ...]
    left_out: int
    served: dict[PriorityClass, dict[str, float]]
    b_short_tokens: int


def take_queue_snapshot(
    queue: RequestQueue, dispatcher: Dispatcher, policy: OrderingPolicy, b_short_tokens: int, now: float
) -> QueueSnapshot:
    """Look at the queue as it stands; changes nothing.

    Args:
        b_short_tokens: the border of the pools.
        now: seconds on the scheduler's clock.
    """
    heads = list(queue.sub_queues())
    longest = heapq.nsmallest(MOST_LANES, heads, key=lambda sub_queue: sub_queue[0].request.arrived_at)
    sub_queues = tuple(_view(head, waiting, dispatcher, policy, now) for head, waiting in longest)
    waiting = {priority: shares.counters() for priority, shares in queue.shares.items()}
    left_out = len(heads) - len(sub_queues)
    return QueueSnapshot(
        sub_queues=sub_queues, left_out=left_out, served=waiting, b_short_tokens=b_short_tokens
    )


def _view(
    head: ScheduledRequest, waiting: int, dispatcher: Dispatcher, policy: OrderingPolicy, now: float
) -> SubQueueView:
    request = head.request
    return SubQueueView(
        priority=request.priority,
        tenant=request.tenant,
        pools=head.pools,
        length_queue=head.length_queue,
        prefill_class=head.prefill_class,
        waiting=waiting,
        head=request.request_id,
        wait_s=now - request.arrived_at,
        score=policy.score(head, now),
        why=dispatcher.why_waiting(head, now),
    )
