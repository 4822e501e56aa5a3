"""The prediction of a request's wait in the queue, and the errors of such predictions.

Predicted wait = work ahead / drain rate * correction. The correction is the ratio of actual to predicted
waits, because a policy that favours short requests serves them long before work that arrived earlier. It is
learned for each kind of request: class, octave of the expected prompt, and whether it claimed a retry
reservation.

- It is a ratio of decayed sums, not a mean of ratios, so that long waits count and noise in short ones does
  not.
- One wait counts with at most a few times its prediction, and the correction is bounded, so that a stall of
  the fleet does not distort it.
- Each kind begins at the correction of all kinds, which begins at 1.

A request that expires would have waited longer than it did, so it counts with twice its wait. Counting less
would feed back on itself: work that expires is ahead of others and soon gone, so waits look short, and more
requests are admitted that expire.

While little was observed (`is_cold`) `slot_rate` gives a lower bound besides. The first dispatches of a
backlog fill free slots, faster than the queue drains afterwards, so it takes some seconds of backlog besides
the observations.

The wait of a refused request is never observed. So the prediction for a kind that was not observed for a
while is not trusted (`is_trusted`), and one request of that kind is admitted as a probe.
"""

import math
from dataclasses import dataclass

from serve_app.scheduling.admission.drain_rate import DrainRate
from serve_app.scheduling.admission.settings import AdmissionSettings
from serve_app.scheduling.request import PredictedWait, ScheduledRequest, WaitKind

# An observation's weight after n more is `_KEPT ** n`: the last fifty or so count.
_KEPT = 0.98
# Weight of the prior, in seconds of waiting: every kind begins with the ratio of all.
_PRIOR_S = 2.0
_LEAST, _MOST = 1 / 32, 8.0
# A wait counts with at most this many times its prediction, plus some seconds.
_OUTLIER_RATIO, _OUTLIER_S = 8.0, 1.0
# All kinds together need so many times the observations that one kind needs.
_KINDS = 4
# Seconds of backlog that must have been seen: several times as long as it takes to fill an engine's batch.
_COLD_S = 5.0
# How long an expired request would have waited, relative to how long it did. Twice is the expectation for a
# duration of which only the age is known.
_EXPIRED_RATIO = 2.0


class _Correction:
    """The ratio of actual to predicted waits of one kind of request."""

    __slots__ = ("actual_s", "count", "predicted_s", "seen_at")

    def __init__(self) -> None:
        self.actual_s = self.predicted_s = 0.0
        self.count = 0
        self.seen_at = -math.inf

    def observe(self, predicted_s: float, actual_s: float, now: float) -> None:
        self.actual_s = _KEPT * self.actual_s + min(actual_s, _OUTLIER_RATIO * predicted_s + _OUTLIER_S)
        self.predicted_s = _KEPT * self.predicted_s + predicted_s
        self.count += 1
        self.seen_at = now

    def ratio(self, prior: float) -> float:
        ratio = (self.actual_s + _PRIOR_S * prior) / (self.predicted_s + _PRIOR_S)
        return min(max(ratio, _LEAST), _MOST)


@dataclass(slots=True)
class PredictionErrors:
    """Predicted minus actual wait, of requests that waited or were predicted to wait.

    Attributes:
        count: observations so far.
        mean_s: over about the last fifty; positive when requests are dispatched sooner than predicted.
        mean_absolute_s: mean of the absolute errors.
    """

    count: int = 0
    mean_s: float = 0.0
    mean_absolute_s: float = 0.0

    def add(self, error_s: float) -> None:
        """Count one error."""
        self.count += 1
        weight = max(1.0 / self.count, 1.0 - _KEPT)
        self.mean_s += weight * (error_s - self.mean_s)
        self.mean_absolute_s += weight * (abs(error_s) - self.mean_absolute_s)


class WaitPredictor:
    """Predicts waits, and learns from the actual ones.

    Attributes:
        drain: the drain rate of the queue.
        errors: of its predictions.
    """

    def __init__(self, settings: AdmissionSettings, now: float) -> None:
        self._settings = settings
        self.drain = DrainRate(now)
        self.errors = PredictionErrors()
        self._all = _Correction()
        self._by_kind: dict[WaitKind, _Correction] = {}

    def seconds_per_token(self, kind: WaitKind) -> float | None:
        """What a token of work ahead adds to the wait of such a request; None while the rate is unknown."""
        rate = self.drain.tokens_per_s
        return self._correction(kind) / rate if rate > 0 else None

    def predict(self, scheduled: ScheduledRequest, tokens_ahead: int, now: float) -> PredictedWait | None:
        """How long a request that arrives now will wait; None before the queue has ever drained."""
        rate = self.drain.tokens_per_s
        if not rate > 0:
            return None
        kind = kind_of(scheduled)
        if not tokens_ahead:
            return PredictedWait(kind, now, 0.0, 0.0)
        uncorrected_s = tokens_ahead / rate
        return PredictedWait(kind, now, uncorrected_s, uncorrected_s * self._correction(kind))

    @property
    def is_cold(self) -> bool:
        """Whether too little was observed to rely on predictions alone."""
        return self._all.count < _KINDS * self._settings.min_observations or self.drain.backlog_s < _COLD_S

    def is_trusted(self, kind: WaitKind, now: float) -> bool:
        """Whether enough such waits were observed recently to refuse a request on their account.

        False once after each `probe_interval_s` without an observation of the kind, and more often for a kind
        with few observations.
        """
        settings = self._settings
        if self._all.count < _KINDS * settings.min_observations:
            return False
        correction = self._observed(kind)
        interval_s = settings.probe_interval_s
        if correction.count < settings.min_observations:
            interval_s /= settings.min_observations
        if now - correction.seen_at > interval_s:
            correction.seen_at = now
            return False
        return True

    def on_dispatch(self, scheduled: ScheduledRequest, now: float) -> None:
        """A request leaves the queue for a replica."""
        self.drain.on_dispatch(scheduled.estimate.expected_tokens)
        prediction = scheduled.prediction
        if prediction is None:
            return
        actual_s = now - prediction.at
        if actual_s > 0 or prediction.uncorrected_s > 0:
            self.errors.add(prediction.wait_s - actual_s)
            self._learn(prediction, actual_s, now)

    def on_expiry(self, scheduled: ScheduledRequest, now: float) -> None:
        """A request expired in the queue, so its full wait is unknown."""
        prediction = scheduled.prediction
        if prediction is not None:
            waited_s = now - prediction.at
            self.errors.add(prediction.wait_s - waited_s)
            self._learn(prediction, _EXPIRED_RATIO * waited_s, now)

    def _learn(self, prediction: PredictedWait, actual_s: float, now: float) -> None:
        for correction in (self._observed(prediction.kind), self._all):
            correction.observe(prediction.uncorrected_s, actual_s, now)

    def _observed(self, kind: WaitKind) -> _Correction:
        correction = self._by_kind.get(kind)
        if correction is None:
            correction = self._by_kind[kind] = _Correction()
        return correction

    def _correction(self, kind: WaitKind) -> float:
        of_all = self._all.ratio(prior=1.0)
        correction = self._by_kind.get(kind)
        return of_all if correction is None else correction.ratio(prior=of_all)

    def __repr__(self) -> str:
        return f"<WaitPredictor {self.drain!r} correction={self._all.ratio(1.0):.2f} {self.errors}>"


def kind_of(scheduled: ScheduledRequest) -> WaitKind:
    """The kind of a request: class, octave of its prompt, and whether it claimed a reservation."""
    octave = scheduled.estimate.expected_prompt_tokens.bit_length()
    return scheduled.request.priority.rank, octave, scheduled.claimed
