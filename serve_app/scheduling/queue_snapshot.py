"""Who waits where, for how long, and why not longer or shorter? A look at the queue, for people."""

import heapq
from dataclasses import dataclass

from serve_app.request import PriorityClass
from serve_app.scheduling.dispatch.dispatcher import Dispatcher
from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.queueing.request_queue import WaitingRoom
from serve_app.scheduling.request import Entry

# A page that nobody would read to its end is not worth the scheduler's time.
MOST_LANES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneView:
    """One lane, by its head.

    Attributes:
        pools: where its requests may go, their home first.
        grade: of their prefills, see `isolation`.
        waiting: requests in the lane.
        head: the request that goes first.
        wait_s: how long the head has waited.
        score: what the policy says of the head now; comparable inside one policy only.
        why: why the head is not being dispatched right now.
    """

    priority: PriorityClass
    tenant: str
    pools: tuple[str, ...]
    length_queue: str
    grade: int
    waiting: int
    head: str
    wait_s: float
    score: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """All lanes, or those whose heads have waited longest, and what each tenant has been served.

    Attributes:
        lanes: the longest wait first.
        left_out: lanes beyond those.
        served: service over weight by class and tenant, in the units of the fairness mode.
        b_short_tokens: the budget up to which a request is at home in the first pool, as it stands.
    """

    lanes: tuple[LaneView, ...]
    left_out: int
    served: dict[PriorityClass, dict[str, float]]
    b_short_tokens: int


def take_census(
    room: WaitingRoom, dispatcher: Dispatcher, policy: OrderingPolicy, b_short_tokens: int, now: float
) -> Census:
    """Look at the queue as it stands; changes nothing.

    Args:
        b_short_tokens: the border of the pools.
        now: seconds on the scheduler's clock.
    """
    heads = list(room.lanes())
    longest = heapq.nsmallest(MOST_LANES, heads, key=lambda lane: lane[0].request.arrived_at)
    lanes = tuple(_view(head, waiting, dispatcher, policy, now) for head, waiting in longest)
    waiting = {priority: shares.counters() for priority, shares in room.shares.items()}
    left_out = len(heads) - len(lanes)
    return Census(lanes=lanes, left_out=left_out, served=waiting, b_short_tokens=b_short_tokens)


def _view(head: Entry, waiting: int, dispatcher: Dispatcher, policy: OrderingPolicy, now: float) -> LaneView:
    request = head.request
    return LaneView(
        priority=request.priority,
        tenant=request.tenant,
        pools=head.pools,
        length_queue=head.length_queue,
        grade=head.grade,
        waiting=waiting,
        head=request.request_id,
        wait_s=now - request.arrived_at,
        score=policy.score(head, now),
        why=dispatcher.why_waiting(head, now),
    )
