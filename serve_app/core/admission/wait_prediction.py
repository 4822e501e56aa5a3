"""Wait prediction: the queue time of a request.

- `WaitPredictor`: predicts waits from the drain rate, and corrects them by actual ones.
- `DrainRate`: the measured drain rate of a pool.
- `SlotRate`: a prior of the drain rate, from the slots of the replicas, before it was measured.

`WaitPredictor`. Predicted wait = work ahead / drain rate * correction. The correction is the ratio of actual
to predicted waits. It is needed because a policy that favours short requests serves them long before work
that arrived earlier. It is learned for each kind of request: class, power of two of the expected prompt,
whether it claimed a retry reservation, and whether its first token has a latency target.

- It is a ratio of decayed sums, not a mean of ratios, so long waits dominate and noise in short ones does
  not.
- One wait counts for at most a few times its prediction, and the correction is bounded, so that an outage
  of the fleet does not distort it.
- Each kind starts at the correction of all kinds, which starts at 1.

The full wait of an expired request is unknown, so it counts as twice the observed wait. Counting less would
cause positive feedback: expired work leaves the queue early, so waits look short, and more requests are
admitted that expire. A queued request that has waited longer than predicted is *overdue*. It counts as its
observed wait and as much again as it is overdue. Otherwise an error would be learned only after a whole wait,
and in an overload many requests would be admitted by then that expire.

While few waits were observed (`is_cold`), `SlotRate` provides a lower bound as well. The first dispatches of
a backlog fill free slots faster than the queue drains afterwards, so some seconds of backlog are required in
addition to the observations.

The wait of a rejected request is never observed. A prediction for a kind without recent observations is
therefore not trusted (`is_trusted`), and one request of that kind is admitted as a probe.

`SlotRate`. A full engine computes the prompt of each request, and decodes as many answers at a time as it has
slots. So one request costs it

    request_s = max(prompt tokens * prefill_token_s, output tokens * tpot_s / slots)

    slots = min(max_num_seqs, KV budget / tokens of a request)

with the means of the queued requests: prompts are computed while weights are read for decoding (see
`engines.model.step_time`), and a reported `tpot_s` includes what they add. The fleet drains the sum of `1 /
request_s`, and free slots accept work immediately. `tpot_s` of a replica is the last reported value, else
the value that its engine stated when it joined. The time per prompt token is the engine's, else the learned
one; if neither is known, prefills are free. Output lengths not yet learned are assumed short.

The resulting wait is a lower bound if the lengths are right. In this model slots become free one after the
other, on a cold engine all together. Isolation, priority classes and gates are ignored. If a replica's
`tpot_s` is unknown, there is no prior and it rejects nothing.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from serve_app.core.dispatch.backpressure import EngineBackpressure
from serve_app.core.queueing.expiry import ExpiryHeap
from serve_app.core.queueing.request_queue import RequestQueue, WaitingWork
from serve_app.core.request import PredictedWait, ScheduledRequest, WaitKind
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.prefill_cost import DecayingRate, PrefillCosts
from serve_app.core.routing.replica_state import ReplicaState

# Prefills after which their learned cost no longer depends mostly on its prior.
_LEARNED = 20
# Tolerance for rounding errors.
_ROUNDING_MARGIN = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class SlotDrain:
    """Capacity of the replicas that a request competes for.

    Attributes:
        tokens_ahead: work served before the request.
        tokens_per_s: drain rate of a full fleet.
        free_tokens: work that free slots accept immediately.
    """

    tokens_ahead: float
    tokens_per_s: float
    free_tokens: float


class SlotRate:
    """Computes the prior of the drain rate. Engines accept `target_waiting` requests beyond their batch."""

    def __init__(
        self,
        queue: RequestQueue,
        ledger: ReplicaLedger,
        prefill_costs: PrefillCosts,
        backpressure: EngineBackpressure,
    ) -> None:
        self._queue = queue
        self._ledger = ledger
        self._prefill_costs = prefill_costs
        self._backpressure = backpressure

    def drain(self, pools: tuple[str, ...], work_ahead: int) -> SlotDrain | None:
        """Return the work that drains before a request that arrives now.

        Args:
            work_ahead: tokens served before it (`RequestQueue.work_ahead`).

        Returns:
            None if nothing waits or the pace of a replica is unknown.
        """
        work, reached = self._competing(pools)
        if not work.tokens:
            return None
        requests_per_s = free_requests = 0.0
        any_alive = False
        for state in self._ledger:
            if not state.is_alive or state.spec.pool not in reached:
                continue
            share = self._share(state, work)
            if share is None:
                return None
            any_alive = True
            requests_per_s += share[0]
            free_requests += share[1]
        if not any_alive:
            return None
        mean_tokens = work.tokens / work.requests
        return SlotDrain(
            # Work for other pools is not ahead, even if it is more urgent.
            tokens_ahead=min(work_ahead, work.tokens),
            tokens_per_s=requests_per_s * mean_tokens,
            free_tokens=free_requests * mean_tokens,
        )

    def certainly_drains(self, pools: tuple[str, ...], work_ahead: int, seconds: float) -> bool:
        """Return whether `drain` gives no reason to reject a request that may wait `seconds`.

        The work ahead drains in time, or nothing can be computed because the pace of a replica is unknown.
        Inspects only as many replicas as it needs. May return False if the time is only just enough.
        """
        work, reached = self._competing(pools)
        if not work.tokens:
            return True
        remaining = _ROUNDING_MARGIN * min(work_ahead, work.tokens) * work.requests / work.tokens
        for pool in sorted(reached):
            for state in self._ledger.of_pool(pool):
                if not state.is_alive:
                    continue
                share = self._share(state, work)
                if share is None:
                    return True
                remaining -= seconds * share[0] + share[1]
                if remaining < 0:
                    return True
        return False

    def _share(self, state: ReplicaState, work: WaitingWork) -> tuple[float, float] | None:
        """Return the requests per second of a replica and its free slots, or None if its pace is unknown."""
        slots = min(state.likely_num_seqs, max(1.0, state.kv_budget * work.requests / work.tokens))
        engine_s = self._engine_s(state, work, slots)
        if engine_s is None:
            return None
        accepted = slots + self._backpressure.target_waiting
        return work.requests / engine_s, max(0.0, accepted - state.in_flight)

    def _competing(self, pools: tuple[str, ...]) -> tuple[WaitingWork, set[str]]:
        """Return all work queued for any of these pools, and the pools that may serve it."""
        work, reached = WaitingWork(), set(pools)
        own = frozenset(pools)
        for others, waiting in self._queue.work.items():
            if waiting.requests and not own.isdisjoint(others):
                work.merge(waiting)
                reached.update(others)
        return work, reached

    def _engine_s(self, state: ReplicaState, work: WaitingWork, slots: float) -> float | None:
        """Return the seconds that a full engine needs for all the work, or None if its pace is unknown."""
        spec = state.spec
        tpot_s = spec.tpot_s if state.tpot_s is None else state.tpot_s
        if tpot_s is None:
            return None
        cost = self._prefill_costs.of(spec.pool)
        learned_s = cost.per_token_s if cost.observations >= _LEARNED else 0.0
        prefill_token_s = learned_s if spec.prefill_token_s is None else spec.prefill_token_s
        engine_s = max(work.prompt_tokens * prefill_token_s, work.least_output_tokens * tpot_s / slots)
        return engine_s or None


# Long enough for some dozens of dispatches of a small fleet, short enough to follow a fleet that scales.
_TIME_CONSTANT_S = 30.0

# An observation's weight after n more is `_DECAY ** n`: about the last fifty count.
_DECAY = 0.98
# Weight of the prior, in seconds of waiting. The prior of each kind is the ratio of all kinds.
_PRIOR_S = 2.0
_MIN_CORRECTION, _MAX_CORRECTION = 1 / 32, 8.0
# A wait counts for at most this many times its prediction, plus some seconds.
_OUTLIER_RATIO, _OUTLIER_S = 8.0, 1.0
# Observations of a kind before its predictions can reject: a single wait may differ much from its prediction,
# the mean of five does not.
_MIN_OBSERVATIONS = 5
# A prediction for a kind without an observation for this long is not trusted: one request of that kind is
# admitted as a probe. Well above the time between two dispatches of one kind under load, and well below a
# client's timeout.
_PROBE_INTERVAL_S = 10.0
# All kinds together need this many times the observations that one kind needs.
_KINDS = 4
# Seconds of backlog required before predictions count alone: several times as long as filling an engine's
# batch.
_COLD_S = 5.0
# Assumed wait of an expired request relative to its observed wait. Twice is the expectation for a duration of
# which only the age is known.
_EXPIRED_RATIO = 2.0
# Overdue requests count for requests with an uncorrected prediction of up to two powers of two more. Those
# with less work ahead are overdue because others have overtaken them, which says little about longer waits.
_COMPARABLE_OCTAVES = 2


class DrainRate:
    """The rate at which tokens and requests are dispatched per second of backlog."""

    def __init__(self, now: float) -> None:
        self._at = now
        self.backlog_s = 0.0
        self._backlogged = False
        self._tokens = DecayingRate(_TIME_CONSTANT_S, 0.0)
        self._requests = DecayingRate(_TIME_CONSTANT_S, 0.0)

    def on_time(self, waiting: int, now: float) -> None:
        """Record that `waiting` requests have been queued from the last call until `now`."""
        self._backlogged = waiting > 0
        if self._backlogged:
            self.backlog_s += now - self._at
        self._at = now

    def on_dispatch(self, tokens: int) -> None:
        """Count the work of a request that leaves the queue at the time of the last `on_time`."""
        if self._backlogged:
            self._tokens.add(tokens, self.backlog_s)
            self._requests.add(1.0, self.backlog_s)

    @property
    def tokens_per_s(self) -> float:
        """Estimated tokens per second of backlog; 0.0 before the first dispatch."""
        return self._tokens.per_s(self.backlog_s)

    @property
    def requests_per_s(self) -> float:
        """Requests per second of backlog; 0.0 before the first dispatch."""
        return self._requests.per_s(self.backlog_s)

    def __repr__(self) -> str:
        return f"<DrainRate {self.tokens_per_s:.0f} tokens/s {self.requests_per_s:.2f} requests/s>"


class _Overdue(NamedTuple):
    """Overdue requests of one kind whose uncorrected predictions have the same power of two.

    Attributes:
        since_s, predicted_s, uncorrected_s: sums of their arrivals, and of their predictions.
    """

    number: int
    since_s: float
    predicted_s: float
    uncorrected_s: float


_NONE_OVERDUE = _Overdue(0, 0.0, 0.0, 0.0)


class _Correction:
    """The ratio of actual to predicted waits of one kind of request.

    Attributes:
        count: observations, including those of requests that are overdue.
    """

    __slots__ = ("_overdue", "actual_s", "count", "predicted_s", "seen_at")

    def __init__(self) -> None:
        self.actual_s = self.predicted_s = 0.0
        self.count = 0
        self.seen_at = -math.inf
        self._overdue: dict[int, _Overdue] = {}

    def observe(self, predicted_s: float, actual_s: float, now: float) -> None:
        self.actual_s = _DECAY * self.actual_s + min(actual_s, _OUTLIER_RATIO * predicted_s + _OUTLIER_S)
        self.predicted_s = _DECAY * self.predicted_s + predicted_s
        self.count += 1
        self.seen_at = now

    def count_overdue(self, prediction: PredictedWait, by: int) -> None:
        """Count a request that became overdue (1), or was and has left the queue (-1)."""
        self.count += by
        octave = _octave(prediction.uncorrected_s)
        overdue = self._overdue.pop(octave, _NONE_OVERDUE)
        if overdue.number + by:
            self._overdue[octave] = _Overdue(
                overdue.number + by,
                overdue.since_s + by * prediction.at,
                overdue.predicted_s + by * prediction.wait_s,
                overdue.uncorrected_s + by * prediction.uncorrected_s,
            )

    def ratio(self, prior: float, uncorrected_s: float, now: float) -> float:
        """Return the expected ratio for a request with this uncorrected prediction."""
        actual_s, predicted_s = self.actual_s + _PRIOR_S * prior, self.predicted_s + _PRIOR_S
        least = _octave(uncorrected_s) - _COMPARABLE_OCTAVES
        for octave, overdue in self._overdue.items():
            if octave >= least:
                waited_s = overdue.number * now - overdue.since_s
                most_s = _OUTLIER_RATIO * overdue.uncorrected_s + _OUTLIER_S * overdue.number
                actual_s += min(2 * waited_s - overdue.predicted_s, most_s)
                predicted_s += overdue.uncorrected_s
        return min(max(actual_s / predicted_s, _MIN_CORRECTION), _MAX_CORRECTION)


def _octave(seconds: float) -> int:
    return math.frexp(seconds)[1]


@dataclass(slots=True)
class PredictionErrors:
    """Errors of predictions (predicted minus actual), of requests that waited or were predicted to wait.

    Attributes:
        expired: requests that were admitted by a prediction, and expired in the queue.
        mean_s: mean over about the last fifty; positive if requests are dispatched sooner than predicted.
    """

    count: int = 0
    expired: int = 0
    mean_s: float = 0.0
    mean_absolute_s: float = 0.0

    def add(self, error_s: float) -> None:
        """Add one error."""
        self.count += 1
        weight = max(1.0 / self.count, 1.0 - _DECAY)
        self.mean_s += weight * (error_s - self.mean_s)
        self.mean_absolute_s += weight * (abs(error_s) - self.mean_absolute_s)


class WaitPredictor:
    """Predicts queue times and learns from the actual ones."""

    def __init__(self, now: float) -> None:
        self.drain = DrainRate(now)
        self.errors = PredictionErrors()
        self._now = now
        self._all = _Correction()
        self._by_kind: dict[WaitKind, _Correction] = {}
        self._due = ExpiryHeap(_due_at)
        self._overdue: set[ScheduledRequest] = set()

    def on_enqueue(self, scheduled: ScheduledRequest) -> None:
        """Observe the wait of a request that was added to the queue."""
        if scheduled.prediction is not None:
            self._due.add(scheduled)

    def on_dequeue(self, scheduled: ScheduledRequest) -> None:
        """Forget a request that has left the queue; `on_dispatch` or `on_expiry` learn from it."""
        if scheduled in self._overdue:
            self._overdue.remove(scheduled)
            self._count_overdue(scheduled, -1)

    def on_time(self, waiting: int, now: float) -> None:
        """Record that `waiting` requests have been queued from the last call until `now`."""
        self._now = now
        self.drain.on_time(waiting, now)
        for scheduled in self._due.pop_expired(now):
            self._overdue.add(scheduled)
            self._count_overdue(scheduled, 1)

    def seconds_per_token(self, kind: WaitKind, tokens_ahead: int) -> float | None:
        """Return the wait that a token of work ahead adds for this kind, or None if the rate is unknown."""
        rate = self.drain.tokens_per_s
        return self._correction(kind, tokens_ahead / rate) / rate if rate > 0 else None

    def predict(self, scheduled: ScheduledRequest, tokens_ahead: int, now: float) -> PredictedWait | None:
        """Return the predicted wait of a request that arrives now, or None before the first drain rate."""
        rate = self.drain.tokens_per_s
        if not rate > 0:
            return None
        kind = kind_of(scheduled)
        if not tokens_ahead:
            return PredictedWait(kind, now, 0.0, 0.0)
        uncorrected_s = tokens_ahead / rate
        return PredictedWait(kind, now, uncorrected_s, uncorrected_s * self._correction(kind, uncorrected_s))

    @property
    def is_cold(self) -> bool:
        """True if too little was observed to rely on predictions alone."""
        return self._all.count < _KINDS * _MIN_OBSERVATIONS or self.drain.backlog_s < _COLD_S

    def is_trusted(self, kind: WaitKind, now: float) -> bool:
        """Return whether recent observations of a kind suffice to reject a request on a prediction.

        Returns False once after each `_PROBE_INTERVAL_S` without an observation of the kind, and more often
        for a kind with few observations. That request is the probe.
        """
        if self._all.count < _KINDS * _MIN_OBSERVATIONS:
            return False
        correction = self._observed(kind)
        interval_s = _PROBE_INTERVAL_S
        if correction.count < _MIN_OBSERVATIONS:
            interval_s /= _MIN_OBSERVATIONS
        if now - correction.seen_at > interval_s:
            correction.seen_at = now
            return False
        return True

    def on_dispatch(self, scheduled: ScheduledRequest, now: float) -> None:
        """Learn from the wait of a request that is dispatched."""
        self.drain.on_dispatch(scheduled.estimate.expected_tokens)
        prediction = scheduled.prediction
        if prediction is None:
            return
        actual_s = now - prediction.at
        if actual_s > 0 or prediction.uncorrected_s > 0:
            self.errors.add(prediction.wait_s - actual_s)
            self._learn(prediction, actual_s, now)

    def on_expiry(self, scheduled: ScheduledRequest, now: float) -> None:
        """Learn from a request that expired in the queue. Its full wait is unknown."""
        prediction = scheduled.prediction
        if prediction is not None:
            waited_s = now - prediction.at
            self.errors.add(prediction.wait_s - waited_s)
            self.errors.expired += 1
            self._learn(prediction, _EXPIRED_RATIO * waited_s, now)

    def _learn(self, prediction: PredictedWait, actual_s: float, now: float) -> None:
        for correction in (self._observed(prediction.kind), self._all):
            correction.observe(prediction.uncorrected_s, actual_s, now)

    def _count_overdue(self, scheduled: ScheduledRequest, by: int) -> None:
        prediction = scheduled.prediction
        assert prediction is not None, "only requests with a prediction become overdue"
        for correction in (self._observed(prediction.kind), self._all):
            correction.count_overdue(prediction, by)
            correction.seen_at = max(correction.seen_at, self._now if by > 0 else -math.inf)

    def _observed(self, kind: WaitKind) -> _Correction:
        correction = self._by_kind.get(kind)
        if correction is None:
            correction = self._by_kind[kind] = _Correction()
        return correction

    def _correction(self, kind: WaitKind, uncorrected_s: float) -> float:
        of_all = self._all.ratio(1.0, uncorrected_s, self._now)
        correction = self._by_kind.get(kind)
        return of_all if correction is None else correction.ratio(of_all, uncorrected_s, self._now)

    def __repr__(self) -> str:
        correction = self._all.ratio(1.0, 0.0, self._now)
        return f"<WaitPredictor {self.drain!r} correction={correction:.2f} {self.errors}>"


def _due_at(scheduled: ScheduledRequest) -> float:
    prediction = scheduled.prediction
    return math.inf if prediction is None else prediction.at + prediction.wait_s


def kind_of(scheduled: ScheduledRequest) -> WaitKind:
    """Return the kind of a request; see `WaitKind`."""
    prompt_bits = scheduled.estimate.expected_prompt_tokens.bit_length()
    has_target = scheduled.target is not None and scheduled.target.due_at < math.inf
    return scheduled.request.priority.rank, prompt_bits, scheduled.claimed, has_target
