"""Put-backs: handling of requests that a replica returned before their client received a byte.

- One budget: `max_put_backs` bounds the dispatches of a request, for all reasons and across schedulers.
- One deadline: its queue timeout counts from its arrival and is not extended.
- Backoff: the first retry is immediate, because most faults affect only one replica. Each further backoff
  is twice as long as the one before. A request in backoff is queued, but in no sub-queue.
- Failover: it goes to a replica on which it has not failed, as long as one is usable.
- Quarantine: a request under which an engine was lost may be the cause. No replica has two of these until
  an answer starts. So a request that loses a second engine, alone among suspects, fails with `max_attempts`
  of 2.
- Position: a request goes to the front if its replica was lost, because it had been dispatched in time. One
  rejected by an engine does not: otherwise a tenant's failing requests would pass the others' good ones.
"""

import zlib

from serve_app.core.accounting.waits import wait_breakdown
from serve_app.core.events import DispatchFailed, DispatchFailure
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.core.settings import SchedulerSettings
from serve_app.errors import Conclusion, Outcome
from serve_app.request import Request

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 30.0
# Jitter of the backoff, so that requests that failed together are not retried together.
_JITTER_RATIO = 0.25
REPLICA_FAULTS = frozenset({DispatchFailure.UNREACHABLE, DispatchFailure.LOST})
"""Failures that no request should cause."""


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
        # A request that was moved precedes those that were never dispatched.
        scheduled.returned = scheduled.moved_from == event.replica_id
        scheduled.avoided |= {event.replica_id} if scheduled.returned else frozenset()
        return
    scheduled.put_backs += 1
    scheduled.last_failure = event.message or str(event.failure)
    if event.failure is DispatchFailure.TOO_LONG:
        # The replica is healthy, and the request goes to pools with a longer context.
        scheduled.returned = True
        scheduled.above_tokens = max(scheduled.above_tokens, replica.context_limit)
        return
    scheduled.returned = event.failure in REPLICA_FAULTS
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


def retry_limit_conclusion(
    scheduled: ScheduledRequest, settings: SchedulerSettings, *, many_lost: bool
) -> Conclusion | None:
    """Return the failure of a request that may not be retried, or None if it may.

    Args:
        many_lost: whether several replicas were lost at the same time, so that the request is hardly the
            cause: then it gets one more attempt.
    """
    reason = scheduled.last_failure
    if scheduled.losses >= settings.max_attempts + many_lost:
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
