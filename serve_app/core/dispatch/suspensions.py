"""Suspensions: replicas that receive no requests for a while, because they lose or reject them.

A failure may be the fault of the replica or of the request. If every failure suspended a replica, one
client with failing requests could stop a fleet. If none did, a broken replica would attract requests,
because it fails fast and so looks idle. Failures count against a replica as follows:

| the request                                | counts                                                    |
|--------------------------------------------|-----------------------------------------------------------|
| could not be sent, or its connection broke | immediately: no request should cause that                 |
| found the engine busy                      | the third time in a row without a success in between      |
| got an error of the engine                 | the same, and only once another replica has served it     |
| stated when to come back (`Retry-After`)   | it receives nothing before, for at most 20 s              |

A busy engine that does not report its load may have reached a limit. Its first rejection therefore becomes a
learned limit (`observed.limits`), and only rejections within that limit count.

A suspended replica receives nothing until its next report. Each further suspension doubles that time, until
the replica starts an answer again. At most half of a pool's live replicas are suspended at once (at least
one may be), so that neither hostile requests nor a gateway cut off from its replicas can stop a fleet. Dead
replicas are detected by their connection to the scheduler, not here.
"""

from serve_app.core.dispatch.put_backs import REPLICA_FAULTS
from serve_app.core.events import DispatchFailed, DispatchFailure
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.replica_state import ReplicaState

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
                self._ledger.suspend(state, now + min(event.retry_after_s, _MAX_PAUSE_S))
            else:
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
