"""Suspensions: replicas that get no requests for a while, because they lose or refuse them.

Question: is a failure the fault of the replica, or of the request? A fleet that suspends a replica for every
failure can be stopped by one client with failing requests, and one that never does feeds a broken replica,
which fails fast and so looks idle. What counts against a replica:

| the request                                  | counts                                                      |
|----------------------------------------------|-------------------------------------------------------------|
| could not be sent, or its connection broke   | at once: no request should do that                          |
| found the engine busy                        | when it is the third one in a row, nothing served between   |
| got an error of the engine's own             | the same, and only once another replica has served it       |

A suspended replica gets nothing until its next report. Each further suspension doubles that time, until the
replica begins an answer again. At most half of a pool's live replicas are suspended at once (at least one may
be), so that neither hostile requests nor a gateway cut off from its replicas can stop a fleet. Replicas that
are really dead are noticed by their connection to the scheduler, not here.
"""

from serve_app.core.events import DispatchFailure
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.replica_state import ReplicaState

# Fewer come together by chance; each costs its request one more dispatch.
_FAULTS = 3
# About the interval of reports. The longest time is what a repaired replica stays idle for at worst.
_FIRST_S, _LONGEST_S = 0.1, 10.0
_MAX_SHARE = 0.5
_AT_ONCE = frozenset({DispatchFailure.UNREACHABLE, DispatchFailure.LOST})


class Suspensions:
    """Suspends replicas in the ledger, whose states hold all that is remembered."""

    def __init__(self, ledger: ReplicaLedger) -> None:
        self._ledger = ledger

    def on_failure(self, replica_id: str, failure: DispatchFailure, now: float) -> None:
        """A replica returned a request."""
        state = self._ledger.get(replica_id)
        if state is None:
            return
        if failure in _AT_ONCE:
            self._suspend(state, now)
        elif failure is DispatchFailure.BUSY:
            self._blame(state, now)

    def on_success(self, scheduled: ScheduledRequest, state: ReplicaState, now: float) -> None:
        """The answer of a request that runs on a replica has begun, or is complete."""
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
        rest_s = min(_FIRST_S * 2.0 ** min(state.suspensions, 20), _LONGEST_S) if state.suspensions else 0.0
        state.suspensions += 1
        self._ledger.suspend(state, now + rest_s, now)

    def __repr__(self) -> str:
        suspended = [state.spec.replica_id for state in self._ledger if state.suspended]
        return f"<Suspensions {suspended}>"
