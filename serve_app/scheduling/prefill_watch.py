"""When does a dispatched request's prefill end, and how long did it take?

The first token of a streamed answer says so. An answer that is not streamed shows none, so its prefill counts
as over after its usual time, as learned from the others.
"""

from dataclasses import replace

from serve_app.routing.ledger import ReplicaLedger
from serve_app.routing.prefill_cost import PrefillCost
from serve_app.scheduling.entry import Entry

# The end of an unseen prefill is guessed late rather than early: a second long prefill beside a first one
# costs more than a short pause.
_PATIENCE = 2.0


class PrefillWatch:
    """Ends long prefills in the ledger, and teaches the cost of a prefill."""

    def __init__(self, ledger: ReplicaLedger, cost: PrefillCost) -> None:
        self._ledger = ledger
        self._cost = cost
        # When, whose, and of which dispatch; the earliest first. At most a handful per replica.
        self._guesses: list[tuple[float, Entry, int]] = []

    def sent(self, entry: Entry, now: float) -> None:
        """A request has just been dispatched."""
        if entry.hold.grade and not entry.request.streamed:
            cost_s = self._cost.seconds(entry.prefill_tokens)
            self._guesses.append((now + _PATIENCE * cost_s, entry, entry.dispatch_number))
            self._guesses.sort(key=lambda guess: guess[0])

    def first_token(self, entry: Entry, now: float) -> None:
        """The answer of a running request has begun."""
        assert entry.replica_id is not None
        still_alone = entry.dispatch_number == self._ledger[entry.replica_id].dispatches
        if entry.prefilled_alone and still_alone:
            self._cost.observe(entry.prefill_tokens, now - entry.dispatched_at)
        self._end(entry, now)

    def end_overdue(self, now: float) -> None:
        """End the prefills whose guessed time has come."""
        while self._guesses and self._guesses[0][0] <= now:
            _, entry, dispatch_number = self._guesses.pop(0)
            if entry.dispatch_number == dispatch_number:
                self._end(entry, now)

    def next_at(self) -> float | None:
        """When the next guess comes due."""
        return self._guesses[0][0] if self._guesses else None

    def _end(self, entry: Entry, now: float) -> None:
        if entry.hold.grade and entry.replica_id is not None:
            grade, entry.hold = entry.hold.grade, replace(entry.hold, grade=0)
            self._ledger.end_long_prefill(entry.replica_id, grade, now)
