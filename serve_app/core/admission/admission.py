"""Admission: decides which requests may queue, and when a rejected one should retry.

- `Admission`: the conditions for each request, and its `Retry-After`.
- `Outages`: pools without a live replica, and the expected duration of each outage.
- `RetryReservations`: work of rejected requests, reserved for the time at which each client should retry.
- `QueueLimit`: the time at which a limit of the queue allows a request.

A request is rejected on arrival if its model is not served here, a limit of its API key is reached
(`arrival_rejection`, `key_limits`), the model's budget is used up (`key_limits`), or no replica that could
serve it is alive (`outage_rejection`, `Outages`). A request that fits a replica is dispatched immediately,
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
is reserved (`RetryReservations`). A request that retries with a reservation has a smaller deadline margin and
precedes newcomers.

`Retry-After` has jitter, so that clients rejected together do not retry together. The jitter is a hash of the
request id, which is deterministic: the same events give the same commands.

`Outages`. A replica is alive while it is connected, reports its load and does not drain. During an outage a
request waits for a grace period, which covers replicas that reconnect or report late. After that it is
rejected, whether it has just arrived or has waited. An engine takes from seconds to many minutes to start, so
the client may prefer to fail over or to retry later.

The expected remaining time of an outage is the mean length of earlier ones, less its age. The first outage is
the start of the application, so the start time of an engine is known from then on. An outage that is older
than expected, and the first one, is expected to last as long again as it has lasted. Outages shorter than the
grace period say nothing about the start of an engine, and are not counted.

A pool that scales from zero *on demand* has no replica because none was needed. A request waits for its
engine to start until its own queue timeout.

`RetryReservations`. Reserved work counts as ahead of newcomers. Requests rejected later therefore get later
times, and newcomers do not use the capacity that was promised. In effect all clients share one queue, of
which the scheduler stores only the front.

A request that retries is recognised by its tenant, its class and the shape of its prompt (`_key`). It claims
its reservation, so its work does not count twice. Reservations that are not claimed in time expire. Because
clients that never retry would delay all others, reserved work is weighted by the recent claim rate. Of
another tenant, it counts for as much as the own tenant has queued, so that no tenant fills the queue with
retries.

`QueueLimit`. A limit is modelled as a fluid queue: a level, a limit, one drain rate, and inflow at the times
of the reservations (`admissible_in_s`).

Source: ours; virtual queues as in telephone call-back systems, and the textbook fluid queue.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from serve_app.core.admission.key_limits import KeyAccounts, Spending
from serve_app.core.admission.wait_prediction import SlotRate, WaitPredictor
from serve_app.core.dispatch.in_flight import describe_expiry
from serve_app.core.latency_targets import LatencyTargets
from serve_app.core.queueing.fairness import FairnessMode
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.routing.pools import least_budget_tokens
from serve_app.core.settings import SchedulerSettings
from serve_app.errors import Conclusion, Outcome
from serve_app.request import PriorityClass, PromptShape, Request

# Engines do not start in less time.
_MIN_S = 2.0
# Weight of one outage in the mean of their lengths.
_WEIGHT = 0.5


class Outages:
    """The pools of one model that have no live replica.

    Args:
        pools: all pools of the model; each starts without a replica.
        grace_s: how long a request may wait for a pool without a replica, in seconds.
        on_demand: pools that get their first replica when a request waits for them.

    Attributes:
        changes: number of starts and ends of outages so far.
    """

    def __init__(
        self, pools: Iterable[str], grace_s: float, now: float, on_demand: Iterable[str] = ()
    ) -> None:
        self._pools = tuple(pools)
        self._on_demand = frozenset(on_demand)
        self._grace_s = grace_s
        self._since = dict.fromkeys(self._pools, now)
        # Time at which the grace period of a pool ends; removed once its requests have been rejected.
        self._ends_at = dict.fromkeys(self._pools, now + grace_s)
        self._mean_s: float | None = None
        self.changes = 0

    def observe(self, has_alive: Callable[[str], bool], now: float) -> None:
        """Update which pools have a live replica."""
        for pool in self._pools:
            since = self._since.get(pool)
            if has_alive(pool):
                if since is not None:
                    self.changes += 1
                    self._end(pool, now - since)
            elif since is None:
                self.changes += 1
                self._since[pool] = now
                self._ends_at[pool] = now + self._grace_s

    def all_down(self, pools: Iterable[str]) -> bool:
        """Return whether none of these pools has a live replica."""
        return all(pool in self._since for pool in pools)

    def must_reject(self, pools: Sequence[str], now: float) -> bool:
        """Return whether all pools have been down for the grace period and none starts on demand."""
        if (pools and not self._since) or not self._on_demand.isdisjoint(pools):
            return False
        return all(now >= self._since.get(pool, math.inf) + self._grace_s for pool in pools)

    def next_at(self) -> float | None:
        """Return the next end of a grace period, or None if no outage is within its grace period."""
        return min(self._ends_at.values()) if self._ends_at else None

    def pop_due(self, now: float) -> bool:
        """Return whether the grace period of a pool has ended since the last call."""
        if not self._ends_at:
            return False
        due = [pool for pool, ends_at in self._ends_at.items() if ends_at <= now]
        for pool in due:
            del self._ends_at[pool]
        return bool(due)

    def age_s(self, pools: Iterable[str], now: float) -> float:
        """Return the seconds since the last of these pools lost its last replica."""
        return now - max(self._since.get(pool, now) for pool in pools)

    def expected_remaining_s(self, pools: Iterable[str], now: float) -> float:
        """Return the expected seconds until one of these pools has a live replica again."""
        return min(self._expected_remaining_s(now - self._since.get(pool, now)) for pool in pools)

    def describe(self, model: str, pools: Iterable[str], now: float) -> str:
        """Return a description of the outage for a client."""
        suitable = "" if self.all_down(self._pools) else " that can serve this request"
        return (
            f"{model} has had no live replica{suitable} for {self.age_s(pools, now):.1f} s: its engines are "
            "starting or being replaced; retry after the delay in Retry-After"
        )

    def _expected_remaining_s(self, age_s: float) -> float:
        mean_s = self._mean_s or 0.0
        return max(mean_s - age_s if age_s < mean_s else age_s, _MIN_S)

    def _end(self, pool: str, lasted_s: float) -> None:
        del self._since[pool]
        self._ends_at.pop(pool, None)
        if lasted_s > self._grace_s:
            mean_s = lasted_s if self._mean_s is None else self._mean_s
            self._mean_s = mean_s + _WEIGHT * (lasted_s - mean_s)

    def __repr__(self) -> str:
        return f"<Outages {sorted(self._since)} mean={self._mean_s}>"


# Resolution of the due times, in seconds.
_SLOT_S = 0.5
# Reserved work counts for more than its estimate, so that reservations alone do not reach the limit. Errors
# of the estimate then delay newcomers instead of clients with a reservation.
_RESERVATION_WEIGHT = 1.25
# Minimum share of Retry-After before a claim. Without it, the later requests of a burst of similar ones would
# claim the reservations of the earlier ones.
_MIN_WAIT_SHARE = 0.5
# Weight of one reservation in the claim rate: an average over about the last thirty.
_CLAIM_WEIGHT = 1 / 32

_Key = tuple[str, int, PromptShape, int | None, int, tuple[int, ...]]
_Group = tuple[int, str]
# How early a reservation can be claimed. Clients that round Retry-After to whole seconds retry up to a second
# late, never early.
_EARLY_S = 0.25
# How long an unclaimed reservation is valid after it is due.
_GRACE_S = 3.0
# Bound on memory, about 0.5 KB each; twice the default of `max_waiting`.
_MAX_RESERVATIONS = 4_000


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """A queue modelled as a fluid, and its limit.

    Attributes:
        level: current content, in any unit.
        drain_per_s: content that leaves per second.
        limit: maximum content at which one more request may join.
    """

    level: float
    drain_per_s: float
    limit: float


@dataclass(slots=True, eq=False, kw_only=True)
class _RetryReservation:
    """The expected retry of one request."""

    key: _Key
    due_at: float
    claimable_at: float
    rank: int
    tenant: str
    tokens: int


@dataclass(slots=True)
class ReservedWork:
    """The reservations of one tenant and class that are due in the same time slot."""

    rank: int
    tenant: str
    count: int = 0
    tokens: int = 0


class RetryReservations:
    """The expected retries of rejected requests; `claim_rate` is the share recently claimed."""

    def __init__(self) -> None:
        self._by_key: dict[_Key, list[_RetryReservation]] = {}
        self._slots: dict[int, dict[_Group, ReservedWork]] = {}
        self._in_slot: dict[int, list[_RetryReservation]] = {}
        self._count = 0
        self.claim_rate = 1.0

    def __len__(self) -> int:
        return self._count

    def reserve(self, request: Request, tokens: int, after_s: float, now: float) -> bool:
        """Reserve work for a retry in `after_s` seconds. Return False at the maximum of reservations."""
        if self._count >= _MAX_RESERVATIONS:
            return False
        due_at = now + after_s
        reservation = _RetryReservation(
            key=_key(request),
            due_at=due_at,
            claimable_at=max(due_at - _EARLY_S, now + _MIN_WAIT_SHARE * after_s),
            rank=request.priority.rank,
            tenant=request.tenant,
            tokens=tokens,
        )
        slot = _slot(due_at)
        self._by_key.setdefault(reservation.key, []).append(reservation)
        self._in_slot.setdefault(slot, []).append(reservation)
        groups = self._slots.setdefault(slot, {})
        group = groups.setdefault(
            (reservation.rank, reservation.tenant), ReservedWork(reservation.rank, reservation.tenant)
        )
        group.count += 1
        group.tokens += tokens
        self._count += 1
        return True

    def claim(self, request: Request, now: float) -> bool:
        """Claim a due reservation of a request that retries. Return whether there was one."""
        if not self._count:
            return False
        due = [each for each in self._by_key.get(_key(request), ()) if each.claimable_at <= now]
        if not due:
            return False
        reservation = min(due, key=lambda each: each.due_at)
        self._in_slot[_slot(reservation.due_at)].remove(reservation)
        self._remove(reservation)
        self.claim_rate += _CLAIM_WEIGHT * (1.0 - self.claim_rate)
        return True

    def expire(self, now: float) -> None:
        """Remove the reservations that were not claimed in time."""
        if not self._in_slot:
            return
        last = _slot(now - _GRACE_S) - 1
        for slot in [slot for slot in self._in_slot if slot <= last]:
            for reservation in self._in_slot[slot]:
                self._remove(reservation)
                self.claim_rate -= _CLAIM_WEIGHT * self.claim_rate
            del self._in_slot[slot]

    def admissible_in_s(
        self, queue: QueueLimit, work_of: Callable[[ReservedWork], float], now: float
    ) -> float:
        """Return the seconds until one more request may join without breaking the limit for reserved ones.

        Args:
            work_of: returns how much reserved work adds to the queue, in its unit. It is called in the order
                of due times.

        Returns:
            0.0 if it may join now. Infinity if the queue is above its limit and does not drain.
        """
        level, at_s = queue.level, 0.0
        admissible_in_s, weight = _until_limit_s(level, queue), _RESERVATION_WEIGHT
        for slot in sorted(self._slots):
            due_s = max(0.0, slot * _SLOT_S - now)
            level = max(0.0, level - queue.drain_per_s * (due_s - at_s))
            at_s, joins = due_s, False
            # This loop dominates the cost of a rejection if many tenants are rejected.
            for reserved in self._slots[slot].values():
                work = work_of(reserved) * self.claim_rate * weight
                if work > 0:
                    level, joins = level + work, True
            if joins and level > queue.limit:
                admissible_in_s = at_s + _until_limit_s(level, queue)
        return admissible_in_s

    def _remove(self, reservation: _RetryReservation) -> None:
        same = self._by_key[reservation.key]
        same.remove(reservation)
        if not same:
            del self._by_key[reservation.key]
        groups = self._slots[_slot(reservation.due_at)]
        group = groups[reservation.rank, reservation.tenant]
        group.count -= 1
        group.tokens -= reservation.tokens
        if not group.count:
            del groups[reservation.rank, reservation.tenant]
        if not groups:
            del self._slots[_slot(reservation.due_at)]
        self._count -= 1

    def __repr__(self) -> str:
        return f"<RetryReservations {self._count}, claim rate {self.claim_rate:.0%}>"


def fair_work(
    request: Request, own: float, amount: Callable[[ReservedWork], float]
) -> Callable[[ReservedWork], float]:
    """Return a function for the reserved work that is ahead of `request` under fair shares.

    All work of higher classes and of the same tenant is ahead. Of each other tenant of its class, at most as
    much as its own tenant has is ahead.

    Args:
        own: work that its tenant has queued, this request included.
        amount: work of a group of reservations, in tokens or requests.
    """
    rank, tenant = request.priority.rank, request.tenant
    counted: dict[str, float] = {}

    def work_of(reserved: ReservedWork) -> float:
        nonlocal own
        if reserved.rank > rank:
            return 0.0
        work = amount(reserved)
        if reserved.rank < rank:
            return work
        if reserved.tenant == tenant:
            own += work
            return work
        before = counted.get(reserved.tenant, 0.0)
        if before >= own:
            # Fair shares serve the other tenant no more than this one, whatever else is reserved.
            return 0.0
        after = counted[reserved.tenant] = min(before + work, own)
        return after - before

    return work_of


def _until_limit_s(level: float, queue: QueueLimit) -> float:
    """Return the seconds until a level has drained to the limit if nothing joins."""
    if level <= queue.limit:
        return 0.0
    return (level - queue.limit) / queue.drain_per_s if queue.drain_per_s > 0 else math.inf


def _slot(at: float) -> int:
    return math.floor(at / _SLOT_S)


def _key(request: Request) -> _Key:
    """Return what identifies a request that retries; its request id is new."""
    return (
        request.tenant,
        request.priority.rank,
        request.shape,
        request.spec.max_output_tokens,
        request.spec.choices,
        request.submission.prefix,
    )


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
        if self.outages.all_down(scheduled.pools):
            return self._no_replica(scheduled.request, scheduled.pools, now)
        message = describe_expiry(scheduled, now)
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
        # A policy in order of arrival does not need precedence, because no later request passes them.
        scheduled.claimed = claimed and self._queue.policy.promotes
        if scheduled.target is not None:
            scheduled.target.is_promised = claimed
        tokens_ahead = self._tokens_ahead(scheduled.request)
        if not scheduled.attempts.returned:
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
        tokens_ahead = self._tokens_ahead(scheduled.request)
        conditions = self._conditions(scheduled, tokens_ahead, now, has_expired=True)
        admissible_in_s = max((self._admissible_in_s(each, now) for each in conditions), default=0.0)
        rejection = QueueRejection(Outcome.EXPIRED, "", admissible_in_s)
        return self.reject_queueing(scheduled, rejection, now).retry_after_s or 0.0

    def _no_replica(self, request: Request, pools: tuple[str, ...], now: float) -> Conclusion:
        retry_after_s = self._retry_after_s(request, self.outages.expected_remaining_s(pools, now))
        message = self.outages.describe(self._settings.model, pools, now)
        return Conclusion(Outcome.REJECTED_NO_REPLICA, message, retry_after_s)

    # The conditions

    def _tokens_ahead(self, request: Request) -> int:
        """Return the tokens served before a request; a floor bounds them."""
        ahead, queue = self._queue.work_ahead(request), self._queue
        tokens_per_s, tenant = self.predictor.drain.tokens_per_s, request.tenant
        if queue.floors.of_tenant(tenant) is None or not tokens_per_s > 0:
            return ahead
        return min(ahead, round(tokens_per_s * queue.floors.seconds_to(tenant, queue.service_of(tenant))))

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
            self._reserved(request, self._queue.waiting_of(request.priority, request.tenant) + 1, _places),
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
        own = self._queue.waiting_of(scheduled.request.priority, scheduled.request.tenant)
        mean_tokens = self._queue.waiting_tokens / max(1, len(self._queue))
        return self._reserved(
            scheduled.request, scheduled.estimate.expected_tokens + own * mean_tokens, _tokens
        )

    def _reserved(
        self, request: Request, own: float, amount: Callable[[ReservedWork], float]
    ) -> Callable[[ReservedWork], float]:
        """Return a function for the reserved work that is ahead of a request; see `fair_work`."""
        if self._settings.fairness.mode is FairnessMode.OFF:
            rank = request.priority.rank
            return lambda reserved: amount(reserved) if reserved.rank <= rank else 0.0
        return fair_work(request, own, amount)

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


def _places(reserved: ReservedWork) -> float:
    return float(reserved.count)


def _tokens(reserved: ReservedWork) -> float:
    return float(reserved.tokens)


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
