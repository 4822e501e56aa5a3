"""Requests on replicas: what is held from dispatch to end, what answers teach, put-backs and suspensions."""

import zlib

from serve_app.core import events as ev
from serve_app.core.accounting.costs import EngineTime
from serve_app.core.accounting.waits import wait_breakdown
from serve_app.core.dispatch.engine_priority import EnginePriorities
from serve_app.core.events import DispatchFailed, DispatchFailure
from serve_app.core.isolation import PrefillWatch
from serve_app.core.request import NOTHING, ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.replica_state import Hold, ReplicaState
from serve_app.core.settings import SchedulerSettings
from serve_app.errors import Conclusion, Outcome
from serve_app.request import Request, Usage

# Prompt tokens that take about as long as one output token; only to compare answers that are not streamed.
_PROMPT_PER_OUTPUT = 100


class InFlight:
    """Takes requests through their time on a replica; the counts are in the ledger.

    Attributes:
        engine_time: whose requests the engines have worked on, and for how long.
    """

    def __init__(
        self,
        ledger: ReplicaLedger,
        prefills: PrefillWatch,
        suspensions: "Suspensions",
        priorities: EnginePriorities,
    ) -> None:
        self._ledger = ledger
        self._prefills = prefills
        self._suspensions = suspensions
        self._priorities = priorities
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
        """A request is sent to a replica, or is found there."""
        scheduled.replica_id, scheduled.hold, scheduled.dispatched_at = replica_id, hold, now
        scheduled.started = resumed is not None and resumed.started
        scheduled.engine_priority = self._priorities.on_dispatch(scheduled.request)
        self._ledger.hold(replica_id, hold, now, seen=resumed is not None, started=scheduled.started)
        replica = self._ledger[replica_id]
        scheduled.dispatch_number = replica.dispatches
        self.engine_time.on_dispatch(scheduled, replica, now)
        if (adapter := scheduled.request.spec.adapter) is not None:
            replica.note_adapter(adapter)
        if _owes(scheduled):
            replica.answers.on_dispatch(now)

    def start(self, scheduled: ScheduledRequest, now: float) -> None:
        """Its answer has begun."""
        if scheduled.started or scheduled.replica_id is None:
            return
        replica, streamed = self._ledger[scheduled.replica_id], scheduled.request.spec.streamed
        if streamed:
            # It owed its first token until now.
            replica.answers.on_end()
        replica.answers.on_sign(now)
        scheduled.started, scheduled.started_at = True, now
        self.engine_time.on_first_token(scheduled, replica, now)
        # An answer that is not streamed begins when it ends, long after its prefill.
        if streamed:
            self._observe_latency(scheduled, scheduled.prefill_tokens, now)
            self._prefills.on_first_token(scheduled, replica, now)
        scheduled.hold = self._ledger.start(scheduled.replica_id, scheduled.hold, now)
        self._suspensions.on_success(scheduled, replica, now)

    def complete(self, scheduled: ScheduledRequest, usage: Usage | None, now: float) -> None:
        """Its answer is complete; `release` follows."""
        if usage is not None and scheduled.request.spec.streamed:
            self._observe_pace(scheduled, usage.output_tokens, now)
        elif usage is not None:
            work = usage.output_tokens + scheduled.prefill_tokens // _PROMPT_PER_OUTPUT
            self._observe_latency(scheduled, work, now)
        assert scheduled.replica_id is not None
        replica = self._ledger[scheduled.replica_id]
        replica.answers.on_sign(now)
        self._suspensions.on_success(scheduled, replica, now)

    def release(self, scheduled: ScheduledRequest, now: float, *, ran: bool) -> None:
        """It has left its replica.

        Args:
            ran: see `ReplicaLedger.release`.
        """
        assert scheduled.replica_id is not None
        self._priorities.on_departure(scheduled.request)
        replica = self._ledger[scheduled.replica_id]
        self.engine_time.on_departure(scheduled, replica, now, ran=ran)
        if _owes(scheduled):
            replica.answers.on_end()
        self._ledger.release(scheduled.replica_id, scheduled.hold, now, started=scheduled.started, ran=ran)
        scheduled.replica_id, scheduled.hold = None, NOTHING
        scheduled.started, scheduled.started_at = False, None

    def _observe_latency(self, scheduled: ScheduledRequest, tokens: int, now: float) -> None:
        """An answer has begun, with its first token or as a whole."""
        assert scheduled.replica_id is not None
        streamed, seconds = scheduled.request.spec.streamed, now - scheduled.dispatched_at
        self._ledger.observe_latency(scheduled.replica_id, tokens, seconds, now, streamed=streamed)

    def _observe_pace(self, scheduled: ScheduledRequest, output_tokens: int, now: float) -> None:
        """A stream has ended. Of several choices at once nobody knows which took how long."""
        began_at, replica_id = scheduled.started_at, scheduled.replica_id
        if began_at is None or replica_id is None or scheduled.request.spec.choices != 1 or output_tokens < 2:
            return
        self._ledger[replica_id].pace.note((now - began_at) / (output_tokens - 1), now)


def _owes(scheduled: ScheduledRequest) -> bool:
    """Whether the first token of a dispatched request is still to come, and will be told."""
    return scheduled.request.spec.streamed and not scheduled.started


# Put-backs: what becomes of a request that a replica returned before its client heard anything.
#
# - One budget: `max_put_backs` bounds its dispatches over all reasons. It is counted over the life of the
#   request, also across schedulers.
# - One deadline: it had a time to wait from its arrival, and gets no other.
# - Backoff: the first new try is at once, since most faults are those of one replica. Each further one waits
#   twice as long as that before it. A request in backoff waits, and is in no sub-queue.
# - Elsewhere: it goes to a replica that has not failed it, as long as one is usable.
# - Quarantine: a request under which an engine was lost may be the cause. Until its answer begins, no replica
#   has two of those. So one that is lost again, alone among suspects, fails with `max_attempts` of 2.
# - Place: it goes first where a replica was lost, since it had been dispatched in time. One that an engine
#   refused has had its turn, or its tenant's failing requests would pass the others' good ones.


_FIRST_S, _LONGEST_S = 0.1, 30.0
# Requests that failed together do not come back together.
_SPREAD_RATIO = 0.25
_NOT_ITS_FAULT = frozenset({DispatchFailure.UNREACHABLE, DispatchFailure.LOST})


def note_put_back(
    scheduled: ScheduledRequest, event: DispatchFailed, replica: ReplicaState, now: float
) -> None:
    """Note how a request came back from a replica."""
    scheduled.put_backs += 1
    scheduled.last_failure = event.message or str(event.failure)
    if event.failure is DispatchFailure.TOO_LONG:
        # The replica is well, and the request goes where longer ones are taken.
        scheduled.returned = True
        scheduled.above_tokens = max(scheduled.above_tokens, replica.context_limit)
        return
    scheduled.returned = event.failure in _NOT_ITS_FAULT
    scheduled.losses += event.failure is DispatchFailure.LOST
    scheduled.avoided |= {event.replica_id}
    if event.failure is DispatchFailure.ENGINE_ERROR:
        scheduled.failed_on = event.replica_id
    backoff_s = _backoff_s(scheduled)
    scheduled.resting_until = now + backoff_s if backoff_s else 0.0


def note_earlier_dispatches(scheduled: ScheduledRequest, settings: SchedulerSettings) -> None:
    """Note what an earlier scheduler did with a request that came back to its gateway meanwhile."""
    request = scheduled.request
    scheduled.returned = request.attempts > 0
    scheduled.put_backs = min(request.attempts, settings.max_put_backs - 1)
    scheduled.losses = min(int(request.lost), settings.max_attempts - 1)


def exhausted(scheduled: ScheduledRequest, settings: SchedulerSettings) -> Conclusion | None:
    """The end of a request that may not be tried again; None while it may."""
    reason = scheduled.last_failure
    if scheduled.losses >= settings.max_attempts:
        text = f"{scheduled.losses} replicas were lost under this request; the last: {reason}"
    elif scheduled.put_backs >= settings.max_put_backs:
        text = f"the request was sent {scheduled.put_backs} times and came back each time; the last: {reason}"
    else:
        return None
    return Conclusion(Outcome.FAILED, text)


def described(request: Request, scheduled: ScheduledRequest, now: float) -> str:
    """How long an expired request waited, for what most of the time, and what became of its dispatches."""
    text = f"the request waited {now - request.arrived_at:.1f} s in the queue and its turn did not come"
    if not scheduled.put_backs:
        waited = wait_breakdown(scheduled, now)
        cause = waited.main_cause if waited is not None else None
        return text if cause is None else f"{text}; for most of that time {cause.meaning}"
    again = f"{text} again: it was sent {scheduled.put_backs} times and came back"
    return f"{again}; the last: {scheduled.last_failure}" if scheduled.last_failure else again


def _backoff_s(scheduled: ScheduledRequest) -> float:
    tries = scheduled.put_backs - 1
    if tries < 1:
        return 0.0
    spread = zlib.crc32(f"{scheduled.request.request_id} {tries}".encode()) / 2**32
    usual_s: float = min(_FIRST_S * 2.0 ** min(tries - 1, 20), _LONGEST_S)
    return usual_s * (1 + _SPREAD_RATIO * spread)


# Suspensions: replicas that get no requests for a while, because they lose or refuse them.
#
# Question: is a failure the fault of the replica, or of the request? A fleet that suspends a replica for
# every failure can be stopped by one client with failing requests. One that never does feeds a broken
# replica, which fails fast and so looks idle. What counts against a replica:
#
# | the request                                | counts                                                    |
# |--------------------------------------------|-----------------------------------------------------------|
# | could not be sent, or its connection broke | at once: no request should do that                        |
# | found the engine busy                      | when it is the third one in a row, nothing served between |
# | got an error of the engine's own           | the same, and only once another replica has served it     |
#
# A suspended replica gets nothing until its next report. Each further suspension doubles that time, until
# the replica begins an answer again. At most half of a pool's live replicas are suspended at once (at least
# one may be), so that neither hostile requests nor a gateway cut off from its replicas can stop a fleet.
# Replicas that are really dead are noticed by their connection to the scheduler, not here.


# Fewer come together by chance; each costs its request one more dispatch.
_FAULTS = 3
# About the interval of reports. The longest time is what a repaired replica stays idle for at worst.
_FIRST_REST_S, _LONGEST_REST_S = 0.1, 10.0
_MAX_SHARE = 0.5


class Suspensions:
    """Suspends replicas in the ledger, whose states hold all that is remembered."""

    def __init__(self, ledger: ReplicaLedger) -> None:
        self._ledger = ledger

    def on_failure(self, replica_id: str, failure: DispatchFailure, now: float) -> None:
        """Count a failure against the replica that returned a request."""
        state = self._ledger.get(replica_id)
        if state is None:
            return
        if failure in _NOT_ITS_FAULT:
            self._suspend(state, now)
        elif failure is DispatchFailure.BUSY:
            self._blame(state, now)

    def on_success(self, scheduled: ScheduledRequest, state: ReplicaState, now: float) -> None:
        """Clear the faults of a replica that answers, and blame the one that failed this request before."""
        state.faults = state.suspensions = 0
        if scheduled.failed_on is None:
            return
        guilty = self._ledger.get(scheduled.failed_on)
        scheduled.failed_on = None
        if guilty is not None and guilty is not state:
            self._blame(guilty, now)

    def _blame(self, state: ReplicaState, now: float) -> None:
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
        rest_s = (
            min(_FIRST_REST_S * 2.0 ** min(state.suspensions, 20), _LONGEST_REST_S)
            if state.suspensions
            else 0.0
        )
        state.suspensions += 1
        self._ledger.suspend(state, now + rest_s, now)

    def __repr__(self) -> str:
        suspended = [state.spec.replica_id for state in self._ledger if state.suspended]
        return f"<Suspensions {suspended}>"
