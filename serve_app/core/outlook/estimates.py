"""Start estimates: the expected start of a queued request, computed from its position, and its interval.

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
from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.core.admission.wait_prediction import DrainRate
from serve_app.core.outlook.spread import Margin, Quantiles, RatioSpread
from serve_app.core.request import ScheduledRequest

_SpreadKey = tuple[object, ...]

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
        self._spreads: dict[_SpreadKey, RatioSpread] = {}
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
        ratios = self._ratios(scheduled, octave)
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
        ratio = actual_s / estimate.uncorrected_s
        for key in _spread_keys(estimate.scheduled, octave):
            spread = self._spreads.get(key)
            if spread is None:
                spread = self._spreads[key] = RatioSpread()
            spread.add(ratio)

    def _ratios(self, scheduled: ScheduledRequest, octave: int) -> Quantiles:
        for key in _spread_keys(scheduled, octave):
            spread = self._spreads.get(key)
            if spread is not None and spread.count >= _MIN_OBSERVATIONS:
                return spread.quantiles()
        return _PRIOR

    def __repr__(self) -> str:
        return f"<StartEstimates of {len(self._pending)} requests, {len(self._spreads)} keys>"


def _octave(position: int) -> int:
    return min(position.bit_length(), _MAX_OCTAVE)


def _spread_keys(scheduled: ScheduledRequest, octave: int) -> tuple[_SpreadKey, ...]:
    """Return the keys of a request's ratios, from the most specific to the most general."""
    rank = scheduled.request.priority.rank
    length = scheduled.estimate.expected_prompt_tokens.bit_length()
    return (scheduled.pools[0], rank, length, octave), (rank, octave), (octave,)
