"""Requests in flight on replicas: held capacity, learning from answers, put-backs and suspensions."""

import zlib

from serve_app.core import events as ev
from serve_app.core.accounting.costs import EngineTime
from serve_app.core.accounting.waits import wait_breakdown
from serve_app.core.dispatch.backfill import Backfill
from serve_app.core.dispatch.engine_priority import EnginePriorities
from serve_app.core.dispatch.headroom import TenantHeadroom
from serve_app.core.events import DispatchFailed, DispatchFailure
from serve_app.core.isolation import PrefillTracker
from serve_app.core.request import NO_HOLD, ScheduledRequest
from serve_app.core.routing.kv_forecast import KvUse
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.observed import AnswerStart
from serve_app.core.routing.replica_state import Hold, ReplicaState
from serve_app.core.settings import SchedulerSettings
from serve_app.errors import Conclusion, Outcome
from serve_app.request import Request, Usage

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

    def hold(
        self,
        scheduled: ScheduledRequest,
        replica_id: str,
        hold: Hold,
        now: float,
        *,
        resumed: ev.Resumed | None = None,
    ) -> None:
        """Hold capacity for a request sent to a replica, or resumed there by a new scheduler."""
        known, choices = self._ledger.get(replica_id), max(1, scheduled.request.spec.choices)
        prompt_tokens = scheduled.estimate.expected_prompt_tokens
        cached_tokens = 0 if resumed is not None else max(0, prompt_tokens - hold.prefill_tokens)
        use = KvUse(scheduled.estimate, choices, "" if known is None else known.spec.pool, cached_tokens)
        hold = Hold(hold.tokens, hold.prefill_class, hold.prefill_tokens, hold.quarantined, use)
        scheduled.replica_id, scheduled.hold, scheduled.dispatched_at = replica_id, hold, now
        scheduled.started = resumed is not None and resumed.started
        scheduled.engine_priority = self._priorities.on_dispatch(scheduled.request)
        self._backfill.on_dispatch(scheduled, replica_id, known, now)
        self._ledger.hold(replica_id, hold, now, seen=resumed is not None, started=scheduled.started)
        replica = self._ledger[replica_id]
        self._headroom.on_hold(scheduled, use.pool, now)
        scheduled.dispatch_number = replica.dispatches
        scheduled.prefilled_before = replica.prefill_dispatched - replica.pending_prefill_tokens
        self.engine_time.on_dispatch(scheduled, replica, now)
        if (adapter := scheduled.request.spec.adapter) is not None:
            replica.record_adapter(adapter)
        if _awaits_first_token(scheduled):
            replica.hang_detector.on_dispatch(now)

    def start(self, scheduled: ScheduledRequest, now: float) -> None:
        """Record the start of an answer."""
        if scheduled.started or scheduled.replica_id is None:
            return
        replica, streamed = self._ledger[scheduled.replica_id], scheduled.request.spec.streamed
        if streamed:
            # Its first token was outstanding until now.
            replica.hang_detector.on_end()
        replica.hang_detector.on_progress(now)
        scheduled.started, scheduled.started_at = True, now
        self.engine_time.on_first_token(scheduled, replica, now)
        # An answer that is not streamed starts at its end, long after its prefill.
        if streamed:
            self._observe_start(scheduled, replica, now)
            self._prefills.on_first_token(scheduled, replica, now)
        scheduled.hold = self._ledger.start(scheduled.replica_id, scheduled.hold, now)
        self._suspensions.on_success(scheduled, replica, now)

    def complete(self, scheduled: ScheduledRequest, usage: Usage | None, now: float) -> None:
        """Learn from a complete answer. `release` follows."""
        assert scheduled.replica_id is not None
        if usage is not None and scheduled.request.spec.streamed:
            self._observe_pace(scheduled, usage.output_tokens - scheduled.generated, now)
        elif usage is not None:
            work = usage.output_tokens - scheduled.generated + scheduled.prefill_tokens // _PROMPT_PER_OUTPUT
            self._ledger.observe_whole_answer(scheduled.replica_id, work, now - scheduled.dispatched_at, now)
        replica = self._ledger[scheduled.replica_id]
        output_tokens = scheduled.estimate.expected_output_tokens
        if usage is not None:
            output_tokens = usage.output_tokens - scheduled.generated
        seconds = now - scheduled.dispatched_at
        self._ledger.observe_speed(replica, scheduled.prefill_tokens, output_tokens, seconds, now)
        replica.hang_detector.on_progress(now)
        self._suspensions.on_success(scheduled, replica, now)

    def release(self, scheduled: ScheduledRequest, now: float, *, ran: bool) -> None:
        """Release the capacity of a request that has left its replica; `ran` as in `ReplicaLedger`."""
        assert scheduled.replica_id is not None
        self._priorities.on_departure(scheduled.request)
        self._backfill.on_release(scheduled, scheduled.replica_id, now)
        replica = self._ledger[scheduled.replica_id]
        self._headroom.on_release(scheduled)
        self.engine_time.on_departure(scheduled, replica, now, ran=ran)
        if _awaits_first_token(scheduled):
            replica.hang_detector.on_end()
        self._ledger.release(scheduled.replica_id, scheduled.hold, now, started=scheduled.started, ran=ran)
        scheduled.replica_id, scheduled.hold = None, NO_HOLD
        scheduled.started, scheduled.started_at = False, None

    def _observe_start(self, scheduled: ScheduledRequest, replica: ReplicaState, now: float) -> None:
        """Learn the limits of an engine of unknown load from a first token."""
        if replica.observed is None or replica.reports_queue:
            return
        in_flight_tokens = replica.prefill_dispatched - scheduled.prefilled_before
        outstanding = replica.hang_detector.outstanding
        start = AnswerStart(
            seconds=now - scheduled.dispatched_at,
            explained_s=self._prefills.costs.of(replica.spec.pool).seconds(in_flight_tokens),
            iteration_s=replica.report.tpot_s if replica.report else None,
            overtaken=scheduled.dispatch_number < replica.last_started,
            running=replica.in_flight - outstanding,
            unstarted=outstanding + 1,
            peak_tokens=replica.peak_tokens,
        )
        replica.last_started = max(replica.last_started, scheduled.dispatch_number)
        others = replica.pending_prefill_tokens - scheduled.hold.prefill_tokens
        self._ledger.observe_start(replica.spec.replica_id, start, others, now)

    def _observe_pace(self, scheduled: ScheduledRequest, output_tokens: int, now: float) -> None:
        """Learn the pace of a completed stream. With several choices, the pace of each one is unknown."""
        began_at, replica_id = scheduled.started_at, scheduled.replica_id
        if began_at is None or replica_id is None or scheduled.request.spec.choices != 1 or output_tokens < 2:
            return
        self._ledger[replica_id].pace.record((now - began_at) / (output_tokens - 1), now)


def _awaits_first_token(scheduled: ScheduledRequest) -> bool:
    """Return whether a first token of a dispatched request is still expected."""
    return scheduled.request.spec.streamed and not scheduled.started


# Put-backs: handling of requests that a replica returned before their client received a byte.
#
# - One budget: `max_put_backs` bounds the dispatches of a request, for all reasons and across schedulers.
# - One deadline: its queue timeout counts from its arrival and is not extended.
# - Backoff: the first retry is immediate, because most faults affect only one replica. Each further backoff
#   is twice as long as the one before. A request in backoff is queued, but in no sub-queue.
# - Failover: it goes to a replica on which it has not failed, as long as one is usable.
# - Quarantine: a request under which an engine was lost may be the cause. No replica has two of these until
#   an answer starts. So a request that loses a second engine, alone among suspects, fails with `max_attempts`
#   of 2.
# - Position: a request goes to the front if its replica was lost, because it had been dispatched in time. One
#   rejected by an engine does not: otherwise a tenant's failing requests would pass the others' good ones.


_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 30.0
# Jitter of the backoff, so that requests that failed together are not retried together.
_JITTER_RATIO = 0.25
_REPLICA_FAULTS = frozenset({DispatchFailure.UNREACHABLE, DispatchFailure.LOST})


def record_put_back(
    scheduled: ScheduledRequest, event: DispatchFailed, replica: ReplicaState, now: float
) -> None:
    """Record a put-back in the state of the request."""
    scheduled.bypassed = False
    if event.failure.is_after_service(event.generated_tokens):
        # It did not wait in this time, so its queue timeout begins again.
        request = scheduled.request
        scheduled.expires_at = now + request.expires_at - request.arrived_at
    if event.failure is DispatchFailure.REVOKED:
        scheduled.returned = False
        return
    scheduled.put_backs += 1
    scheduled.last_failure = event.message or str(event.failure)
    if event.failure is DispatchFailure.TOO_LONG:
        # The replica is healthy, and the request goes to pools with a longer context.
        scheduled.returned = True
        scheduled.above_tokens = max(scheduled.above_tokens, replica.context_limit)
        return
    scheduled.returned = event.failure in _REPLICA_FAULTS
    scheduled.losses += event.failure is DispatchFailure.LOST
    scheduled.avoided |= {event.replica_id}
    if event.failure is DispatchFailure.ENGINE_ERROR:
        scheduled.failed_on = event.replica_id
    backoff_s = _backoff_s(scheduled)
    scheduled.backoff_until = now + backoff_s if backoff_s else 0.0


def restore_put_backs(scheduled: ScheduledRequest, settings: SchedulerSettings) -> None:
    """Restore the put-backs of a request that an earlier scheduler had dispatched."""
    request = scheduled.request
    scheduled.returned = request.attempts > 0
    scheduled.put_backs = min(request.attempts, settings.max_put_backs - 1)
    scheduled.losses = min(int(request.lost), settings.max_attempts - 1)


def retry_limit_conclusion(scheduled: ScheduledRequest, settings: SchedulerSettings) -> Conclusion | None:
    """Return the failure of a request that may not be retried, or None if it may."""
    reason = scheduled.last_failure
    if scheduled.losses >= settings.max_attempts:
        text = f"{scheduled.losses} replicas were lost under this request; last failure: {reason}"
    elif scheduled.put_backs >= settings.max_put_backs:
        text = f"the request was put back {scheduled.put_backs} times; last failure: {reason}"
    else:
        return None
    return Conclusion(Outcome.FAILED, text)


def describe_expiry(request: Request, scheduled: ScheduledRequest, now: float) -> str:
    """Describe an expired request for its client: its wait, the main cause and its put-backs."""
    text = f"the queue timeout of the request ended after {now - request.arrived_at:.1f} s"
    if not scheduled.put_backs:
        waited = wait_breakdown(scheduled, now)
        cause = waited.main_cause if waited is not None else None
        return text if cause is None else f"{text}; main cause: {cause.meaning}"
    text = f"{text}; it was put back {scheduled.put_backs} times"
    return f"{text}; last failure: {scheduled.last_failure}" if scheduled.last_failure else text


def _backoff_s(scheduled: ScheduledRequest) -> float:
    tries = scheduled.put_backs - 1
    if tries < 1:
        return 0.0
    jitter = zlib.crc32(f"{scheduled.request.request_id} {tries}".encode()) / 2**32
    usual_s: float = min(_FIRST_BACKOFF_S * 2.0 ** min(tries - 1, 20), _MAX_BACKOFF_S)
    return usual_s * (1 + _JITTER_RATIO * jitter)


# Suspensions: replicas that receive no requests for a while, because they lose or reject them.
#
# A failure may be the fault of the replica or of the request. If every failure suspended a replica, one
# client with failing requests could stop a fleet. If none did, a broken replica would attract requests,
# because it fails fast and so looks idle. Failures count against a replica as follows:
#
# | the request                                | counts                                                    |
# |--------------------------------------------|-----------------------------------------------------------|
# | could not be sent, or its connection broke | immediately: no request should cause that                 |
# | found the engine busy                      | the third time in a row without a success in between      |
# | got an error of the engine                 | the same, and only once another replica has served it     |
#
# A suspended replica receives nothing until its next report. Each further suspension doubles that time, until
# the replica starts an answer again. At most half of a pool's live replicas are suspended at once (at least
# one may be), so that neither hostile requests nor a gateway cut off from its replicas can stop a fleet. Dead
# replicas are detected by their connection to the scheduler, not here.


# Fewer may coincide by chance; each costs its request one more dispatch.
_FAULTS = 3
# The first is about the interval of reports. The longest is the maximum idle time of a recovered replica.
_FIRST_SUSPENSION_S, _MAX_SUSPENSION_S = 0.1, 10.0
_MAX_SHARE = 0.5


class Suspensions:
    """Suspends replicas in the ledger. All state is in `ReplicaState`."""

    def __init__(self, ledger: ReplicaLedger) -> None:
        self._ledger = ledger

    def on_failure(self, replica_id: str, failure: DispatchFailure, now: float) -> None:
        """Count a failure against the replica that put back a request."""
        state = self._ledger.get(replica_id)
        if state is None:
            return
        if failure in _REPLICA_FAULTS:
            self._suspend(state, now)
        elif failure is DispatchFailure.BUSY:
            self._count_fault(state, now)

    def on_success(self, scheduled: ScheduledRequest, state: ReplicaState, now: float) -> None:
        """Clear the faults of a replica that answers. Count one for the replica that failed the request."""
        state.faults = state.suspensions = 0
        if scheduled.failed_on is None:
            return
        failed = self._ledger.get(scheduled.failed_on)
        scheduled.failed_on = None
        if failed is not None and failed is not state:
            self._count_fault(failed, now)

    def _count_fault(self, state: ReplicaState, now: float) -> None:
        state.faults += 1
        if state.faults >= _FAULTS:
            self._suspend(state, now)

    def _suspend(self, state: ReplicaState, now: float) -> None:
        if state.suspended or not state.is_alive:
            return
        alive = [each for each in self._ledger if each.is_alive and each.spec.pool == state.spec.pool]
        if sum(each.suspended for each in alive) + 1 > max(1, int(_MAX_SHARE * len(alive))):
            return
        state.faults = 0
        suspension_s = (
            min(_FIRST_SUSPENSION_S * 2.0 ** min(state.suspensions, 20), _MAX_SUSPENSION_S)
            if state.suspensions
            else 0.0
        )
        state.suspensions += 1
        self._ledger.suspend(state, now + suspension_s)

    def __repr__(self) -> str:
        suspended = [state.spec.replica_id for state in self._ledger if state.suspended]
        return f"<Suspensions {suspended}>"
