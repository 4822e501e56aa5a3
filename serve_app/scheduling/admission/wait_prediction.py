"""How long will a request wait in the queue, and how far off have such predictions been?

Predicted wait = work ahead / drain rate * correction. The correction is the ratio of actual to predicted
waits, because a policy that favours short requests serves them long before the work that came earlier. It is
learned for each kind of request (class, octave of its expected prompt, and whether it was promised a place):

- A ratio of decayed sums, not a mean of ratios, so that long waits count and the noise of short ones does
  not.
- One wait counts with at most a few times its prediction, and the correction is bounded, so that a stall of
  the fleet does not spoil it.
- Each kind begins at the correction of all, which begins at 1.

A request that expires would have waited longer than it did, and is counted with twice that. Counting it with
less has a trap: work that expires is ahead of others and soon gone, so the more expires, the shorter waits
look and the more is let in to expire.

Refused requests are seen by nobody; so a kind of which nothing has been seen for a while is no ground for
refusing any more (`is_trusted`), and one request of it shows how long it really takes.
"""

import math
from dataclasses import dataclass

from serve_app.scheduling.admission.drain_rate import DrainRate
from serve_app.scheduling.admission.settings import AdmissionSettings
from serve_app.scheduling.prediction import Kind, Prediction
from serve_app.scheduling.request import ScheduledRequest

# An observation's weight after n more is `_KEPT ** n`: the last fifty or so count.
_KEPT = 0.98
# Seconds of waiting, seen with the ratio of all, that every kind begins with.
_PRIOR_S = 2.0
_LEAST, _MOST = 1 / 32, 8.0
# A wait counts with at most this many times its prediction, and some seconds.
_OUTLIER_RATIO, _OUTLIER_S = 8.0, 1.0
# All kinds together must have been seen so many times oftener than one.
_KINDS = 4
# How long an expired request would have waited, over how long it did. Twice is what one expects of a wait of
# which nothing is known but that it is not over.
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
    """Predicted minus actual wait of the requests that waited, or were predicted to.

    Attributes:
        count: all of them so far.
        mean_s: mean of the last fifty or so; positive when requests are served sooner than predicted.
        mean_absolute_s: mean of their sizes.
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
    """Predicts waits and learns from how long they turned out.

    Attributes:
        drain: how fast the queue drains.
        errors: how far off it has been.
    """

    def __init__(self, settings: AdmissionSettings, now: float) -> None:
        self._settings = settings
        self.drain = DrainRate(now)
        self.errors = PredictionErrors()
        self._all = _Correction()
        self._by_kind: dict[Kind, _Correction] = {}

    def seconds_per_token(self, kind: Kind) -> float | None:
        """What a token of work ahead adds to the wait of such a request; None while that is unknown."""
        rate = self.drain.tokens_per_s
        return self._correction(kind) / rate if rate > 0 else None

    def predict(self, scheduled: ScheduledRequest, tokens_ahead: int, now: float) -> Prediction | None:
        """How long a request that comes now will wait; None before anything has drained."""
        rate = self.drain.tokens_per_s
        if not rate > 0:
            return None
        kind = kind_of(scheduled)
        plain_s = tokens_ahead / rate
        return Prediction(kind, now, plain_s, plain_s * self._correction(kind))

    def is_trusted(self, kind: Kind, now: float) -> bool:
        """Whether enough such waits were seen, and lately, to refuse on the strength of them.

        Says no once after each `probe_interval_s` without an observation of the kind, and more often for a
        kind of which little is known.
        """
        settings = self._settings
        if self._all.count < _KINDS * settings.min_observations:
            return False
        correction = self._of(kind)
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
        if actual_s > 0 or prediction.plain_s > 0:
            self.errors.add(prediction.wait_s - actual_s)
            self._learn(prediction, actual_s, now)

    def on_expiry(self, scheduled: ScheduledRequest, now: float) -> None:
        """A request was not served in time: nobody knows how long it would have taken."""
        prediction = scheduled.prediction
        if prediction is not None:
            waited_s = now - prediction.at
            self.errors.add(prediction.wait_s - waited_s)
            self._learn(prediction, _EXPIRED_RATIO * waited_s, now)

    def _learn(self, prediction: Prediction, actual_s: float, now: float) -> None:
        for correction in (self._of(prediction.kind), self._all):
            correction.observe(prediction.plain_s, actual_s, now)

    def _of(self, kind: Kind) -> _Correction:
        correction = self._by_kind.get(kind)
        if correction is None:
            correction = self._by_kind[kind] = _Correction()
        return correction

    def _correction(self, kind: Kind) -> float:
        of_all = self._all.ratio(prior=1.0)
        correction = self._by_kind.get(kind)
        return of_all if correction is None else correction.ratio(prior=of_all)

    def __repr__(self) -> str:
        return f"<WaitPredictor {self.drain!r} correction={self._all.ratio(1.0):.2f} {self.errors}>"


def kind_of(scheduled: ScheduledRequest) -> Kind:
    """Requests of one class and octave wait alike, and those that were promised a place by themselves."""
    octave = scheduled.estimate.expected_prompt_tokens.bit_length()
    return scheduled.request.priority.rank, octave, scheduled.claimed
