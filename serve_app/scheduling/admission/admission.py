"""Who is let in, who may wait, and when the others should come again.

At the door (`refuse`): a model that is not served here, or that nobody has served for a while. All others are
tried at once, and one for which a replica has room is sent there, however full the queue is. The rest want to
*wait*, and for that there are lines (`denial`):

- the deadline: the predicted wait, with a margin, ends before the request's time in the queue does. Only
  where such predictions have been seen to hold (`wait_prediction`).
- the places: `max_waiting` bounds all that wait. `batch` leaves some of them to `default`, and both to
  `interactive`. One tenant may take no more than a multiple of the places that are left, so that a heavy one
  is refused and a light one finds a place (dynamic thresholds: Choudhury and Hahne, IEEE/ACM ToN 6(2), 1998).

Where nothing waits nobody is refused. A refused request is told when the last of its lines will have room for
it, and that room is reserved (`reservations`). One that comes back then needs no margin, and passes newcomers.

Retry-After is spread by a hash of the request's id, so that clients refused together do not return together;
a hash instead of a random number, so that the same events give the same commands.
"""

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Request
from serve_app.routing.estimation.estimate import TokenEstimate
from serve_app.routing.pools import least_budget_tokens
from serve_app.scheduling.admission.retry_reservations import (
    Line,
    ReservedWork,
    RetryReservations,
    fair_tokens,
)
from serve_app.scheduling.admission.wait_prediction import WaitPredictor
from serve_app.scheduling.queueing.fairness import FairnessMode
from serve_app.scheduling.queueing.request_queue import RequestQueue
from serve_app.scheduling.request import ScheduledRequest
from serve_app.scheduling.settings import SchedulerSettings

# RetryReservations keep returns apart already, so the spread only has to break up equal times.
_SPREAD_RATIO, _SPREAD_S = 0.25, 1.0
# While nothing is known of the pace: short enough to be harmless and long enough to breathe.
_UNKNOWN_S = 1.0
_LEAST_S = 0.1


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not let in.

    Attributes:
        retry_after_s: when coming again may help; None when it never does.
    """

    outcome: Outcome
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Denial:
    """Why a request should not wait, and when it might."""

    outcome: Outcome
    message: str
    admissible_in_s: float


@dataclass(frozen=True, slots=True)
class _Condition:
    """A line that must have room for a request before it may wait.

    Attributes:
        claimed_limit: what the line may hold before one that was told to come now.
        amount: what reserved requests will add to the line.
    """

    outcome: Outcome
    message: str
    line: Line
    claimed_limit: float
    amount: Callable[[ReservedWork], float]


class Admission:
    """The checks before a request may wait.

    Attributes:
        predictor: of waits in the queue.
        reservations: who was told to come again.
    """

    def __init__(self, settings: SchedulerSettings, queue: RequestQueue, now: float) -> None:
        self._settings = settings
        self._queue = queue
        self._names = frozenset((settings.model, *settings.aliases))
        self.predictor = WaitPredictor(settings.admission, now)
        self.retry_reservations = RetryReservations(settings.admission)
        # Since when there has been no replica at all; None while there is one.
        self._bare_since: float | None = now

    def on_replicas_changed(self, joined: int, now: float) -> None:
        """Note how many replicas are connected."""
        if joined:
            self._bare_since = None
        elif self._bare_since is None:
            self._bare_since = now

    def refuse(self, request: Request, now: float) -> Refusal | None:
        """Whether the model is served here at all, and there is anybody to serve it."""
        if request.model not in self._names:
            names = ", ".join(sorted(self._names))
            message = f"model {request.model!r} is not served here; served: {names}"
            return Refusal(Outcome.REJECTED_UNKNOWN_MODEL, message)
        if self._bare_since is not None and now - self._bare_since > self._settings.no_replica_grace_s:
            bare_s = now - self._bare_since
            message = f"no replica of {self._settings.model} has been available for {bare_s:.0f} s"
            return Refusal(Outcome.REJECTED_NO_REPLICA, message, self._told_s(request, _UNKNOWN_S))
        return None

    def denial(self, scheduled: ScheduledRequest, now: float) -> Denial | None:
        """Why a request that has just come should not wait; None when it may.

        Notes the prediction of its wait, and takes up its reservation if it has come back.
        """
        self.retry_reservations.expire(now)
        claimed = self.retry_reservations.claim(scheduled.request, now)
        scheduled.claimed = claimed and self._queue.keeps_promises
        if not scheduled.returned:
            scheduled.prediction = self.predictor.predict(
                scheduled, self._queue.work_ahead(scheduled.request), now
            )
        if scheduled.request.no_wait:
            return self._no_wait(scheduled)
        if not len(self._queue):
            return None
        worst: Denial | None = None
        for condition in self._conditions(scheduled, now):
            if claimed and condition.line.ahead <= condition.claimed_limit:
                continue
            admissible_in_s = self.retry_reservations.admissible_in_s(condition.line, condition.amount, now)
            if admissible_in_s > 0 and (worst is None or admissible_in_s > worst.admissible_in_s):
                worst = Denial(condition.outcome, condition.message, admissible_in_s)
        return worst

    def deny(self, scheduled: ScheduledRequest, denial: Denial, now: float) -> Refusal:
        """Refuse a request that may not wait; its work is reserved at the time at which it is to return."""
        request = scheduled.request
        retry_after_s = self._told_s(request, denial.admissible_in_s)
        # A longer wait than may be told promises nothing, nor does one that nobody can tell.
        if denial.admissible_in_s <= self._settings.retry_after_cap_s and not request.no_wait:
            self.retry_reservations.reserve(request, scheduled.estimate.expected_tokens, now + retry_after_s)
        return Refusal(denial.outcome, denial.message, retry_after_s)

    def retry_after_expiry_s(self, scheduled: ScheduledRequest, now: float) -> float:
        """When a request whose time in the queue is over should come again, in seconds; it is reserved."""
        self.predictor.on_expiry(scheduled, now)
        admissible_in_s = max(
            (
                self.retry_reservations.admissible_in_s(each.line, each.amount, now)
                for each in self._conditions(scheduled, now)
            ),
            default=0.0,
        )
        return self.deny(scheduled, Denial(Outcome.EXPIRED, "", admissible_in_s), now).retry_after_s or 0.0

    # What a request would have to wait in

    def _conditions(self, scheduled: ScheduledRequest, now: float) -> Iterator[_Condition]:
        yield from self._deadline(scheduled, now)
        yield from self._places(scheduled)

    def _deadline(self, scheduled: ScheduledRequest, now: float) -> Iterator[_Condition]:
        request, prediction = scheduled.request, scheduled.prediction
        patience_s = request.expires_at - request.arrived_at
        if prediction is None or patience_s == math.inf:
            return
        per_token_s = self.predictor.seconds_per_token(prediction.kind)
        if per_token_s is None or not self.predictor.is_trusted(prediction.kind, now):
            return
        tokens = self._reserved_tokens(scheduled)
        ahead_s = per_token_s * self._queue.work_ahead(request)
        yield _Condition(
            Outcome.REJECTED_DEADLINE_UNMEETABLE,
            f"about {ahead_s:.1f} s of work come first, and the request may wait {patience_s:.1f} s: "
            "come again when Retry-After says, or allow more time with x-queue-timeout-s",
            Line(ahead_s, 1.0, patience_s / (1 + self._settings.admission.deadline_margin_ratio)),
            patience_s / (1 + self._settings.admission.deadline_margin_ratio / 2),
            lambda reserved: per_token_s * tokens(reserved),
        )

    def _places(self, scheduled: ScheduledRequest) -> Iterator[_Condition]:
        request, settings = scheduled.request, self._settings
        waiting = len(self._queue)
        per_s = self.predictor.drain.requests_per_s
        reserved = settings.admission.reserved_share * request.priority.rank
        places = math.ceil(settings.max_waiting * (1 - reserved))
        yield _Condition(
            Outcome.REJECTED_QUEUE_FULL,
            f"the queue of {settings.model} is full: {waiting} requests wait already",
            Line(waiting, per_s, places - 1),
            settings.max_waiting - 1,
            lambda reserved: float(reserved.count) if reserved.rank <= request.priority.rank else 0.0,
        )
        free = places - waiting
        own = self._waiting_of(request.tenant) if self._excess(waiting, free) > 0 else 0
        excess = self._excess(own, free)
        if excess > 0:
            yield _Condition(
                Outcome.REJECTED_QUEUE_FULL,
                f"{own} requests of this tenant wait already, and the rest of the queue is for others",
                Line(own, per_s * own / waiting, own - excess),
                settings.max_waiting - 1,
                lambda reserved: float(reserved.count) if reserved.tenant == request.tenant else 0.0,
            )

    def _excess(self, own: int, free: int) -> float:
        """By how many requests a tenant that wants to add one to its own `own` has too many waiting.

        It may have `multiple` times the `free` places, and each that leaves frees one.
        """
        share = self._settings.admission.tenant_share
        if share == 1:
            return 0.0
        multiple = share / (1 - share)
        return (own + 1 - multiple * free) / (1 + multiple)

    def _reserved_tokens(self, scheduled: ScheduledRequest) -> Callable[[ReservedWork], float]:
        """What reserved requests will put ahead of this one, as `RequestQueue.work_ahead` counts who waits."""
        request = scheduled.request
        if self._settings.fairness.mode is FairnessMode.OFF:
            rank = request.priority.rank
            return lambda reserved: float(reserved.tokens) if reserved.rank <= rank else 0.0
        own = self._queue.waiting_of(request.priority, request.tenant)
        mean_tokens = self._queue.waiting_tokens / max(1, len(self._queue))
        return fair_tokens(request, scheduled.estimate.expected_tokens + own * mean_tokens)

    def _waiting_of(self, tenant: str) -> int:
        return sum(self._queue.waiting_of(priority, tenant) for priority in PriorityClass)

    def _no_wait(self, scheduled: ScheduledRequest) -> Denial:
        prediction = scheduled.prediction
        wait_s = prediction.wait_s if prediction else 0.0
        message = "no replica can take the request right now, and it asked not to wait"
        return Denial(Outcome.REJECTED_QUEUE_FULL, message, wait_s)

    def _told_s(self, request: Request, admissible_in_s: float) -> float:
        """What a client is told: the time, a little spread, never above the cap."""
        wait_s = _UNKNOWN_S if admissible_in_s == math.inf else max(admissible_in_s, _LEAST_S)
        spread = zlib.crc32(request.request_id.encode()) / 2**32
        told_s = wait_s + spread * min(_SPREAD_RATIO * wait_s, _SPREAD_S)
        return min(self._settings.retry_after_cap_s, told_s)


def too_long(request: Request, estimate: TokenEstimate, limit: int | None) -> Refusal:
    """The refusal of a request that no pool can hold.

    Args:
        limit: the longest context limit there is, in tokens.
    """
    least = least_budget_tokens(request, estimate)
    return Refusal(
        Outcome.REJECTED_TOO_LONG,
        f"This model's maximum context length is {limit} tokens, and the request needs at least {least}: "
        f"about {estimate.expected_prompt_tokens} in the prompt, {request.max_output_tokens or 0} asked for "
        "as output. Shorten the prompt or lower max_tokens.",
    )
