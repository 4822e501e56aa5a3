"""Admission control: decides whether a request may queue, and when a rejected one should retry.

A request is rejected on arrival if its model is not served here, a limit of its API key is reached
(`arrival_rejection`, `key_limits`), the model's budget is used up (`spending`), or no replica that could
serve it is alive (`outage_rejection`, `outages`). A request that fits a replica is dispatched immediately,
however full the queue is. Any other request may queue if it meets these conditions (`queue_rejection`):

- Deadline: the predicted wait plus a margin must end before the request's queue timeout. This condition
  applies only if such predictions have proved accurate (`wait_prediction`). Until enough is observed, a lower
  bound computed from the replicas' slots must also end before the timeout (`SlotRate`).
- Queue length: `max_waiting` bounds all queued requests. `batch` leaves a share of it to `default`, and both
  leave a share to `interactive`. A tenant may queue at most a multiple of the queue's free capacity, so a
  heavy tenant is rejected before a light one (dynamic thresholds: Choudhury and Hahne, IEEE/ACM ToN 6(2),
  1998).
- The API key's limit on queued requests.

A request that asks for it is also rejected if it is expected to miss its latency target (`target_rejection`,
`latency_targets`), even if it would be dispatched at once.

These conditions do not apply while the queue is empty. A request with `x-queue: no-wait` never queues: it is
rejected whenever no replica has capacity for it.

`Retry-After` is the delay after which all conditions are expected to allow the request. Until then its work
is reserved (`retry_reservations`). A request that retries with a reservation has a smaller deadline margin
and precedes newcomers.

`Retry-After` has jitter, so that clients rejected together do not retry together. The jitter is a hash of the
request id, which is deterministic: the same events give the same commands.
"""

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from serve_app.core.admission.key_limits import KeyAccounts
from serve_app.core.admission.outages import Outages
from serve_app.core.admission.retry_reservations import (
    QueueLimit,
    ReservedWork,
    RetryReservations,
    fair_tokens,
)
from serve_app.core.admission.slot_rate import SlotRate
from serve_app.core.admission.spending import Spending
from serve_app.core.admission.wait_prediction import WaitPredictor
from serve_app.core.dispatch.put_backs import describe_expiry
from serve_app.core.latency_targets import LatencyTargets
from serve_app.core.queueing.fairness import FairnessMode
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.routing.pools import least_budget_tokens
from serve_app.core.settings import SchedulerSettings
from serve_app.errors import Conclusion, Outcome
from serve_app.request import PriorityClass, Request

# Reservations already separate the retries, so the jitter only needs to break ties.
_JITTER_RATIO, _MAX_JITTER_S = 0.25, 1.0
# Retry-After while the drain rate is unknown: a short delay for one client, but enough to bound the load.
_DEFAULT_RETRY_AFTER_S = 1.0
_MIN_RETRY_AFTER_S = 0.1
RETRY_AFTER_CAP_S = 60.0
"""Upper bound of `Retry-After`, in seconds; the OpenAI SDK honours up to 120 s."""
# The predicted wait plus this share must end before the deadline, because the drain rate of a saturated fleet
# varies from one half-minute to the next.
_DEADLINE_MARGIN_RATIO = 0.2
RESERVED_SHARE = 0.1
"""Share of `max_waiting` reserved for each higher class: `default` leaves one free for `interactive`, `batch`
leaves two."""


@dataclass(frozen=True, slots=True)
class QueueRejection:
    """A reason why a request may not queue, and the seconds until it may."""

    outcome: Outcome
    message: str
    admissible_in_s: float


@dataclass(frozen=True, slots=True)
class _Condition:
    """A condition that a request must meet before it may queue.

    Attributes:
        queue: the queue that is limited, with its level and its limit.
        claimed_limit: the limit for a request that claimed its reservation.
        reserved_work: work of retry reservations that counts as queued, in the unit of `queue`.
    """

    outcome: Outcome
    message: str
    queue: QueueLimit
    claimed_limit: float
    reserved_work: Callable[[ReservedWork], float]


class Admission:
    """Checks whether requests may queue."""

    def __init__(
        self,
        settings: SchedulerSettings,
        queue: RequestQueue,
        slots: SlotRate,
        targets: LatencyTargets,
        now: float,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._slots = slots
        self._targets = targets
        self._names = frozenset((settings.model, *settings.aliases))
        self.predictor = WaitPredictor(now)
        self.retry_reservations = RetryReservations()
        self.outages = Outages(
            settings.routing.pools, settings.no_replica_grace_s, now, settings.on_demand_pools
        )
        self.keys = KeyAccounts()
        self.spending = Spending(settings.price, settings.budget_per_hour)

    def arrival_rejection(
        self, request: Request, estimate: TokenEstimate, routing_rejection: Conclusion | None, now: float
    ) -> Conclusion | None:
        """Return the rejection for an unknown model, `routing_rejection`, a limit or a budget, or None."""
        if request.spec.model in self._names:
            limited = routing_rejection or self.keys.rejection(request, estimate, now)
            return limited or self.spending.rejection(now)
        names = ", ".join(sorted(self._names))
        message = f"model {request.spec.model!r} is not served here; served: {names}"
        return Conclusion(Outcome.REJECTED_UNKNOWN_MODEL, message)

    def outage_rejection(self, request: Request, pools: tuple[str, ...], now: float) -> Conclusion | None:
        """Return the rejection if none of `pools` has a live replica, or None if the request may wait."""
        outages = self.outages
        if outages.must_reject(pools, now) or (request.submission.no_wait and outages.all_down(pools)):
            return self._no_replica(request, pools, now)
        return None

    def expiry_conclusion(self, scheduled: ScheduledRequest, now: float) -> Conclusion:
        """Return the conclusion of a request whose queue timeout has ended."""
        request = scheduled.request
        if self.outages.all_down(scheduled.pools):
            return self._no_replica(request, scheduled.pools, now)
        message = describe_expiry(request, scheduled, now)
        return Conclusion(Outcome.EXPIRED, message, self._retry_after_expiry_s(scheduled, now))

    def overdue_conclusion(self, scheduled: ScheduledRequest, now: float) -> Conclusion | None:
        """Return the conclusion of a put-back request whose timeout has ended, or None before that."""
        return self.expiry_conclusion(scheduled, now) if now >= scheduled.expires_at else None

    def queue_rejection(self, scheduled: ScheduledRequest, now: float) -> QueueRejection | None:
        """Return why a request that has just arrived may not queue, or None if it may.

        Stores the predicted wait in the request and claims its retry reservation, if it has one.
        """
        self.retry_reservations.expire(now)
        claimed = self.retry_reservations.claim(scheduled.request, now)
        scheduled.claimed = claimed and self._queue.promotes_claimed
        if scheduled.target is not None:
            scheduled.target.is_promised = claimed
        tokens_ahead = self._queue.work_ahead(scheduled.request)
        if not scheduled.returned:
            scheduled.prediction = self.predictor.predict(scheduled, tokens_ahead, now)
        if scheduled.request.submission.no_wait:
            return self._no_wait(scheduled)
        if not self._queue.waiting:
            return None
        worst: QueueRejection | None = None
        for condition in self._conditions(scheduled, tokens_ahead, now):
            if claimed and condition.queue.level <= condition.claimed_limit:
                continue
            admissible_in_s = self._admissible_in_s(condition, now)
            if admissible_in_s > 0 and (worst is None or admissible_in_s > worst.admissible_in_s):
                worst = QueueRejection(condition.outcome, condition.message, admissible_in_s)
        return worst

    def target_rejection(self, scheduled: ScheduledRequest, now: float, *, waits: bool) -> Conclusion | None:
        """Return the rejection of a request that asks for it if it would miss its latency target, or None.

        Stores its expected TTFT.

        Args:
            waits: whether it has to wait for capacity.
        """
        targets, target = self._targets, scheduled.target
        assert target is not None, "it has a target"
        expected_s = targets.expect(scheduled, self.predictor.drain.tokens_per_s, waits=waits)
        limits = target.limits
        if expected_s is None or target.is_promised or not limits.refuse:
            return None
        tpot_s = None if limits.tpot_s is None else targets.expected_tpot_s(scheduled)
        is_slow = limits.tpot_s is not None and tpot_s is not None and tpot_s > limits.tpot_s
        is_probe = is_slow and targets.is_pace_probe(scheduled, now)
        if is_slow and not is_probe:
            text = f"about {1e3 * (tpot_s or 0.0):.0f} ms per output token are expected"
            return self._refuse(scheduled, f"{text}, and the target is {_limit(limits.tpot_s)}", now)
        longest_s = targets.longest_expected_s(scheduled)
        if longest_s is None:
            return None
        queue = QueueLimit(target.wait_s, 1.0, longest_s - (expected_s - target.wait_s))
        reserved = self._reserved_seconds(scheduled) if waits else _nothing
        admissible_in_s = self.retry_reservations.admissible_in_s(queue, reserved, now)
        if is_probe or admissible_in_s <= 0 or targets.is_probe(scheduled, now):
            return None
        limit = _limit(limits.ttft_s)
        text = f"the first token is expected after {1e3 * expected_s:,.0f} ms"
        text = f"{text}, and the chance to miss the target of {limit} is {target.chance:.0%}"
        if targets.least_s(scheduled) > longest_s:
            text = f"{text}, even on an idle replica: raise the target, or omit x-slo"
            return Conclusion(Outcome.REJECTED_DEADLINE_UNMEETABLE, text)
        return self._refuse(scheduled, text, now, admissible_in_s)

    def _refuse(
        self, scheduled: ScheduledRequest, text: str, now: float, admissible_in_s: float = math.inf
    ) -> Conclusion:
        text = f"{text}: retry after the delay in Retry-After, raise the target, or omit x-slo"
        rejection = QueueRejection(Outcome.REJECTED_DEADLINE_UNMEETABLE, text, admissible_in_s)
        return self.reject_queueing(scheduled, rejection, now)

    def reject_queueing(
        self, scheduled: ScheduledRequest, rejection: QueueRejection, now: float
    ) -> Conclusion:
        """Reject a request that may not queue, and reserve its work for the time of its retry."""
        request = scheduled.request
        retry_after_s = self._retry_after_s(request, rejection.admissible_in_s)
        # A wait that is unknown or above the cap of Retry-After gets no reservation.
        if rejection.admissible_in_s <= RETRY_AFTER_CAP_S and not request.submission.no_wait:
            self.retry_reservations.reserve(request, scheduled.estimate.expected_tokens, retry_after_s, now)
        return Conclusion(rejection.outcome, rejection.message, retry_after_s)

    def _retry_after_expiry_s(self, scheduled: ScheduledRequest, now: float) -> float:
        """Return the seconds after which an expired request should retry, and reserve its work for then."""
        self.predictor.on_expiry(scheduled, now)
        tokens_ahead = self._queue.work_ahead(scheduled.request)
        conditions = self._conditions(scheduled, tokens_ahead, now, has_expired=True)
        admissible_in_s = max((self._admissible_in_s(each, now) for each in conditions), default=0.0)
        rejection = QueueRejection(Outcome.EXPIRED, "", admissible_in_s)
        return self.reject_queueing(scheduled, rejection, now).retry_after_s or 0.0

    def _no_replica(self, request: Request, pools: tuple[str, ...], now: float) -> Conclusion:
        retry_after_s = self._retry_after_s(request, self.outages.expected_remaining_s(pools, now))
        message = self.outages.describe(self._settings.model, pools, now)
        return Conclusion(Outcome.REJECTED_NO_REPLICA, message, retry_after_s)

    # The conditions

    def _admissible_in_s(self, condition: _Condition, now: float) -> float:
        return self.retry_reservations.admissible_in_s(condition.queue, condition.reserved_work, now)

    def _conditions(
        self, scheduled: ScheduledRequest, tokens_ahead: int, now: float, *, has_expired: bool = False
    ) -> Iterator[_Condition]:
        yield from self._deadline(scheduled, tokens_ahead, now, has_expired=has_expired)
        yield from self._queue_length(scheduled)

    def _deadline(
        self, scheduled: ScheduledRequest, tokens_ahead: int, now: float, *, has_expired: bool
    ) -> Iterator[_Condition]:
        request, prediction = scheduled.request, scheduled.prediction
        timeout_s = request.expires_at - request.arrived_at
        if timeout_s == math.inf:
            return
        if self.predictor.is_cold:
            # Other reservations need the exact condition, even if the deadline is met.
            lenient = not has_expired and not len(self.retry_reservations)
            bound = self._cold_deadline(scheduled, tokens_ahead, timeout_s, only_if_missed=lenient)
            if bound is not None:
                yield bound
                if has_expired:
                    # A prediction from the first backlog is no better, and expired requests have biased it.
                    return
        if prediction is None:
            return
        per_token_s = self.predictor.seconds_per_token(prediction.kind, tokens_ahead)
        if per_token_s is None or not self.predictor.is_trusted(prediction.kind, now):
            return
        tokens = self._reserved_tokens(scheduled)
        ahead_s = per_token_s * tokens_ahead
        yield _Condition(
            Outcome.REJECTED_DEADLINE_UNMEETABLE,
            _unmeetable(ahead_s, timeout_s),
            QueueLimit(ahead_s, 1.0, timeout_s / (1 + _DEADLINE_MARGIN_RATIO)),
            timeout_s / (1 + _DEADLINE_MARGIN_RATIO / 2),
            lambda reserved: per_token_s * tokens(reserved),
        )

    def _cold_deadline(
        self, scheduled: ScheduledRequest, tokens_ahead: int, timeout_s: float, *, only_if_missed: bool
    ) -> _Condition | None:
        """Return the deadline condition from the slots alone, or None if they set none.

        It has no margin, because it is a lower bound of the wait.

        Args:
            only_if_missed: return None if a quick check shows that the deadline is met.
        """
        if only_if_missed and self._slots.certainly_drains(scheduled.pools, tokens_ahead, timeout_s):
            return None
        drain = self._slots.drain(scheduled.pools, tokens_ahead)
        if drain is None:
            return None
        limit = timeout_s * drain.tokens_per_s + drain.free_tokens
        return _Condition(
            Outcome.REJECTED_DEADLINE_UNMEETABLE,
            _unmeetable((drain.tokens_ahead - drain.free_tokens) / drain.tokens_per_s, timeout_s),
            QueueLimit(drain.tokens_ahead, drain.tokens_per_s, limit),
            limit,
            self._reserved_tokens(scheduled),
        )

    def _queue_length(self, scheduled: ScheduledRequest) -> Iterator[_Condition]:
        request, settings = scheduled.request, self._settings
        waiting = self._queue.waiting
        per_s = self.predictor.drain.requests_per_s
        reserved = RESERVED_SHARE * request.priority.rank
        class_limit = math.ceil(settings.max_waiting * (1 - reserved))
        yield _Condition(
            Outcome.REJECTED_QUEUE_FULL,
            f"the queue of {settings.model} is full: {waiting} requests are queued",
            QueueLimit(waiting, per_s, class_limit - 1),
            settings.max_waiting - 1,
            lambda reserved: float(reserved.count) if reserved.rank <= request.priority.rank else 0.0,
        )
        yield from self._queue_length_of_key(request, per_s / waiting if waiting else 0.0)
        yield from self._queue_length_of_tenant(request, class_limit - waiting, per_s)

    def _queue_length_of_tenant(self, request: Request, free: int, per_s: float) -> Iterator[_Condition]:
        """Yield the tenant's limit if it is reached.

        A tenant may queue `multiple` times the number of requests that the queue still accepts, `free`. Each
        request that leaves increases `free` by one, whosever it is.

        Args:
            per_s: drain rate of the queue, in requests.
        """
        share, waiting = self._settings.admission.tenant_share, self._queue.waiting
        if share == 1 or not waiting:
            return
        multiple = share / (1 - share)
        if waiting + 1 <= multiple * free:
            return
        own = self._waiting_of(request.tenant)
        # Requests of the tenant that must leave, if only its own do.
        excess = (own + 1 - multiple * free) / (1 + multiple)
        if excess > 0:
            yield _Condition(
                Outcome.REJECTED_QUEUE_FULL,
                f"{own} requests of this tenant are queued, and the rest of the queue is for other tenants",
                QueueLimit(own, per_s * (own / waiting + multiple) / (1 + multiple), own - excess),
                self._settings.max_waiting - 1,
                lambda reserved: float(reserved.count) if reserved.tenant == request.tenant else 0.0,
            )

    def _queue_length_of_key(self, request: Request, share_per_s: float) -> Iterator[_Condition]:
        """Yield the key's limit on queued requests; `share_per_s` is the drain rate per queued request."""
        key = request.submission.key
        if key is None or key.limits.queued is None:
            return
        own, limit = self._queue.waiting_by_key[key.key_id], key.limits.queued
        yield _Condition(
            Outcome.REJECTED_RATE_LIMITED,
            f"this API key has a limit of {limit:,} queued requests, and {own:,} are queued",
            QueueLimit(own, share_per_s * own, limit - 1),
            limit - 1,
            lambda _: 0.0,
        )

    def _reserved_tokens(self, scheduled: ScheduledRequest) -> Callable[[ReservedWork], float]:
        """Return a function for the tokens of retry reservations that are ahead of this request.

        It corresponds to `RequestQueue.work_ahead` for queued requests.
        """
        request = scheduled.request
        if self._settings.fairness.mode is FairnessMode.OFF:
            rank = request.priority.rank
            return lambda reserved: float(reserved.tokens) if reserved.rank <= rank else 0.0
        own = self._queue.waiting_of(request.priority, request.tenant)
        mean_tokens = self._queue.waiting_tokens / max(1, len(self._queue))
        return fair_tokens(request, scheduled.estimate.expected_tokens + own * mean_tokens)

    def _reserved_seconds(self, scheduled: ScheduledRequest) -> Callable[[ReservedWork], float]:
        """Return a function for the wait that retry reservations add to that of this request."""
        prediction = scheduled.prediction
        if prediction is None:
            return _nothing
        per_token_s = self.predictor.seconds_per_token(prediction.kind, 0) or 0.0
        tokens = self._reserved_tokens(scheduled)
        return lambda reserved: per_token_s * tokens(reserved)

    def _waiting_of(self, tenant: str) -> int:
        return sum(self._queue.waiting_of(priority, tenant) for priority in PriorityClass)

    def _no_wait(self, scheduled: ScheduledRequest) -> QueueRejection:
        prediction = scheduled.prediction
        wait_s = prediction.wait_s if prediction else 0.0
        message = "no replica can accept the request now, and it was sent with x-queue: no-wait"
        return QueueRejection(Outcome.REJECTED_QUEUE_FULL, message, wait_s)

    def _retry_after_s(self, request: Request, admissible_in_s: float) -> float:
        """Return the `Retry-After` in seconds: the delay plus jitter, at most the cap."""
        wait_s = (
            _DEFAULT_RETRY_AFTER_S
            if admissible_in_s == math.inf
            else max(admissible_in_s, _MIN_RETRY_AFTER_S)
        )
        jitter = zlib.crc32(request.request_id.encode()) / 2**32
        return min(RETRY_AFTER_CAP_S, wait_s + jitter * min(_JITTER_RATIO * wait_s, _MAX_JITTER_S))


def _nothing(_: ReservedWork) -> float:
    return 0.0


def _limit(seconds: float | None) -> str:
    """Return a latency limit as clients state it, in milliseconds."""
    return f"{1e3 * (seconds or 0.0):,.9g} ms"


def _unmeetable(ahead_s: float, timeout_s: float) -> str:
    return (
        f"about {ahead_s:.1f} s of work are ahead, and the queue timeout is {timeout_s:.1f} s: "
        "retry after the delay in Retry-After, or raise x-queue-timeout-s"
    )


def too_long(request: Request, estimate: TokenEstimate, limit: int | None) -> Conclusion:
    """Return the rejection of a request that exceeds `limit`, the longest context of any pool in tokens."""
    least, output = least_budget_tokens(request, estimate), request.spec.max_output_tokens or 0
    return Conclusion(
        Outcome.REJECTED_TOO_LONG,
        # The first sentence is OpenAI's: client libraries parse its number.
        f"This model's maximum context length is {limit} tokens. The prompt is estimated at "
        f"{estimate.expected_prompt_tokens:,} tokens, and the requested output is {output:,}; by the lowest "
        f"estimate the request needs {least:,}. Shorten the prompt or lower max_tokens.",
    )
