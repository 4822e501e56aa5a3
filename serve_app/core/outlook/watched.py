"""Whom to tell of the queue: waiting requests that are watched, what each was told, and how honest that was.

`look` asks for the place of every waiting request at once, so its cost does not depend on how many watch. It
says what to tell now: the first estimate of a request at once, and another when it has changed enough to
matter, at most once a second. What goes slowly is told again after some seconds all the same, since silence
says nothing.

It looks at the scheduler and changes nothing there. While nobody is watched it does nothing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from serve_app.core.outlook.estimates import StartEstimates
from serve_app.core.outlook.order import PART, expected_order
from serve_app.core.outlook.spread import Quantiles
from serve_app.core.request import ScheduledRequest
from serve_app.core.scheduler import Scheduler
from serve_app.errors import Outcome
from serve_app.request import PriorityClass

# Between two updates of one request, at least and at most.
_LEAST_S, _MOST_S = 1.0, 15.0
# A change that matters: of the place a tenth, of the expected start a quarter of what was told.
_PLACES, _START_RATIO = 10, 0.25
# Less is noise.
_START_S = 0.5
# Updates of one look: a bound on the work that follows.
MOST_UPDATES = 5_000

INSIDE, BEFORE, AFTER = VERDICTS = "inside", "before", "after"
"""Where the actual start was, compared with the interval that was told."""
FIRST, LAST = TOLD = "first", "last"
"""Which of the estimates that a request was told is judged."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a waiting request may expect.

    Attributes:
        position: 1 for the request that is expected to go next of those at home in its pool.
        start: seconds from now until it starts; None while nothing is known of that.
    """

    request_id: str
    position: int
    start: Quantiles | None


@dataclass(frozen=True, slots=True)
class Honesty:
    """How right one estimate was.

    Attributes:
        told: one of `TOLD`.
        verdict: one of `VERDICTS`.
        error_s: actual minus expected start.
    """

    priority: PriorityClass
    told: str
    verdict: str
    error_s: float


@dataclass(slots=True)
class _Told:
    """What a request was told, and when; `start` in seconds from then."""

    at: float
    position: int
    start: Quantiles | None

    def judged(self, name: str, priority: PriorityClass, now: float) -> Iterator[Honesty]:
        """How right it was, if the request starts now."""
        if self.start is None:
            return
        actual_s = now - self.at
        verdict = INSIDE
        if actual_s < self.start.low:
            verdict = BEFORE
        elif actual_s > self.start.high:
            verdict = AFTER
        yield Honesty(priority, name, verdict, actual_s - self.start.middle)


@dataclass(slots=True)
class _Watched:
    """One request that is told.

    Attributes:
        first: the first that it was told of its start.
        last: the last that it was told.
    """

    priority: PriorityClass
    first: _Told | None = None
    last: _Told | None = None


class WatchedRequests:
    """The watched requests of one scheduler."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._watched: dict[str, _Watched] = {}
        self._estimates = StartEstimates(core.admission.predictor.drain)

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, request_id: str, now: float) -> bool:
        """Tell of a request from now on; whether it waits."""
        scheduled = self._core.find(request_id)
        if scheduled is None or not scheduled.queued:
            return False
        if not self._watched:
            # What happened since the last one was told is not known.
            self._estimates.on_time({}, now)
        self._watched.setdefault(request_id, _Watched(scheduled.request.priority))
        return True

    def look(self, now: float) -> Iterator[list[Outlook]]:
        """What to tell now, at most `MOST_UPDATES`, those first that have been told nothing for longest.

        The work is done in parts, with nothing or some updates after each. Events may be handled between
        them.
        """
        if not self._watched:
            return
        self._estimates.on_time(self._waiting_at_home(), now)
        self._estimates.learn_overdue(now)
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
            for _ in self._look_at(home, order, due, now):
                yield []
        if len(due) > MOST_UPDATES:
            due = nsmallest(MOST_UPDATES, due)
        for at in range(0, len(due), PART):
            yield [outlook for _, _, outlook in due[at : at + PART] if self._tell(outlook, now)]

    def expected(
        self, scheduled: ScheduledRequest, order: Sequence[ScheduledRequest], now: float
    ) -> Outlook | None:
        """What a request may expect that waits in this order of its home pool; None when it is not in it.

        Nothing is told by that, noted or learned, so it serves for requests that nobody watches.
        """
        rate = self._rate(scheduled.pools[0], order)
        ahead = 0
        for position, each in enumerate(order, 1):
            ahead += each.estimate.expected_tokens
            if each is scheduled:
                uncorrected_s = None if rate is None else max(1, ahead) / rate
                start = self._start(scheduled, position, uncorrected_s, now)
                return Outlook(scheduled.request.request_id, position, start)
        return None

    def on_dispatch(self, scheduled: ScheduledRequest, now: float) -> list[Honesty]:
        """Any request was dispatched; how honest it was to this one."""
        if not self._watched:
            return []
        waiting = self._waiting_at_home()
        if now > scheduled.request.arrived_at:
            waiting[scheduled.pools[0]] += 1
        self._estimates.on_time(waiting, now)
        self._estimates.on_dispatch(scheduled, now)
        return self._end(scheduled.request.request_id, now)

    def on_conclusion(self, request_id: str, outcome: Outcome, now: float) -> list[Honesty]:
        """Any request has ended; what that shows of one that waited.

        One that expires in the queue after the end of its interval was told too little.
        """
        if not self._watched:
            return []
        if outcome is Outcome.EXPIRED:
            self._estimates.on_expiry(request_id, now)
            return [each for each in self._end(request_id, now) if each.verdict == AFTER]
        self._estimates.forget(request_id)
        self._end(request_id, now)
        return []

    def _look_at(
        self, home: str, order: Sequence[ScheduledRequest], due: list[tuple[float, int, Outlook]], now: float
    ) -> Iterator[None]:
        estimates, watched = self._estimates, self._watched
        rate = self._rate(home, order)
        ahead = 0
        for position, scheduled in enumerate(order, 1):
            if not position % PART:
                yield
            ahead += scheduled.estimate.expected_tokens
            if not scheduled.queued:
                continue
            uncorrected_s = None if rate is None else max(1, ahead) / rate
            if uncorrected_s is not None:
                estimates.note(scheduled, position, uncorrected_s, now)
            one = watched.get(scheduled.request.request_id)
            if one is None or (one.last is not None and now - one.last.at < _LEAST_S):
                continue
            start = self._start(scheduled, position, uncorrected_s, now)
            if _matters(one.last, position, start, now):
                told_at = float("-inf") if one.last is None else one.last.at
                due.append((told_at, len(due), Outlook(scheduled.request.request_id, position, start)))

    def _rate(self, home: str, order: Sequence[ScheduledRequest]) -> float | None:
        """Tokens per second that leave this order; None while it is not known."""
        tokens = sum(scheduled.estimate.expected_tokens for scheduled in order)
        return self._estimates.rate(home, tokens / max(1, self._core.queue.waiting_tokens))

    def _start(
        self, scheduled: ScheduledRequest, position: int, uncorrected_s: float | None, now: float
    ) -> Quantiles | None:
        if uncorrected_s is None or self._core.admission.outages.concern(scheduled.pools):
            return None
        start = self._estimates.start(scheduled, position, uncorrected_s)
        rests_s = scheduled.resting_until - now
        if rests_s > start.low:
            start = Quantiles(rests_s, max(rests_s, start.middle), max(rests_s, start.high))
        return start

    def _tell(self, outlook: Outlook, now: float) -> bool:
        """Note what is told; whether anybody is there to hear it."""
        one = self._watched.get(outlook.request_id)
        if one is None:
            return False
        one.last = _Told(now, outlook.position, outlook.start)
        if one.first is None and outlook.start is not None:
            one.first = one.last
        return True

    def _end(self, request_id: str, now: float) -> list[Honesty]:
        one = self._watched.pop(request_id, None)
        if not self._watched:
            self._estimates.pause()
        if one is None or one.first is None or one.last is None:
            return []
        return [*one.first.judged(FIRST, one.priority, now), *one.last.judged(LAST, one.priority, now)]

    def _waiting_at_home(self) -> Counter[str]:
        waiting = Counter[str]()
        for pools, work in self._core.queue.work.items():
            waiting[pools[0]] += work.requests
        return waiting

    def __repr__(self) -> str:
        return f"<WatchedRequests {len(self._watched)}, {self._estimates}>"


def _matters(told: _Told | None, position: int, start: Quantiles | None, now: float) -> bool:
    """Whether a request is to be told, after what it was told."""
    if told is None or now - told.at >= _MOST_S:
        return True
    if abs(position - told.position) >= max(1, told.position // _PLACES):
        return True
    if start is None or told.start is None:
        return start is not told.start
    moved_s = abs(start.middle - (told.start.middle - (now - told.at)))
    return moved_s >= max(_START_S, _START_RATIO * told.start.middle)
