"""Requests in flight on replicas: held capacity, and learning from their answers."""

from serve_app.core import events as ev
from serve_app.core.accounting.costs import EngineTime
from serve_app.core.dispatch.backfill import Backfill
from serve_app.core.dispatch.engine_priority import EnginePriorities
from serve_app.core.dispatch.headroom import TenantHeadroom
from serve_app.core.dispatch.suspensions import Suspensions
from serve_app.core.isolation import PrefillTracker
from serve_app.core.request import NO_HOLD, ScheduledRequest
from serve_app.core.routing.kv_forecast import KvUse
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.observed.limits import AnswerStart
from serve_app.core.routing.replica_state import Hold, PrefillClass, ReplicaState
from serve_app.request import Usage

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
        scheduled.sent_as = (replica.in_flight, replica.unstarted, replica.long_prefills[0])
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
            replica.first_tokens_s.append(now - scheduled.dispatched_at)
            self._observe_start(scheduled, replica, scheduled.prefill_tokens, now)
            self._prefills.on_first_token(scheduled, replica, now)
        scheduled.hold = self._ledger.start(scheduled.replica_id, scheduled.hold, now)
        self._suspensions.on_success(scheduled, replica, now)

    def complete(self, scheduled: ScheduledRequest, usage: Usage | None, now: float) -> None:
        """Learn from a complete answer. `release` follows."""
        assert scheduled.replica_id is not None
        replica = self._ledger[scheduled.replica_id]
        if not scheduled.request.spec.streamed:
            # Without a count, the times of whole answers vary too much to be compared.
            tokens = None
            if usage is not None:
                prompt_tokens = scheduled.prefill_tokens // _PROMPT_PER_OUTPUT
                tokens = max(0, usage.output_tokens - scheduled.generated + prompt_tokens)
            self._observe_start(scheduled, replica, tokens, now)
        elif usage is not None:
            self._observe_pace(scheduled, usage.output_tokens - scheduled.generated, now)
        output_tokens = scheduled.estimate.expected_output_tokens
        if usage is not None:
            output_tokens = usage.output_tokens - scheduled.generated
        seconds = now - scheduled.dispatched_at
        if usage is not None or scheduled.request.spec.streamed:
            # Otherwise neither its length nor its wait in the engine is known.
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

    def _observe_start(
        self, scheduled: ScheduledRequest, replica: ReplicaState, tokens: int | None, now: float
    ) -> None:
        """Learn about an engine of unknown load from the start of an answer of so many tokens."""
        if replica.reports_queue:
            return
        in_flight, unstarted, long_prefills = scheduled.sent_as
        seconds, streamed = now - scheduled.dispatched_at, scheduled.request.spec.streamed
        kind: int | None = None
        if streamed:
            # A time to the first token varies less with the length than that of a whole answer.
            kind = (tokens or 0).bit_length() // 2
            if scheduled.hold.prefill_class is PrefillClass.SHORT:
                beside_long = long_prefills + replica.long_prefills[0] > 0
                replica.interference.on_start(kind, seconds, beside_long=beside_long)
        elif tokens is not None:
            kind = -tokens.bit_length()
        if replica.observed is not None:
            running = replica.in_flight - replica.unstarted + 1 if streamed else 0
            replica.observed.on_start(AnswerStart(kind, now, seconds, in_flight, unstarted, running))
        self._ledger.open.update(replica)

    def _observe_pace(self, scheduled: ScheduledRequest, output_tokens: int, now: float) -> None:
        """Learn the pace of a completed stream. With several choices, the pace of each one is unknown."""
        began_at, replica_id = scheduled.started_at, scheduled.replica_id
        if began_at is None or replica_id is None or scheduled.request.spec.choices != 1 or output_tokens < 2:
            return
        self._ledger[replica_id].pace.record((now - began_at) / (output_tokens - 1), now)


def _awaits_first_token(scheduled: ScheduledRequest) -> bool:
    """Return whether a first token of a dispatched request is still expected."""
    return scheduled.request.spec.streamed and not scheduled.started
