"""When does a dispatched request's prefill end, how long did it take, and how late do we hear of it?

The first token of a streamed answer says so. An answer that is not streamed shows none, so its prefill counts
as over after its usual time, as learned from the others.
"""

import heapq
from dataclasses import replace

from serve_app.routing.ledger import ReplicaLedger
from serve_app.routing.prefill_cost import PrefillCost
from serve_app.routing.replica_state import ReplicaState
from serve_app.scheduling.isolation.feedback_delay import NewsLag
from serve_app.scheduling.request import Entry

# The end of an unseen prefill is guessed late rather than early: a second long prefill beside a first one
# costs more than a short pause.
_PATIENCE = 2.0


class PrefillWatch:
    """Ends long prefills in the ledger, and teaches the cost of a prefill and the lag of news."""

    def __init__(self, ledger: ReplicaLedger, cost: PrefillCost, lag: NewsLag) -> None:
        self._ledger = ledger
        self._cost = cost
        self._lag = lag
        # When, in which order they were sent, whose, and of which dispatch; a heap.
        self._guesses: list[tuple[float, int, Entry, int]] = []
        self._sent = 0

    def sent(self, entry: Entry, now: float) -> None:
        """A request has just been dispatched."""
        if not entry.request.streamed:
            self._sent += 1
            ends_at = now + _PATIENCE * self._cost.seconds(entry.prefill_tokens)
            heapq.heappush(self._guesses, (ends_at, self._sent, entry, entry.dispatch_number))

    def first_token(self, entry: Entry, now: float) -> None:
        """The answer of a running request has begun."""
        assert entry.replica_id is not None
        replica = self._ledger[entry.replica_id]
        still_alone = entry.dispatch_number == replica.dispatches
        # An answer that is not streamed begins when it ends, long after its prefill.
        if entry.prefilled_alone and still_alone and entry.request.streamed:
            self._cost.observe(entry.prefill_tokens, now - entry.dispatched_at)
        if entry.request.streamed:
            self._learn_lag(entry, replica, now - entry.dispatched_at)
        self._end(entry, now)

    def end_overdue(self, now: float) -> None:
        """End the prefills whose guessed time has come."""
        while self._guesses and self._guesses[0][0] <= now:
            _, _, entry, dispatch_number = heapq.heappop(self._guesses)
            if entry.dispatch_number == dispatch_number:
                self._end(entry, now)

    def next_at(self) -> float | None:
        """When the next guess comes due."""
        return self._guesses[0][0] if self._guesses else None

    def _learn_lag(self, entry: Entry, replica: ReplicaState, seconds: float) -> None:
        if entry.hold.grade:
            self._lag.long_began(seconds)
        elif replica.in_flight < replica.spec.max_num_seqs:
            iteration_s = (replica.report.tpot_s if replica.report else None) or 0.0
            self._lag.short_began(seconds - self._cost.per_token_s * entry.prefill_tokens - iteration_s)

    def _end(self, entry: Entry, now: float) -> None:
        hold = entry.hold
        if entry.replica_id is not None and (hold.grade or hold.prefill_tokens):
            entry.hold = replace(hold, grade=0, prefill_tokens=0)
            self._ledger.end_prefill(entry.replica_id, hold, now)
