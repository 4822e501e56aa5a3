"""The order in which queued requests are expected to be dispatched if no further request arrives.

It follows the order of service (`dispatch.dispatcher`) in each home pool: put-back requests, the classes with
their floors, within a class the tenants by their shares, and within a share the current score. A request
never passes one ahead of it in its sub-queue.

Effects that depend on replicas are ignored: requests that do not fit while smaller ones do, waits for room
for a context, spills to other pools, isolation, promotion, and the delay bound. The position is therefore an
expectation. The effect of these rules on waits is part of the learned errors (`spread`).

The cost is one evaluation of each queued request, and a sort.
"""

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from serve_app.core.dispatch.class_floors import ClassFloors, ClassFloorSettings
from serve_app.core.queueing.fairness import FairShares
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.request import PriorityClass

PART_SIZE = 500
"""Number of requests evaluated in one part of the work."""

_Ranked = tuple[float, int, ScheduledRequest]
"""Negative score (less is more urgent), order of admission, and the request."""


def expected_order(
    queue: RequestQueue, floors: ClassFloorSettings, now: float
) -> Generator[None, None, Mapping[str, Sequence[ScheduledRequest]]]:
    """Return all queued requests by home pool, in the expected order of dispatch. Changes no state.

    Yields after each part of the work. If the queue changes between parts, the result may lack requests that
    have arrived since and include requests that have left.
    """
    returned: defaultdict[str, list[ScheduledRequest]] = defaultdict(list)
    by_tenant: defaultdict[tuple[str, PriorityClass], defaultdict[str, list[_Ranked]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for waiting in queue.backoff:
        returned[waiting.pools[0]].append(waiting)
    for waiting in list(queue.parked.values()):
        home, request = waiting.pools[0], waiting.request
        ranked = by_tenant[home, request.priority][request.tenant]
        _rank(queue, (waiting,), ranked, returned[home], now)
    yield
    evaluated = 0
    for sub_queue in list(queue.sub_queues()):
        first, home = sub_queue.first, sub_queue.pools[0]
        if first is None:
            continue
        ranked = by_tenant[home, sub_queue.group.priority][first.request.tenant]
        _rank(queue, sub_queue, ranked, returned[home], now)
        evaluated += len(sub_queue)
        if evaluated >= PART_SIZE:
            evaluated = 0
            yield
    orders: dict[str, dict[PriorityClass, list[ScheduledRequest]]] = {home: {} for home in returned}
    for (home, priority), tenants in by_tenant.items():
        orders[home][priority] = _of_class(queue, priority, tenants)
        yield
    placed: dict[str, list[ScheduledRequest]] = {}
    for home, classes in orders.items():
        line = placed[home] = sorted(returned[home], key=_by_class)
        for scheduled in _of_classes(classes, floors):
            line.append(scheduled)
            if not len(line) % PART_SIZE:
                yield
    return placed


def _rank(
    queue: RequestQueue,
    waiting: Iterable[ScheduledRequest],
    ranked: list[_Ranked],
    returned: list[ScheduledRequest],
    now: float,
) -> None:
    """Add requests of one sub-queue to `ranked`; none is more urgent than the one before it."""
    score = queue.policy.score
    least, latest = float("-inf"), 0
    for scheduled in waiting:
        if scheduled.returned:
            returned.append(scheduled)
            continue
        urgency = -score(scheduled, now)
        least = max(least, urgency)
        latest = max(latest, scheduled.sequence)
        ranked.append((least, latest, scheduled))


def _of_class(
    queue: RequestQueue, priority: PriorityClass, tenants: Mapping[str, list[_Ranked]]
) -> list[ScheduledRequest]:
    if not queue.is_fair or len(tenants) == 1:
        # Sorts are stable, so the order within a sub-queue is preserved.
        members = sorted(chain.from_iterable(tenants.values()), key=_urgency)
        return [scheduled for _, _, scheduled in members]
    ordered = sorted(_by_service(queue, queue.shares[priority], tenants), key=_service_order)
    return [scheduled for _, _, _, scheduled in ordered]


def _by_service(
    queue: RequestQueue, shares: FairShares, tenants: Mapping[str, list[_Ranked]]
) -> Iterator[tuple[int, float, int, ScheduledRequest]]:
    """Yield each request with the quanta of service that its tenant has received before it."""
    # A quantum of 0 means that no tenants are equal; the cost of a request is far above 1.
    quantum = shares.quantum or 1.0
    for name, served, weight in shares.backlogged():
        ranked = tenants.get(name, [])
        ranked.sort(key=_urgency)
        counter = served
        for urgency, sequence, scheduled in ranked:
            yield int(counter / quantum), urgency, sequence, scheduled
            counter += queue.fairness.expected_service(scheduled.estimate, scheduled.cached_tokens) / weight


def _of_classes(
    classes: Mapping[PriorityClass, Sequence[ScheduledRequest]], floors: ClassFloorSettings
) -> Iterator[ScheduledRequest]:
    """Yield the requests of all classes with their floors, the highest class first."""
    # A class is empty here if all its requests are put-backs.
    left = {priority: iter(classes[priority]) for priority in PriorityClass if classes.get(priority)}
    heads = {priority: next(waiting) for priority, waiting in left.items()}
    earned = ClassFloors(floors)
    while len(heads) > 1:
        priority = next((owed for owed in earned.owed() if owed in heads), next(iter(heads)))
        yield heads[priority]
        earned.on_dispatch(priority, heads)
        following = next(left[priority], None)
        if following is None:
            del heads[priority]
        else:
            heads[priority] = following
    for priority, head in heads.items():
        yield head
        yield from left[priority]


def _by_class(scheduled: ScheduledRequest) -> tuple[int, int]:
    return scheduled.request.priority.rank, scheduled.sequence


def _urgency(ranked: _Ranked) -> tuple[float, int]:
    return ranked[0], ranked[1]


def _service_order(each: tuple[int, float, int, ScheduledRequest]) -> tuple[int, float, int]:
    return each[0], each[1], each[2]
