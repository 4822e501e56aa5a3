"""Put-backs: what becomes of a request that a replica returned before its client heard anything.

- One budget: `max_put_backs` bounds its dispatches over all reasons. It is counted over the life of the
  request, also across schedulers.
- One deadline: it had a time to wait from its arrival, and gets no other.
- Backoff: the first new try is at once, since most faults are those of one replica. Each further one waits
  twice as long as that before it. A request in backoff waits, and is in no sub-queue.
- Elsewhere: it goes to a replica that has not failed it, as long as one is usable.
- Quarantine: a request under which an engine was lost may be the cause. Until its answer begins, no replica
  has two of those. So one that is lost again, alone among suspects, fails with `max_attempts` of 2.
- Place: it goes first where a replica was lost, since it had been dispatched in time. One that an engine
  refused has had its turn, or its tenant's failing requests would pass the others' good ones.
"""

import zlib

from serve_app.errors import Conclusion, Outcome
from serve_app.request import Request
from serve_app.routing.replica_state import ReplicaState
from serve_app.scheduling.events import DispatchFailed, DispatchFailure
from serve_app.scheduling.request import ScheduledRequest
from serve_app.scheduling.settings import SchedulerSettings
from serve_app.scheduling.waits.accounts import wait_breakdown

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
