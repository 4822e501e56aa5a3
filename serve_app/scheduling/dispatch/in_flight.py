"""Requests on replicas: what is held for each, from its dispatch to its end, and what its answer teaches."""

from serve_app.request import Usage
from serve_app.routing.ledger import ReplicaLedger
from serve_app.routing.replica_state import Hold
from serve_app.scheduling import events as ev
from serve_app.scheduling.costs.engine_time import EngineTime
from serve_app.scheduling.dispatch.engine_priority import EnginePriorities
from serve_app.scheduling.dispatch.suspensions import Suspensions
from serve_app.scheduling.isolation.prefill_watch import PrefillWatch
from serve_app.scheduling.request import NOTHING, ScheduledRequest

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
        suspensions: Suspensions,
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
        self._ledger.observe_pace(replica_id, (now - began_at) / (output_tokens - 1), now)


def _owes(scheduled: ScheduledRequest) -> bool:
    """Whether the first token of a dispatched request is still to come, and will be told."""
    return scheduled.request.spec.streamed and not scheduled.started
