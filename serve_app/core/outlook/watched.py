"""Watched requests: queued requests whose clients subscribe to queue updates.

`updates` computes the positions of all queued requests at once, so its cost does not depend on the number of
watched ones. It returns the updates to send now: the first estimate of a request immediately, and another
when it has changed significantly, at most once per second. A request without significant changes still gets
an update after some seconds, so that its client can distinguish slow progress from a hang.

It reads the scheduler and changes nothing there. Without watched requests it does no work.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from serve_app.core.outlook.estimates import StartEstimates
from serve_app.core.outlook.order import PART_SIZE, expected_order
from serve_app.core.outlook.spread import Quantiles
from serve_app.core.request import ScheduledRequest
from serve_app.core.scheduler import Scheduler
from serve_app.errors import Outcome
from serve_app.request import PriorityClass

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
        self._estimates.on_tick(self._waiting_at_home(), now)
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
        waiting = self._waiting_at_home()
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
        backoff_s = scheduled.backoff_until - now
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

    def _waiting_at_home(self) -> Counter[str]:
        waiting = Counter[str]()
        for pools, work in self._core.queue.work.items():
            waiting[pools[0]] += work.requests
        return waiting

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
