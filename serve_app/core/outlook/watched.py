"""Outlooks of queued requests: their positions, their expected starts, and updates for subscribed clients.

- `WatchedRequests`: the queued requests whose clients subscribe to queue updates.
- `expected_order`: the order in which queued requests are expected to be dispatched if none arrives.
- `StartEstimates`: the expected start of a request, and its interval.

`WatchedRequests.updates` computes the positions of all queued requests at once, so its cost does not depend
on the number of watched ones. It returns the updates to send now: the first estimate of a request
immediately, and another when it has changed significantly, at most once per second. A request without
significant changes still gets an update after some seconds, so that its client can distinguish slow progress
from a hang.

It reads the scheduler and changes nothing there. Without watched requests it does no work.

`expected_order` follows the order of service (`dispatch.dispatcher`) in each home pool: put-back requests,
the classes with their floors, within a class the tenants by their shares, and within a share the current
score. A request never passes one ahead of it in its sub-queue.

Effects that depend on replicas are ignored: requests that do not fit while smaller ones do, waits for room
for a context, spills to other pools, isolation, promotion, and the delay bound. The position is therefore an
expectation. The effect of these rules on waits is part of the learned errors (`spread`).

The cost is one evaluation of each queued request, and a sort.

`StartEstimates`, from the position of a request:

    uncorrected = (tokens ahead of it in its home pool + its own) / drain rate of that pool

This is the time until as many tokens have been dispatched. The ratio of actual to uncorrected times is
learned as a distribution (`spread`). Its median gives the expected start, its 10th and 90th percentiles the
interval.

Ratios differ by request: a batch request waits for idle engines, while a short one is hardly ever passed
under a score. They also differ by position: the first depends on a single free slot, the hundredth on a
hundred of them. Ratios are therefore recorded by home pool, class, octave (factor of two) of the prompt and
octave of the position. Until enough were observed, those by class and octave of the position apply, then
those by octave of the position alone. Before any observation the interval is wide.

While any request is watched, every queued request contributes one observation for each octave of positions
that it reaches. The full wait of an expired request is unknown, so it counts as twice the observed wait.
"""

import heapq
from collections import defaultdict
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain

from serve_app.core.admission.wait_prediction import DrainRate
from serve_app.core.dispatch.promotion import ClassFloors, ClassFloorSettings
from serve_app.core.outlook.spread import Margin, Quantiles, RatioSpreads
from serve_app.core.queueing.fairness import FairShares
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.core.scheduler import Scheduler
from serve_app.errors import Outcome
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
    for waiting in queue.backoff.values():
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
        if scheduled.attempts.returned:
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


# Prior quantiles, before any observation.
_PRIOR = Quantiles(0.2, 1.0, 3.0)
# Observations after which the ratios of a key are used.
_MIN_OBSERVATIONS = 30
# Positions beyond this octave are treated alike: with more slots, variations average out.
_MAX_OCTAVE = 8
# Seconds of backlog until the rate of a single pool is used, and until any rate is.
_MIN_POOL_BACKLOG_S, _MIN_BACKLOG_S = 5.0, 1.0
# As in `admission.wait_prediction`.
_EXPIRED_RATIO = 2.0
# A request that still waits at the end of its interval is learned from immediately, as if it took this much
# longer. Otherwise a growing queue would be learned only once it has been served.
_LATE_RATIO = 1.25


@dataclass(slots=True, eq=False)
class _PendingEstimate:
    """An estimate whose request has not started yet.

    Attributes:
        start: expected start, in seconds from `at`.
        learned: whether its outcome has been learned or discarded.
    """

    scheduled: ScheduledRequest
    octave: int
    at: float
    uncorrected_s: float
    start: Quantiles
    learned: bool = False


class StartEstimates:
    """Estimates the time until a request starts."""

    def __init__(self, overall: DrainRate) -> None:
        self._overall = overall
        self._drains: dict[str, DrainRate] = {}
        self._spreads = RatioSpreads(_PRIOR, _MIN_OBSERVATIONS)
        self._margins: defaultdict[tuple[int, int], Margin] = defaultdict(Margin)
        self._pending: dict[str, list[_PendingEstimate]] = {}
        # A heap; estimates that were learned or discarded leave it at their time, or when most are such.
        self._due: list[tuple[float, int, _PendingEstimate]] = []
        self._unlearned = 0
        self._recorded = 0

    def on_tick(self, homes: Mapping[str, int], now: float) -> None:
        """Record the number of queued requests by home pool since the last call."""
        for home, drain in self._drains.items():
            drain.on_time(homes.get(home, 0), now)
        for home in homes.keys() - self._drains.keys():
            self._drains[home] = DrainRate(now)

    def reset(self) -> None:
        """Discard pending estimates while no request is watched, because dispatches are not observed then."""
        self._pending.clear()
        self._due.clear()
        self._unlearned = 0

    def rate(self, home: str, share: float) -> float | None:
        """Return the drain rate of a home pool in tokens per second, or None while it is unknown.

        Args:
            share: the pool's share of all queued tokens. While the pool's own rate is unknown, its rate is
                this share of the overall rate.
        """
        drain = self._drains.get(home)
        if drain is not None and drain.backlog_s >= _MIN_POOL_BACKLOG_S:
            return drain.tokens_per_s or None
        if self._overall.backlog_s < _MIN_BACKLOG_S:
            return None
        return self._overall.tokens_per_s * share or None

    def time_to_start_s(self, scheduled: ScheduledRequest, position: int, uncorrected_s: float) -> Quantiles:
        """Return the expected time until a request at this position starts, and its interval."""
        octave = _octave(position)
        ratios = self._spreads.quantiles(*_spread_keys(scheduled, octave))
        margin = self._margins[scheduled.request.priority.rank, octave]
        return Quantiles(
            uncorrected_s * ratios.low / margin.low,
            uncorrected_s * ratios.middle,
            uncorrected_s * ratios.high * margin.high,
        )

    def record(self, scheduled: ScheduledRequest, position: int, uncorrected_s: float, now: float) -> None:
        """Store an estimate if this is the lowest octave of positions that the request has reached."""
        octave = position.bit_length()
        estimates = self._pending.get(scheduled.request.request_id)
        if estimates is None:
            estimates = self._pending[scheduled.request.request_id] = []
        elif estimates[-1].octave <= octave:
            return
        start = self.time_to_start_s(scheduled, position, uncorrected_s)
        estimate = _PendingEstimate(scheduled, octave, now, uncorrected_s, start)
        estimates.append(estimate)
        self._recorded += 1
        self._unlearned += 1
        heapq.heappush(self._due, (now + start.high, self._recorded, estimate))
        if len(self._due) > 64 and len(self._due) > 2 * self._unlearned:
            self._due = [item for item in self._due if not item[2].learned]
            heapq.heapify(self._due)

    def learn_late_starts(self, now: float) -> None:
        """Learn from requests that still wait after the end of their interval."""
        while self._due and self._due[0][0] < now:
            self._learn(heapq.heappop(self._due)[2], _LATE_RATIO, now)

    def on_dispatch(self, scheduled: ScheduledRequest, now: float) -> None:
        """Learn the drain rate and the time to start from a dispatched request."""
        drain = self._drains.get(scheduled.pools[0])
        if drain is not None:
            drain.on_dispatch(scheduled.estimate.expected_tokens)
        for estimate in self._pending.pop(scheduled.request.request_id, ()):
            self._learn(estimate, 1.0, now)

    def on_expiry(self, request_id: str, now: float) -> None:
        """Learn from a request that has expired."""
        for estimate in self._pending.pop(request_id, ()):
            self._learn(estimate, _EXPIRED_RATIO, now)

    def discard(self, request_id: str) -> None:
        """Discard the estimates of a request that left for another reason."""
        for estimate in self._pending.pop(request_id, ()):
            self._end(estimate)

    def _end(self, estimate: _PendingEstimate) -> bool:
        """End an estimate. Return whether it had not ended before."""
        if estimate.learned:
            return False
        estimate.learned = True
        self._unlearned -= 1
        return True

    def _learn(self, estimate: _PendingEstimate, factor: float, now: float) -> None:
        if not self._end(estimate):
            return
        octave, actual_s = min(estimate.octave, _MAX_OCTAVE), factor * (now - estimate.at)
        self._margins[estimate.scheduled.request.priority.rank, octave].learn(actual_s, estimate.start)
        self._spreads.add(actual_s / estimate.uncorrected_s, *_spread_keys(estimate.scheduled, octave))

    def __repr__(self) -> str:
        return f"<StartEstimates of {len(self._pending)} requests, {self._spreads}>"


def _octave(position: int) -> int:
    return min(position.bit_length(), _MAX_OCTAVE)


def _spread_keys(scheduled: ScheduledRequest, octave: int) -> tuple[Hashable, ...]:
    """Return the keys of a request's ratios, from the most specific to the most general."""
    rank = scheduled.request.priority.rank
    length = scheduled.estimate.expected_prompt_tokens.bit_length()
    return (scheduled.pools[0], rank, length, octave), (rank, octave), (octave,)


# Minimum and maximum time between two updates of one request.
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 1.0, 15.0
# Significant changes: a tenth of the position, or a quarter of the expected start that was sent.
_POSITION_DIVISOR, _START_RATIO = 10, 0.25
# Changes of the expected start below this are noise.
_START_S = 0.5
# Maximum number of updates of one call: bounds the work that follows.
MAX_UPDATES = 5_000

INSIDE, BEFORE, AFTER = VERDICTS = "inside", "before", "after"
"""Position of the actual start relative to the interval that was sent."""
FIRST, LAST = ESTIMATES = "first", "last"
"""The evaluated estimate: the first or the last one that was sent for a request."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The outlook of one queued request.

    Attributes:
        position: 1 for the request expected to be dispatched next among those of its home pool.
        start: expected seconds from now until it starts; None while it is unknown.
    """

    request_id: str
    position: int
    start: Quantiles | None


@dataclass(frozen=True, slots=True)
class CalibrationError:
    """The error of one estimate.

    Attributes:
        estimate: which estimate, one of `ESTIMATES`.
        verdict: one of `VERDICTS`.
        error_s: actual minus expected start.
    """

    priority: PriorityClass
    estimate: str
    verdict: str
    error_s: float


@dataclass(slots=True)
class _SentEstimate:
    """An estimate that was sent, and its time; `start` is in seconds from then."""

    at: float
    position: int
    start: Quantiles | None

    def errors(self, name: str, priority: PriorityClass, now: float) -> Iterator[CalibrationError]:
        """Yield the error of the estimate if the request starts now."""
        if self.start is None:
            return
        actual_s = now - self.at
        verdict = INSIDE
        if actual_s < self.start.low:
            verdict = BEFORE
        elif actual_s > self.start.high:
            verdict = AFTER
        yield CalibrationError(priority, name, verdict, actual_s - self.start.middle)


@dataclass(slots=True)
class _Subscription:
    """One watched request.

    Attributes:
        first: the first estimate of its start that was sent.
        last: the last update that was sent.
    """

    priority: PriorityClass
    first: _SentEstimate | None = None
    last: _SentEstimate | None = None


class WatchedRequests:
    """The watched requests of one scheduler, and the updates to send for them."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._watched: dict[str, _Subscription] = {}
        self._estimates = StartEstimates(core.admission.predictor.drain)

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, request_id: str, now: float) -> bool:
        """Watch a request from now on. Return whether it is queued."""
        scheduled = self._core.find(request_id)
        if scheduled is None or not scheduled.queued:
            return False
        if not self._watched:
            # Nothing was observed since the last watched request left.
            self._estimates.on_tick({}, now)
        self._watched.setdefault(request_id, _Subscription(scheduled.request.priority))
        return True

    def updates(self, now: float) -> Iterator[list[Outlook]]:
        """Yield the updates to send now, at most `MAX_UPDATES`, the longest outstanding first.

        The work is done in parts, and each part yields some or no updates. Events may be handled between
        parts.
        """
        if not self._watched:
            return
        self._estimates.on_tick(self._core.queue.waiting_by_home(), now)
        self._estimates.learn_late_starts(now)
        floors = self._core.settings.class_floors
        ordering = expected_order(self._core.queue, floors, now)
        while True:
            try:
                next(ordering)
            except StopIteration as end:
                orders: Mapping[str, Sequence[ScheduledRequest]] = end.value
                break
            yield []
        due: list[tuple[float, int, Outlook]] = []
        for home, order in orders.items():
            for _ in self._collect_updates(home, order, due, now):
                yield []
        if len(due) > MAX_UPDATES:
            due = nsmallest(MAX_UPDATES, due)
        for at in range(0, len(due), PART_SIZE):
            yield [outlook for _, _, outlook in due[at : at + PART_SIZE] if self._record_update(outlook, now)]

    def expected(
        self, scheduled: ScheduledRequest, order: Sequence[ScheduledRequest], now: float
    ) -> Outlook | None:
        """Return the outlook of any queued request from the order of its home pool, without recording it."""
        rate = self._rate(scheduled.pools[0], order)
        ahead = 0
        for position, each in enumerate(order, 1):
            ahead += each.estimate.expected_tokens
            if each is scheduled:
                uncorrected_s = None if rate is None else max(1, ahead) / rate
                start = self._start(scheduled, position, uncorrected_s, now)
                return Outlook(scheduled.request.request_id, position, start)
        return None

    def on_dispatch(self, scheduled: ScheduledRequest, now: float) -> list[CalibrationError]:
        """Observe the dispatch of any request. Return the errors of the estimates sent for it."""
        if not self._watched:
            return []
        waiting = self._core.queue.waiting_by_home()
        if now > scheduled.request.arrived_at:
            waiting[scheduled.pools[0]] += 1
        self._estimates.on_tick(waiting, now)
        self._estimates.on_dispatch(scheduled, now)
        return self._end(scheduled.request.request_id, now)

    def on_conclusion(self, request_id: str, outcome: Outcome, now: float) -> list[CalibrationError]:
        """Observe the end of any request. Return the errors of the estimates sent for it, if they are known.

        An estimate of an expired request is known to be wrong only if its interval had ended.
        """
        if not self._watched:
            return []
        if outcome is Outcome.EXPIRED:
            self._estimates.on_expiry(request_id, now)
            return [each for each in self._end(request_id, now) if each.verdict == AFTER]
        self._estimates.discard(request_id)
        self._end(request_id, now)
        return []

    def _collect_updates(
        self, home: str, order: Sequence[ScheduledRequest], due: list[tuple[float, int, Outlook]], now: float
    ) -> Iterator[None]:
        estimates, watched = self._estimates, self._watched
        rate = self._rate(home, order)
        ahead = 0
        for position, scheduled in enumerate(order, 1):
            if not position % PART_SIZE:
                yield
            ahead += scheduled.estimate.expected_tokens
            if not scheduled.queued:
                continue
            uncorrected_s = None if rate is None else max(1, ahead) / rate
            if uncorrected_s is not None:
                estimates.record(scheduled, position, uncorrected_s, now)
            one = watched.get(scheduled.request.request_id)
            if one is None or (one.last is not None and now - one.last.at < _MIN_INTERVAL_S):
                continue
            start = self._start(scheduled, position, uncorrected_s, now)
            if _is_significant(one.last, position, start, now):
                sent_at = float("-inf") if one.last is None else one.last.at
                due.append((sent_at, len(due), Outlook(scheduled.request.request_id, position, start)))

    def _rate(self, home: str, order: Sequence[ScheduledRequest]) -> float | None:
        """Return the tokens per second that drain from this order, or None while the rate is unknown."""
        tokens = sum(scheduled.estimate.expected_tokens for scheduled in order)
        return self._estimates.rate(home, tokens / max(1, self._core.queue.waiting_tokens))

    def _start(
        self, scheduled: ScheduledRequest, position: int, uncorrected_s: float | None, now: float
    ) -> Quantiles | None:
        if uncorrected_s is None or self._core.admission.outages.all_down(scheduled.pools):
            return None
        start = self._estimates.time_to_start_s(scheduled, position, uncorrected_s)
        backoff_s = scheduled.attempts.backoff_until - now
        if backoff_s > start.low:
            start = Quantiles(backoff_s, max(backoff_s, start.middle), max(backoff_s, start.high))
        return start

    def _record_update(self, outlook: Outlook, now: float) -> bool:
        """Record an update. Return whether the request is still watched."""
        one = self._watched.get(outlook.request_id)
        if one is None:
            return False
        one.last = _SentEstimate(now, outlook.position, outlook.start)
        if one.first is None and outlook.start is not None:
            one.first = one.last
        return True

    def _end(self, request_id: str, now: float) -> list[CalibrationError]:
        one = self._watched.pop(request_id, None)
        if not self._watched:
            self._estimates.reset()
        if one is None or one.first is None or one.last is None:
            return []
        return [*one.first.errors(FIRST, one.priority, now), *one.last.errors(LAST, one.priority, now)]

    def __repr__(self) -> str:
        return f"<WatchedRequests {len(self._watched)}, {self._estimates}>"


def _is_significant(last: _SentEstimate | None, position: int, start: Quantiles | None, now: float) -> bool:
    """Return whether an update is due after the last one."""
    if last is None or now - last.at >= _MAX_INTERVAL_S:
        return True
    if abs(position - last.position) >= max(1, last.position // _POSITION_DIVISOR):
        return True
    if start is None or last.start is None:
        return start is not last.start
    moved_s = abs(start.middle - (last.start.middle - (now - last.at)))
    return moved_s >= max(_START_S, _START_RATIO * last.start.middle)
