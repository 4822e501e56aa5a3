"""A snapshot of the request queue for operators: queued requests, their queue times and the causes."""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from serve_app.core.accounting.wait_causes import WaitCause
from serve_app.core.accounting.waits import current_cause
from serve_app.core.dispatch.dispatcher import Dispatcher
from serve_app.core.policies.protocol import OrderingPolicy, QueueBounds
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica_state import PrefillClass
from serve_app.request import PriorityClass

# Bounds the scheduler's time; more than an operator would read.
MAX_SUB_QUEUES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SubQueueView:
    """One sub-queue and its head.

    Attributes:
        pools: pools that may serve its requests, the home pool first.
        head: id of the first request.
        wait_s: queue time of the head so far.
        score: the policy's score of the head now; comparable only within one policy.
        cause: what the head waits for, as receipts and metrics count it.
        reason: the reason in each pool why the head is not dispatched now.
    """

    priority: PriorityClass
    tenant: str
    pools: tuple[str, ...]
    length_queue: str
    prefill_class: PrefillClass
    waiting: int
    head: str
    wait_s: float
    score: float
    cause: WaitCause
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthQueueView:
    """One length queue, summed over all tenants and classes.

    Attributes:
        bounds: its range of lengths; None if the policy's queues have none.
        waiting: requests in it, except those in backoff or waiting for room for their context.
        longest_wait_s: longest queue time of its heads; None if it is empty.
        head: the sub-queue whose head the policy scores highest; None if it is empty.
    """

    name: str
    bounds: QueueBounds | None
    waiting: int
    longest_wait_s: float | None
    head: SubQueueView | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """The length queues, the sub-queues whose heads have waited longest, and the service of each tenant.

    Attributes:
        length_queues: by rising length; those without bounds by name.
        sub_queues: longest wait first.
        omitted: sub-queues beyond the limit of the snapshot.
        served: service over weight by class and tenant, in the units of the fairness mode.
        b_short_tokens: current token budget up to which the first pool is the home pool.
    """

    length_queues: tuple[LengthQueueView, ...]
    sub_queues: tuple[SubQueueView, ...]
    omitted: int
    served: dict[PriorityClass, dict[str, float]]
    b_short_tokens: int


def take_queue_snapshot(
    queue: RequestQueue,
    dispatcher: Dispatcher,
    policy: OrderingPolicy,
    b_short_tokens: int,
    now: float,
    limit: int,
) -> QueueSnapshot:
    """Take a snapshot at `now` with at most `limit` sub-queues. Changes no state."""
    heads = list(queue.sub_queue_heads())
    longest = heapq.nsmallest(limit, heads, key=lambda sub_queue: sub_queue[0].request.arrived_at)
    return QueueSnapshot(
        length_queues=tuple(_length_queues(heads, dispatcher, policy, now)),
        sub_queues=tuple(_view(head, waiting, dispatcher, policy, now) for head, waiting in longest),
        omitted=len(heads) - len(longest),
        served={priority: shares.counters() for priority, shares in queue.shares.items()},
        b_short_tokens=b_short_tokens,
    )


def _length_queues(
    heads: Iterable[tuple[ScheduledRequest, int]], dispatcher: Dispatcher, policy: OrderingPolicy, now: float
) -> Iterator[LengthQueueView]:
    bounds = {each.name: each for each in policy.queue_bounds()}
    by_name: dict[str, list[tuple[ScheduledRequest, int]]] = {name: [] for name in bounds}
    for head, waiting in sorted(heads, key=lambda each: each[0].length_queue):
        by_name.setdefault(head.length_queue, []).append((head, waiting))
    for name, inside in by_name.items():
        best = max(inside, key=lambda each: (policy.score(each[0], now), -each[0].sequence), default=None)
        yield LengthQueueView(
            name=name,
            bounds=bounds.get(name),
            waiting=sum(waiting for _, waiting in inside),
            longest_wait_s=max((now - head.request.arrived_at for head, _ in inside), default=None),
            head=None if best is None else _view(*best, dispatcher, policy, now),
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
        cause=current_cause(head),
        reason=dispatcher.wait_reasons(head, now),
    )
