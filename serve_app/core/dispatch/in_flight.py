"""Requests in flight: what they hold, and what their failures change.

- `InFlight`: the capacity that requests hold from dispatch to end, and the learning from their answers.
- `record_put_back`: the put-back of a request before its client received a byte, or that can be continued.
- `Suspensions`: replicas that receive no requests for a while, because they lose or reject them.
- `SlowStarts`: requests whose first token is overdue, which are moved to another replica.

Rules of put-backs:

- One budget: `max_put_backs` bounds the put-backs of a request across schedulers, for all reasons except
  revocations.
- One deadline: its queue timeout counts from its arrival, and begins again only if the replica has served a
  part of the request.
- Backoff: the first retry is immediate, because most faults affect only one replica. Each further backoff
  is twice as long as the one before. A request in backoff is queued, but in no sub-queue.
- Failover: it goes to a replica on which it has not failed, as long as one is usable.
- Quarantine: a request under which an engine was lost may be the cause. No replica has two of these until
  an answer starts. So a request that loses a second engine, alone among suspects, fails with `max_attempts`
  of 2.
- Position: a request goes to the front after a fault of its replica, or if it was too long for it, because it
  had been dispatched in time. One with another error of the engine does not: otherwise a tenant's failing
  requests would pass the others' good ones.

`Suspensions`. A failure may be the fault of the replica or of the request. If every failure suspended a
replica, one client with failing requests could stop a fleet. If none did, a broken replica would attract
requests, because it fails fast and so looks idle. Failures count against a replica as follows:

| the request                                | counts                                                    |
|--------------------------------------------|-----------------------------------------------------------|
| could not be sent, or its connection broke | immediately: no request should cause that                 |
| found the engine busy                      | the third time in a row without a success in between      |
| got an error of the engine                 | the same, and only once another replica has served it     |
| stated when to come back (`Retry-After`)   | it receives nothing before, for at most 20 s              |

A busy engine that does not report its load may have reached a limit. Its first rejection therefore becomes a
learned limit (`observed`), and only rejections within that limit count.

A suspended replica receives nothing until its next report. Each further suspension doubles that time, until
the replica starts an answer again. At most half of a pool's live replicas are suspended at once (at least
one may be), so that neither hostile requests nor a gateway cut off from its replicas can stop a fleet; pauses
that the servers ask for do not count. Dead replicas are detected by their connection to the scheduler, not
here.

`SlowStarts`. A server can hang on answers although it accepts requests and passes health checks. A request
whose first token takes `_FACTOR` times as long as the slowest of the recent ones on its replica, and at least
`_LEAST_WAIT_S`, is revoked there and dispatched elsewhere, if another replica of its pools accepts it now. It
is moved rather than doubled, so that no engine works for two answers, and nothing is answered or charged
twice.

- A replica that reports its queue shows whether it computes. Its requests are moved only if it has given no
  sign of life since their dispatch.
- A request is moved once. Moves are at most `_SHARE` of all dispatches, except for a few at the beginning.
- A replica without any sign of life since the dispatch counts as hung (`observed`) and
  receives no further requests until it answers.
"""

import heapq
import itertools
import zlib
from dataclasses import replace

from serve_app.core.accounting.costs import EngineTime
from serve_app.core.accounting.waits import wait_breakdown
from serve_app.core.dispatch.backfill import Backfill, TenantHeadroom
from serve_app.core.dispatch.promotion import EnginePriorities
from serve_app.core.events import DispatchFailed, DispatchFailure
from serve_app.core.isolation import PrefillTracker
from serve_app.core.request import Attempts, ScheduledRequest
from serve_app.core.routing.ledger import CapacityQuery, ReplicaLedger
from serve_app.core.routing.observed import AnswerStart
from serve_app.core.routing.replica_state import KvUse, PrefillClass, ReplicaState, Running
from serve_app.core.settings import SchedulerSettings
from serve_app.errors import Conclusion, Outcome
from serve_app.request import Usage

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 30.0
# Jitter of the backoff, so that requests that failed together are not retried together.
_JITTER_RATIO = 0.25
REPLICA_FAULTS = frozenset({DispatchFailure.UNREACHABLE, DispatchFailure.LOST})
"""Failures that no request should cause."""


def record_put_back(
    scheduled: ScheduledRequest, event: DispatchFailed, replica: ReplicaState, now: float
) -> None:
    """Record a put-back in the state of the request."""
    before, replica_id = scheduled.attempts, event.replica_id
    if event.failure.is_after_service(event.generated_tokens):
        # It did not wait in this time, so its queue timeout begins again.
        request = scheduled.request
        scheduled.expires_at = now + request.expires_at - request.arrived_at
    if event.failure is DispatchFailure.REVOKED:
        # A request that was moved precedes those that were never dispatched.
        was_moved = before.moved_from == replica_id
        avoided = before.avoided | {replica_id} if was_moved else before.avoided
        scheduled.attempts = replace(before, returned=was_moved, avoided=avoided)
        return
    put_backs, text = before.put_backs + 1, event.message or str(event.failure)
    after = replace(before, put_backs=put_backs, last_failure=text)
    if event.failure is DispatchFailure.TOO_LONG:
        # The replica is healthy, and the request goes to pools with a longer context.
        above_tokens = max(before.above_tokens, replica.context_limit)
        scheduled.attempts = replace(after, returned=True, above_tokens=above_tokens)
        return
    backoff_s = _backoff_s(scheduled.request.request_id, put_backs - 1)
    scheduled.attempts = replace(
        after,
        returned=event.failure in REPLICA_FAULTS,
        losses=before.losses + (event.failure is DispatchFailure.LOST),
        avoided=before.avoided | {replica_id},
        failed_on=replica_id if event.failure is DispatchFailure.ENGINE_ERROR else before.failed_on,
        backoff_until=now + backoff_s if backoff_s else 0.0,
    )


def restore_put_backs(scheduled: ScheduledRequest, settings: SchedulerSettings) -> None:
    """Restore the put-backs of a request that an earlier scheduler had dispatched."""
    request = scheduled.request
    if request.attempts or request.lost:
        scheduled.attempts = Attempts(
            put_backs=min(request.attempts, settings.max_put_backs - 1),
            returned=request.attempts > 0,
            losses=min(int(request.lost), settings.max_attempts - 1),
        )


def retry_limit_conclusion(
    scheduled: ScheduledRequest, settings: SchedulerSettings, *, many_lost: bool
) -> Conclusion | None:
    """Return the failure of a request that may not be retried, or None if it may.

    Args:
        many_lost: whether several replicas were lost at the same time, so that the request is hardly the
            cause: then it gets one more attempt.
    """
    attempts = scheduled.attempts
    failure = attempts.last_failure
    if attempts.losses >= settings.max_attempts + many_lost:
        message = f"{attempts.losses} replicas were lost under this request; last failure: {failure}"
    elif attempts.put_backs >= settings.max_put_backs:
        message = f"the request was put back {attempts.put_backs} times; last failure: {failure}"
    else:
        return None
    return Conclusion(Outcome.FAILED, message)


def describe_expiry(scheduled: ScheduledRequest, now: float) -> str:
    """Describe an expired request for its client: its wait, the main cause and its put-backs."""
    text = f"the queue timeout of the request ended after {now - scheduled.request.arrived_at:.1f} s"
    attempts = scheduled.attempts
    if not attempts.put_backs:
        waited = wait_breakdown(scheduled, now)
        cause = waited.main_cause if waited is not None else None
        return text if cause is None else f"{text}; main cause: {cause.meaning}"
    text = f"{text}; it was put back {attempts.put_backs} times"
    return f"{text}; last failure: {attempts.last_failure}" if attempts.last_failure else text


def _backoff_s(request_id: str, tries: int) -> float:
    """Return the pause before another attempt, in seconds, after so many retries without one."""
    if tries < 1:
        return 0.0
    jitter = zlib.crc32(f"{request_id} {tries}".encode()) / 2**32
    usual_s: float = min(_FIRST_BACKOFF_S * 2.0 ** min(tries - 1, 20), _MAX_BACKOFF_S)
    return usual_s * (1 + _JITTER_RATIO * jitter)


# Fewer may coincide by chance; each costs its request one more dispatch.
_FAULTS = 3
# The first is about the interval of reports. The longest is the maximum idle time of a recovered replica.
_FIRST_SUSPENSION_S, _MAX_SUSPENSION_S = 0.1, 10.0
# Longest pause that an engine can ask for: a request that exceeds a provider's limit must not close it.
_MAX_PAUSE_S = 20.0
_MAX_SHARE = 0.5
# Replicas that one request can hardly have ended: it is tried on two, one after the other.
_MANY, _COINCIDENCE_S = 3, 10.0


class Suspensions:
    """Suspends replicas in the ledger. All state is in `ReplicaState`."""

    def __init__(self, ledger: ReplicaLedger) -> None:
        self._ledger = ledger
        # Time of the last loss of each replica, for those of the last seconds.
        self._lost_at: dict[str, float] = {}

    def many_lost(self, now: float) -> bool:
        """Return whether several replicas were lost within seconds, as when a node or a rack fails."""
        self._lost_at = {name: at for name, at in self._lost_at.items() if at > now - _COINCIDENCE_S}
        return len(self._lost_at) >= _MANY

    def on_failure(self, event: DispatchFailed, sent_at: float, now: float) -> None:
        """Count a failure against the replica that put back a request, and has released it."""
        state = self._ledger.get(event.replica_id)
        if event.failure is DispatchFailure.LOST:
            self._lost_at[event.replica_id] = now
        if state is None:
            return
        if event.failure in REPLICA_FAULTS:
            self._suspend(state, now)
        elif event.failure is DispatchFailure.BUSY:
            limit = state.learned_limit
            if limit is not None and limit.on_rejection(state.in_flight, sent_at, now):
                self._ledger.open.update(state)
            elif event.retry_after_s is not None:
                until = now + min(event.retry_after_s, _MAX_PAUSE_S)
                self._ledger.suspend(state, max(until, state.suspension.until))
            else:
                self._count_fault(state, now)

    def on_success(self, scheduled: ScheduledRequest, state: ReplicaState, now: float) -> None:
        """Clear the faults of a replica that answers. Count one for the replica that failed the request."""
        state.suspension.faults = state.suspension.count = 0
        failed_on = scheduled.attempts.failed_on
        if failed_on is None:
            return
        failed = self._ledger.get(failed_on)
        scheduled.attempts = replace(scheduled.attempts, failed_on=None)
        if failed is not None and failed is not state:
            self._count_fault(failed, now)

    def _count_fault(self, state: ReplicaState, now: float) -> None:
        state.suspension.faults += 1
        if state.suspension.faults >= _FAULTS:
            self._suspend(state, now)

    def _suspend(self, state: ReplicaState, now: float) -> None:
        if state.suspension.active or not state.is_alive:
            return
        alive = [each for each in self._ledger if each.is_alive and each.spec.pool == state.spec.pool]
        if sum(each.suspension.active for each in alive) + 1 > max(1, int(_MAX_SHARE * len(alive))):
            return
        suspension = state.suspension
        suspension_s = (
            min(_FIRST_SUSPENSION_S * 2.0 ** min(suspension.count, 20), _MAX_SUSPENSION_S)
            if suspension.count
            else 0.0
        )
        suspension.faults, suspension.count = 0, suspension.count + 1
        self._ledger.suspend(state, now + suspension_s)

    def __repr__(self) -> str:
        suspended = [state.spec.replica_id for state in self._ledger if state.suspension.active]
        return f"<Suspensions {suspended}>"


_LEAST_WAIT_S, _FACTOR = 5.0, 3.0
# Starts from which those of a replica are known; otherwise those of its pool count.
_KNOWN = 8
_SHARE, _MAX_CREDIT = 0.05, 8.0


class SlowStarts:
    """Finds the requests to move."""

    def __init__(self, ledger: ReplicaLedger) -> None:
        self._ledger = ledger
        self._credit = _MAX_CREDIT
        # (time of the next look, order, request, its attempt).
        self._due: list[tuple[float, int, ScheduledRequest, Running]] = []
        self._order = itertools.count()

    def __repr__(self) -> str:
        return f"<SlowStarts {len(self._due)} credit={self._credit:.1f}>"

    def on_dispatch(self, scheduled: ScheduledRequest, running: Running, now: float) -> None:
        """Watch a request that was dispatched to a replica."""
        self._credit = min(_MAX_CREDIT, self._credit + _SHARE)
        if scheduled.request.spec.streamed and scheduled.attempts.moved_from is None and not running.bypassed:
            heapq.heappush(self._due, (now + _LEAST_WAIT_S, next(self._order), scheduled, running))

    def next_at(self) -> float | None:
        """Return the time of the next look, or None if every watched answer has started."""
        while self._due and not _is_waiting(*self._due[0][2:]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def overdue(self, now: float) -> list[ScheduledRequest]:
        """Return the requests to move now, each once."""
        moved = []
        while (at := self.next_at()) is not None and at <= now:
            _, _, scheduled, running = heapq.heappop(self._due)
            replica = running.replica
            limit_s = self._limit_s(replica)
            due_at = scheduled.dispatched_at + limit_s
            if due_at <= now and self._credit >= 1 and self._can_move(scheduled, running, now):
                self._credit -= 1
                scheduled.attempts = replace(scheduled.attempts, moved_from=replica.spec.replica_id)
                if replica.hang_detector.is_silent_since(scheduled.dispatched_at):
                    replica.hang_detector.hangs = True
                    self._ledger.open.update(replica)
                moved.append(scheduled)
            else:
                again_at = max(due_at, now + _LEAST_WAIT_S)
                heapq.heappush(self._due, (again_at, next(self._order), scheduled, running))
        return moved

    def _limit_s(self, replica: ReplicaState) -> float:
        """Return the time from dispatch after which a first token is overdue."""
        known = [replica]
        if len(replica.learned.first_tokens_s) < _KNOWN:
            known = list(self._ledger.of_pool(replica.spec.pool))
        slowest_s = max((max(each.learned.first_tokens_s, default=0.0) for each in known), default=0.0)
        return max(_LEAST_WAIT_S, _FACTOR * slowest_s)

    def _can_move(self, scheduled: ScheduledRequest, running: Running, now: float) -> bool:
        """Return whether another replica accepts the request, and its own shows no reason to wait."""
        replica = running.replica
        if replica.reports_queue and not replica.hang_detector.is_silent_since(scheduled.dispatched_at):
            return False
        elsewhere = frozenset({replica.spec.replica_id})
        queries = (
            CapacityQuery(pool, running.tokens, avoided=elsewhere, destination=scheduled.destination)
            for pool in scheduled.pools
        )
        return any(self._ledger.open.best(query, now) is not None for query in queries)


def _is_waiting(scheduled: ScheduledRequest, running: Running) -> bool:
    """Return whether an attempt still waits for its first token."""
    return scheduled.running is running and not running.started


# Prompt tokens that take about as long as one output token; only used to compare answers that are not
# streamed.
_PROMPT_PER_OUTPUT = 100


class InFlight:
    """Tracks requests from dispatch to end; the ledger counts what they hold."""

    def __init__(
        self,
        ledger: ReplicaLedger,
        prefills: PrefillTracker,
        suspensions: "Suspensions",
        priorities: EnginePriorities,
        headroom: TenantHeadroom,
        backfill: Backfill,
    ) -> None:
        self._backfill = backfill
        self._ledger = ledger
        self._prefills = prefills
        self._suspensions = suspensions
        self._priorities = priorities
        self._headroom = headroom
        self.engine_time = EngineTime(prefills.costs)

    def __repr__(self) -> str:
        return f"<InFlight {sum(replica.in_flight for replica in self._ledger)}>"

    def hold(self, scheduled: ScheduledRequest, running: Running, now: float, *, seen: bool = False) -> None:
        """Hold capacity for a request that is sent to a replica, or runs there already (`seen`)."""
        replica, request = running.replica, scheduled.request
        prompt_tokens, choices = scheduled.estimate.expected_prompt_tokens, max(1, request.spec.choices)
        cached_tokens = 0 if seen else max(0, prompt_tokens - running.prefill_tokens)
        running.use = KvUse(scheduled.estimate, choices, replica.spec.pool, cached_tokens)
        running.engine_priority = self._priorities.on_dispatch(request)
        scheduled.running, scheduled.dispatched_at = running, now
        self._backfill.on_dispatch(scheduled, running, now)
        self._ledger.hold(running, now, seen=seen)
        self._headroom.on_hold(request.tenant, running.use.pool, running.tokens, now)
        running.number = replica.dispatches
        running.sent_as = (replica.in_flight, replica.unstarted, replica.prefills.long[0])
        self.engine_time.on_dispatch(scheduled, running, now)
        if (adapter := request.spec.adapter) is not None:
            replica.record_adapter(adapter)
        if request.spec.streamed and not running.started:
            replica.hang_detector.on_dispatch(now)

    def start(self, scheduled: ScheduledRequest, now: float) -> None:
        """Record the start of an answer."""
        running = scheduled.running
        if running is None or running.started:
            return
        replica, streamed = running.replica, scheduled.request.spec.streamed
        if streamed:
            # Its first token was outstanding until now.
            replica.hang_detector.on_end()
        replica.hang_detector.on_progress(now)
        running.started_at = now
        self.engine_time.on_first_token(running, now)
        # An answer that is not streamed starts at its end, long after its prefill.
        if streamed:
            replica.learned.first_tokens_s.append(now - scheduled.dispatched_at)
            self._observe_start(scheduled, running, scheduled.prefill_tokens, now)
            self._prefills.on_first_token(scheduled, running, now)
        self._ledger.start(running, now)
        self._suspensions.on_success(scheduled, replica, now)

    def complete(
        self, scheduled: ScheduledRequest, running: Running, usage: Usage | None, now: float
    ) -> None:
        """Learn from a complete answer. `release` follows."""
        replica, spec = running.replica, scheduled.request.spec
        output_tokens = None if usage is None else usage.output_tokens - scheduled.attempts.generated
        if not spec.streamed:
            # Without a count, the times of whole answers vary too much to be compared.
            tokens = None
            if output_tokens is not None:
                tokens = max(0, output_tokens + scheduled.prefill_tokens // _PROMPT_PER_OUTPUT)
            self._observe_start(scheduled, running, tokens, now)
        elif (
            spec.choices == 1  # with several, the pace of each one is unknown
            and running.started_at is not None
            and output_tokens is not None
            and output_tokens >= 2
        ):
            replica.learned.pace.record((now - running.started_at) / (output_tokens - 1), now)
        if usage is not None or spec.streamed:
            # Otherwise neither its length nor its wait in the engine is known.
            if output_tokens is None:
                output_tokens = scheduled.estimate.expected_output_tokens
            seconds = now - scheduled.dispatched_at
            self._ledger.observe_speed(replica, scheduled.prefill_tokens, output_tokens, seconds, now)
        replica.hang_detector.on_progress(now)
        self._suspensions.on_success(scheduled, replica, now)

    def release(self, scheduled: ScheduledRequest, running: Running, now: float, *, ran: bool) -> None:
        """Release the capacity of a request that has left its replica; `ran` as in `ReplicaLedger`."""
        request = scheduled.request
        self._priorities.on_departure(request)
        self._backfill.on_release(scheduled, running, now)
        self._headroom.on_release(request.tenant, running)
        self.engine_time.on_departure(request, running, now, ran=ran)
        if request.spec.streamed and not running.started:
            running.replica.hang_detector.on_end()
        self._ledger.release(running, now, ran=ran)
        scheduled.running = None

    def _observe_start(
        self, scheduled: ScheduledRequest, running: Running, tokens: int | None, now: float
    ) -> None:
        """Learn about an engine of unknown load from the start of an answer of so many tokens."""
        replica = running.replica
        if replica.reports_queue:
            return
        in_flight, unstarted, long_prefills = running.sent_as
        seconds, streamed = now - scheduled.dispatched_at, scheduled.request.spec.streamed
        kind: int | None = None
        if streamed:
            # A time to the first token varies less with the length than that of a whole answer.
            kind = (tokens or 0).bit_length() // 2
            if running.prefill_class is PrefillClass.SHORT:
                beside_long = long_prefills + replica.prefills.long[0] > 0
                replica.learned.interference.on_start(kind, seconds, beside_long=beside_long)
        elif tokens is not None:
            kind = -tokens.bit_length()
        if replica.learned.limit is not None:
            at_work = replica.in_flight - replica.unstarted + 1 if streamed else 0
            replica.learned.limit.on_start(AnswerStart(kind, now, seconds, in_flight, unstarted, at_work))
        self._ledger.open.update(replica)
