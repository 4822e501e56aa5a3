"""Slow starts: requests whose first token is overdue are moved to another replica.

A server can hang on answers although it accepts requests and passes health checks. A request whose first
token takes `_FACTOR` times as long as the slowest of the recent ones on its replica, and at least
`_LEAST_WAIT_S`, is revoked there and dispatched elsewhere, if another replica of its pools accepts it now.
It is moved rather than doubled, so that no engine works for two answers, and nothing is answered or charged
twice.

- A replica that reports its queue shows whether it computes. Its requests are moved only if it has given no
  sign of life since their dispatch.
- A request is moved once. Moves are at most `_SHARE` of all dispatches, except for a few at the beginning.
- A replica without any sign of life since the dispatch counts as hung (`observed.hang_detector`) and
  receives no further requests until it answers.
"""

import heapq
import itertools

from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.open_replicas import CapacityQuery
from serve_app.core.routing.replica_state import Hold, ReplicaState

_LEAST_WAIT_S, _FACTOR = 5.0, 3.0
# Starts from which those of a replica are known; otherwise those of its pool count.
_KNOWN = 8
_SHARE, _MAX_CREDIT = 0.05, 8.0


class SlowStarts:
    """Finds the requests to move."""

    def __init__(self, ledger: ReplicaLedger) -> None:
        self._ledger = ledger
        self._credit = _MAX_CREDIT
        # (time of the next look, order, request, its hold, which identifies the attempt).
        self._due: list[tuple[float, int, ScheduledRequest, Hold]] = []
        self._order = itertools.count()

    def __repr__(self) -> str:
        return f"<SlowStarts {len(self._due)} credit={self._credit:.1f}>"

    def on_dispatch(self, scheduled: ScheduledRequest, now: float) -> None:
        """Watch a request that was dispatched to a replica."""
        self._credit = min(_MAX_CREDIT, self._credit + _SHARE)
        if scheduled.request.spec.streamed and scheduled.moved_from is None and not scheduled.bypassed:
            heapq.heappush(self._due, (now + _LEAST_WAIT_S, next(self._order), scheduled, scheduled.hold))

    def next_at(self) -> float | None:
        """Return the time of the next look, or None if every watched answer has started."""
        while self._due and not _is_waiting(*self._due[0][2:]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def overdue(self, now: float) -> list[ScheduledRequest]:
        """Return the requests to move now, each once."""
        moved = []
        while (at := self.next_at()) is not None and at <= now:
            _, _, scheduled, hold = heapq.heappop(self._due)
            assert scheduled.replica_id is not None, "it waits for its first token"
            replica = self._ledger[scheduled.replica_id]
            limit_s = self._limit_s(replica)
            due_at = scheduled.dispatched_at + limit_s
            if due_at <= now and self._credit >= 1 and self._can_move(scheduled, replica, now):
                self._credit -= 1
                scheduled.moved_from = replica.spec.replica_id
                if replica.hang_detector.is_silent_since(scheduled.dispatched_at):
                    replica.hang_detector.hangs = True
                    self._ledger.open.update(replica)
                moved.append(scheduled)
            else:
                again_at = max(due_at, now + _LEAST_WAIT_S)
                heapq.heappush(self._due, (again_at, next(self._order), scheduled, hold))
        return moved

    def _limit_s(self, replica: ReplicaState) -> float:
        """Return the time from dispatch after which a first token is overdue."""
        known = [replica]
        if len(replica.first_tokens_s) < _KNOWN:
            known = list(self._ledger.of_pool(replica.spec.pool))
        slowest_s = max((max(each.first_tokens_s, default=0.0) for each in known), default=0.0)
        return max(_LEAST_WAIT_S, _FACTOR * slowest_s)

    def _can_move(self, scheduled: ScheduledRequest, replica: ReplicaState, now: float) -> bool:
        """Return whether another replica accepts the request, and its own shows no reason to wait."""
        if replica.reports_queue and not replica.hang_detector.is_silent_since(scheduled.dispatched_at):
            return False
        elsewhere = frozenset({replica.spec.replica_id})
        queries = (
            CapacityQuery(pool, scheduled.hold.tokens, avoided=elsewhere, destination=scheduled.destination)
            for pool in scheduled.pools
        )
        return any(self._ledger.open.best(query, now) is not None for query in queries)


def _is_waiting(scheduled: ScheduledRequest, hold: Hold) -> bool:
    """Return whether an attempt still waits for its first token."""
    return scheduled.hold is hold and not scheduled.started
