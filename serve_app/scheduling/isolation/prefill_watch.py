"""The end of each prefill in flight, as observed or assumed, and what it teaches.

The first token of a streamed answer marks the end of its prefill. An answer that is not streamed has no such
mark, so its prefill counts as ended after its usual time, as learned from the others.
"""

import heapq

from serve_app.routing.ledger import ReplicaLedger
from serve_app.routing.prefill_cost import PrefillCosts
from serve_app.routing.replica_state import Hold, PrefillClass, ReplicaState
from serve_app.scheduling.isolation.feedback_delay import FeedbackDelay
from serve_app.scheduling.request import ScheduledRequest

# The end of an unobserved prefill is assumed late rather than early: a second long prefill beside a first one
# costs more than a short pause.
_USUAL_TIMES = 2.0


class PrefillWatch:
    """Ends prefills in the ledger, and teaches their cost and the feedback delay.

    Attributes:
        costs: of prefills, by pool.
    """

    def __init__(self, ledger: ReplicaLedger, costs: PrefillCosts, delay: FeedbackDelay) -> None:
        self._ledger = ledger
        self.costs = costs
        self._delay = delay
        # A heap of (assumed end, order of dispatch, request, its dispatch number).
        self._assumed: list[tuple[float, int, ScheduledRequest, int]] = []
        self._sent = 0

    def on_dispatch(self, scheduled: ScheduledRequest, now: float) -> None:
        """A request has just been dispatched."""
        if not scheduled.request.spec.streamed:
            assert scheduled.replica_id is not None
            cost = self.costs.of(self._ledger[scheduled.replica_id].spec.pool)
            self._sent += 1
            ends_at = now + _USUAL_TIMES * cost.seconds(scheduled.prefill_tokens)
            heapq.heappush(self._assumed, (ends_at, self._sent, scheduled, scheduled.dispatch_number))

    def on_first_token(self, scheduled: ScheduledRequest, replica: ReplicaState, now: float) -> None:
        """A streamed answer has begun on a replica; `ReplicaLedger.start` ends its prefill."""
        still_alone = scheduled.dispatch_number == replica.dispatches
        if scheduled.prefilled_alone and still_alone:
            self.costs.observe(replica.spec.pool, scheduled.prefill_tokens, now - scheduled.dispatched_at)
        self._learn_delay(scheduled, replica, now - scheduled.dispatched_at)

    def end_overdue(self, now: float) -> None:
        """End the prefills whose assumed time has come."""
        while self._assumed and self._assumed[0][0] <= now:
            _, _, scheduled, dispatch_number = heapq.heappop(self._assumed)
            if scheduled.dispatch_number == dispatch_number:
                self._end(scheduled, now)

    def next_at(self) -> float | None:
        """When the next prefill is assumed to end."""
        return self._assumed[0][0] if self._assumed else None

    def _learn_delay(self, scheduled: ScheduledRequest, replica: ReplicaState, seconds: float) -> None:
        if scheduled.hold.prefill_class is not PrefillClass.SHORT:
            self._delay.on_long_first_token(seconds)
        elif replica.in_flight < replica.likely_num_seqs:
            iteration_s = (replica.report.tpot_s if replica.report else None) or 0.0
            token_s = self.costs.of(replica.spec.pool).per_token_s
            self._delay.on_short_first_token(seconds - token_s * scheduled.prefill_tokens - iteration_s)

    def _end(self, scheduled: ScheduledRequest, now: float) -> None:
        hold = scheduled.hold
        if scheduled.replica_id is not None and (hold.prefill_class or hold.prefill_tokens):
            scheduled.hold = Hold(hold.tokens, quarantined=hold.quarantined)
            self._ledger.end_prefill(scheduled.replica_id, hold, now)
