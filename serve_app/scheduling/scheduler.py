"""Which request goes next, to which replica, and when: the whole decision, as a machine without a clock.

Theory of operation. `handle(event, now)` first ends what time has ended (queue times, old reports), then
applies the event, then dispatches until no head of any lane fits anywhere. It returns what to do, in order.
`next_wakeup()` says when time alone will change something. The live actor and the simulator do the same three
things with it: feed events, carry out commands, arm the next wake-up.

A request is in exactly one of three places: in the waiting room, on a replica's books in the ledger, or
concluded and forgotten.

Rules:
- A decision is its reservation: `Dispatch` is returned with the ledger already holding the request's tokens.
- Late binding: a request waits for *a pool it may go to*. Pools first serve those at home in them, then those
  that spill.
- A head that does not fit holds up the lane behind it, or small requests would starve large ones for ever.
- An event about a request that is not known, or not where the event says, changes nothing: it crossed another
  on its way.
"""

from collections.abc import Callable, Mapping
from typing import Any

from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Request
from serve_app.routing.estimation.estimate import TokenEstimator
from serve_app.routing.ledger import ReplicaLedger
from serve_app.routing.pools import PoolRouter
from serve_app.routing.prefill_cost import PrefillCost
from serve_app.routing.prefix.affinity import PrefixAffinity
from serve_app.routing.replica_state import Hold, ReplicaState
from serve_app.scheduling import events as ev
from serve_app.scheduling.admission.admission import Admission, Refusal, too_long
from serve_app.scheduling.commands import Command, Conclude, Dispatch, ReportFresh, ReportStale
from serve_app.scheduling.dispatch.backpressure import EngineBackpressure
from serve_app.scheduling.dispatch.dispatcher import Dispatcher
from serve_app.scheduling.dispatch.engine_priority import EnginePriorities
from serve_app.scheduling.dispatch.placement import Placement
from serve_app.scheduling.isolation.feedback_delay import NewsLag
from serve_app.scheduling.isolation.prefill_isolation import PrefillIsolation
from serve_app.scheduling.isolation.prefill_watch import PrefillWatch
from serve_app.scheduling.policies import make_policy
from serve_app.scheduling.policies.inputs import PolicyInputs
from serve_app.scheduling.queue_snapshot import Census, take_census
from serve_app.scheduling.queueing.expiry import ExpiryHeap
from serve_app.scheduling.queueing.request_queue import WaitingRoom
from serve_app.scheduling.request import NOTHING, Entry
from serve_app.scheduling.request_table import EntryBook
from serve_app.scheduling.retuning import checked_retuning
from serve_app.scheduling.settings import SchedulerSettings


class Scheduler:
    """The scheduler of one model.

    Args:
        now: time at which it begins, in seconds on the clock that its events will use.

    Attributes:
        room: the requests that wait.
        ledger: the replicas and what they have been promised.
        estimator: what has been learned of bytes per token and of output lengths.
        affinity: which replicas have probably cached which prompts.
        isolation: what counts as a long prefill.
        dispatcher: the order of service.
        prefill_cost: how long prefills take.
        admission: who may wait, and how long that is predicted to take.
        router: which pools a request may go to.
    """

    def __init__(self, settings: SchedulerSettings, *, now: float = 0.0) -> None:
        self.settings = settings
        self.prefill_cost = PrefillCost(settings.prefill_cost)
        inputs = PolicyInputs(prefill_cost=self.prefill_cost, ewsjf=settings.ewsjf)
        self._policy = make_policy(settings.policy, inputs)
        self.room = WaitingRoom(self._policy, settings.fairness)
        backpressure = settings.backpressure_in_force
        self._backpressure = EngineBackpressure(backpressure, self.prefill_cost)
        self.ledger = ReplicaLedger(
            backpressure=self._backpressure,
            report_limit_s=backpressure.report_limit_s,
            kv_fill_ratio=backpressure.kv_fill_ratio,
        )
        self._engine_priorities = EnginePriorities(settings.engine_priority)
        self.estimator = TokenEstimator(settings.estimator)
        self._prefills = PrefillWatch(self.ledger, self.prefill_cost, lag := NewsLag())
        self.isolation = PrefillIsolation(settings.isolation, lag, wanted=self._policy.isolates)
        self.affinity = PrefixAffinity(
            settings.affinity,
            self.prefill_cost,
            lambda category: self.estimator.bytes_per_token(category)[0],
        )
        placement = Placement(self.ledger, self.isolation, self.affinity)
        self.dispatcher = Dispatcher(settings, self.room, self.ledger, placement, self._policy)
        self.router = PoolRouter(settings.routing, self.ledger.context_limit)
        self.admission = Admission(settings, self.room, now)
        self._expiry = ExpiryHeap()
        self._entries = EntryBook()
        self._sequence = 0
        self._now = now
        self._commands: list[Command] = []
        self._handlers: Mapping[type, Callable[[Any, float], None]] = {
            ev.Arrived: self._arrived,
            ev.Resumed: self._resumed,
            ev.FirstToken: self._first_token,
            ev.Finished: self._finished,
            ev.DispatchFailed: self._dispatch_failed,
            ev.Cancelled: self._cancelled,
            ev.GatewayLost: self._gateway_lost,
            ev.ReplicaJoined: self._replica_joined,
            ev.ReplicaReported: self._replica_reported,
            ev.ReplicaLost: self._replica_lost,
            ev.PartitionChanged: self._partition_changed,
            ev.Retuned: self._retuned,
            ev.Woke: lambda _event, _now: None,
        }

    def handle(self, event: ev.Event, now: float) -> list[Command]:
        """Fold one event in and return what to do about it, in order.

        Args:
            now: seconds; never less than at the call before.

        Raises:
            ValueError: time went back.
        """
        if now < self._now:
            raise ValueError(
                f"time went back from {self._now!r} to {now!r}: feed events in the order of one clock"
            )
        self._now = now
        commands: list[Command] = []
        self._commands = commands
        self._end_what_time_has_ended(now)
        self._handlers[type(event)](event, now)
        self._dispatch(now)
        return commands

    def next_wakeup(self) -> float | None:
        """When time alone changes something; None when only an event can."""
        expiry, report = self._expiry.next_at(), self.ledger.next_report_expiry()
        times = (expiry, report, self._prefills.next_at())
        return min((time for time in times if time is not None), default=None)

    def entry(self, request_id: str) -> Entry | None:
        """The request as it stands, None when it is unknown or over."""
        return self._entries.get(request_id)

    def entries_of(self, gateway_id: str) -> list[Entry]:
        """All requests of one gateway, waiting and running."""
        return self._entries.of_gateway(gateway_id)

    def census(self, now: float) -> Census:
        """Who waits where, and why; for people."""
        return take_census(self.room, self.dispatcher, self._policy, self.router.b_short_tokens, now)

    def __len__(self) -> int:
        """Requests that are waiting or running."""
        return len(self._entries)

    def __repr__(self) -> str:
        running = len(self._entries) - len(self.room)
        return f"<Scheduler {self.settings.model} waiting={len(self.room)} running={running} {self.ledger}>"

    # Events about requests

    def _arrived(self, event: ev.Arrived, now: float) -> None:
        request = event.request
        if request.request_id in self._entries:
            return
        entry = self._admit(request, now)
        if entry is None:
            return
        objection = self.admission.objection(entry, now)
        if objection is not None and not self.dispatcher.fits(entry, now):
            self._conclude_refused(request, self.admission.turn_away(entry, objection, now))
            return
        self._remember(entry)
        self._queue(entry)
        if objection is not None:
            # It may go at once: those that wait may be waiting for another pool.
            self._dispatch(now)
            if entry.queued:
                self._refuse_waiting(entry, self.admission.turn_away(entry, objection, now))

    def _admit(self, request: Request, now: float) -> Entry | None:
        refusal = self.admission.refuse(request, now)
        estimate = self.estimator.estimate(request)
        pools = () if refusal else self.router.route(request, estimate)
        if not refusal and not pools:
            refusal = too_long(request, estimate, self.router.longest_context())
        if refusal:
            self._conclude_refused(request, refusal)
            return None
        self._sequence += 1
        entry = Entry(request, estimate, self._sequence, pools, expires_at=request.expires_at)
        entry.cached_tokens = self.affinity.cached_tokens(request, estimate.expected_prompt_tokens)
        self.isolation.observe(entry.prefill_tokens)
        entry.grade = self.isolation.grade(estimate.expected_prompt_tokens)
        if entry.grade == 0 and request.priority is not PriorityClass.BATCH:
            self.isolation.short_came(now)
        # It was dispatched by a scheduler before this one, and came back to its gateway meanwhile.
        entry.returned = request.attempts > 0
        entry.attempts = min(request.attempts, self.settings.max_attempts - 1)
        return entry

    def _resumed(self, event: ev.Resumed, now: float) -> None:
        """The gateway that holds the request is right about where it runs."""
        entry = self._entries.get(event.request.request_id)
        if entry is None:
            estimate = self.estimator.estimate(event.request)
            self._sequence += 1
            entry = Entry(event.request, estimate, self._sequence, self.settings.routing.pools[:1])
            self._remember(entry)
        elif entry.replica_id == event.replica_id:
            if event.started:
                self._start(entry, now)
            return
        else:
            self._take_from_its_place(entry, now)
        self._hold(entry, event.replica_id, Hold(entry.estimate.expected_tokens), now, resumed=event)

    def _first_token(self, event: ev.FirstToken, now: float) -> None:
        entry = self._entries.get(event.request_id)
        if entry is not None and entry.replica_id is not None:
            self._start(entry, now)

    def _finished(self, event: ev.Finished, now: float) -> None:
        entry = self._entries.get(event.request_id)
        if entry is None:
            return
        # The count of an answer that broke off would teach that answers are short.
        if event.outcome is Outcome.COMPLETED and event.usage is not None:
            self.estimator.observe(entry.request, event.usage)
            self.room.settle(entry, event.usage)
        dispatched = entry.replica_id is not None
        self._take_from_its_place(entry, now)
        self._conclude(entry.request, event.outcome, dispatched=dispatched)

    def _cancelled(self, event: ev.Cancelled, now: float) -> None:
        entry = self._entries.get(event.request_id)
        if entry is not None:
            dispatched = entry.replica_id is not None
            self._take_from_its_place(entry, now)
            self._conclude(entry.request, Outcome.CANCELLED, dispatched=dispatched)

    def _gateway_lost(self, event: ev.GatewayLost, now: float) -> None:
        for entry in self.entries_of(event.gateway_id):
            self._cancelled(ev.Cancelled(entry.request.request_id), now)

    def _dispatch_failed(self, event: ev.DispatchFailed, now: float) -> None:
        entry = self._entries.get(event.request_id)
        if entry is None or entry.replica_id != event.replica_id:
            return
        limit = self.ledger[event.replica_id].spec.max_model_len
        self._release(entry, now, ran=False)
        self.room.refund(entry)
        if event.failure is ev.DispatchFailure.TOO_LONG:
            entry.above_tokens = max(entry.above_tokens, limit)
        else:
            self.ledger.shun(event.replica_id, now)
        entry.attempts += event.failure is ev.DispatchFailure.LOST
        if entry.attempts >= self.settings.max_attempts:
            reason = event.message or "the connection broke before the answer began"
            message = f"{entry.attempts} replicas in a row failed under this request; the last: {reason}"
            self._conclude(entry.request, Outcome.FAILED, dispatched=True, message=message)
        else:
            self._put_back(entry, event.message, now)

    def _put_back(self, entry: Entry, message: str, now: float) -> None:
        """To the front of its queue, with its whole time before it again: it had been served in time."""
        request = entry.request
        # Routed again: an engine may have found it too long, and pools may have changed while it ran.
        entry.pools = self.router.route(request, entry.estimate, above_tokens=entry.above_tokens)
        if not entry.pools:
            refusal = too_long(request, entry.estimate, self.router.longest_context())
            self._conclude(
                entry.request, refusal.outcome, dispatched=True, message=message or refusal.message
            )
            return
        entry.returned, entry.prediction = True, None
        entry.cached_tokens = self.affinity.cached_tokens(request, entry.estimate.expected_prompt_tokens)
        entry.expires_at = now + (request.expires_at - request.arrived_at)
        self._queue(entry)

    # Events about replicas

    def _replica_joined(self, event: ev.ReplicaJoined, now: float) -> None:
        self.ledger.join(event.spec, now)
        self.affinity.join(event.spec)
        self._replicas_changed(now)

    def _replica_lost(self, event: ev.ReplicaLost, now: float) -> None:
        self.ledger.lose(event.replica_id, now)
        self.affinity.lose(event.replica_id)
        self._replicas_changed(now)

    def _replica_reported(self, event: ev.ReplicaReported, now: float) -> None:
        if self.ledger.report(event.replica_id, event.report, now):
            self._commands.append(ReportFresh(replica_id=event.replica_id))
        if (moved := self.router.adapt(self.ledger, now)) is not None:
            self._commands.append(moved)
            self._route_anew()

    def _replicas_changed(self, now: float) -> None:
        self.admission.replicas_changed(self.ledger.joined, now)
        self._route_anew()

    def _route_anew(self) -> None:
        """Context limits or the border of the pools may be others now; nobody who waits stays misrouted."""
        for entry in list(self.room):
            pools = self.router.route(entry.request, entry.estimate, above_tokens=entry.above_tokens)
            if not pools:
                refusal = too_long(entry.request, entry.estimate, self.router.longest_context())
                self._refuse_waiting(entry, refusal)
            elif pools != entry.pools:
                self.room.reroute(entry, pools)

    # Time

    def _end_what_time_has_ended(self, now: float) -> None:
        for replica_id, age_s in self.ledger.expire_reports(now):
            self._commands.append(ReportStale(replica_id=replica_id, age_s=age_s))
        self._prefills.end_overdue(now)
        self.admission.predictor.drain.time_passed(len(self.room), now)
        for entry in self._expiry.pop_expired(now):
            self.room.remove(entry)
            waited_s = now - entry.request.arrived_at
            bare = not self.ledger.joined
            reason = "no replica was available" if bare else "its turn did not come"
            self._conclude(
                entry.request,
                Outcome.REJECTED_NO_REPLICA if bare else Outcome.EXPIRED,
                message=f"the request waited {waited_s:.1f} s in the queue and {reason}",
                retry_after_s=self.admission.retry_after_expiry_s(entry, now),
            )

    # Dispatch

    def _partition_changed(self, event: ev.PartitionChanged, _now: float) -> None:
        if self._policy.replace_partition(event.partition):
            self.room.queue_anew()

    def _retuned(self, event: ev.Retuned, now: float) -> None:
        """Weights, isolation and backpressure; the ledger's own limits are not retunable."""
        self.settings = settings = checked_retuning(self.settings, event.settings)
        self._policy.retune(settings.ewsjf)
        self.isolation.retune(settings.isolation)
        self._backpressure.retune(settings.backpressure_in_force)
        self.ledger.limits_changed(now)

    def _dispatch(self, now: float) -> None:
        self.dispatcher.run(now, lambda entry, replica, hold: self._send(entry, replica, hold, now))

    def _send(self, entry: Entry, replica: ReplicaState, hold: Hold, now: float) -> None:
        self.room.remove(entry)
        self.admission.predictor.dispatched(entry, now)
        entry.prefilled_alone = replica.unstarted == 0
        entry.cached_tokens = entry.estimate.expected_prompt_tokens - hold.prefill_tokens
        self._hold(entry, replica.spec.replica_id, hold, now)
        self._prefills.sent(entry, now)
        self._commands.append(
            Dispatch(
                request_id=entry.request.request_id,
                gateway_id=entry.request.gateway_id,
                replica_id=replica.spec.replica_id,
                pool=replica.spec.pool,
                length_queue=entry.length_queue,
                estimated_tokens=entry.estimate.budget_tokens,
                queue_wait_s=now - entry.request.arrived_at,
                engine_priority=entry.engine_priority,
            )
        )

    # The three places of a request

    def _remember(self, entry: Entry) -> None:
        self._entries.add(entry)
        entry.counted_at = self.router.came(entry.estimate)

    def _queue(self, entry: Entry) -> None:
        self.room.add(entry)
        self._expiry.add(entry)
        self.dispatcher.queued(entry)

    def _hold(
        self, entry: Entry, replica_id: str, hold: Hold, now: float, *, resumed: ev.Resumed | None = None
    ) -> None:
        entry.replica_id, entry.hold, entry.dispatched_at = replica_id, hold, now
        entry.started = resumed is not None and resumed.started
        entry.engine_priority = self._engine_priorities.sent(entry.request)
        self.ledger.hold(replica_id, hold, now, seen=resumed is not None, started=entry.started)
        self.affinity.sent(replica_id, entry.request)
        self.room.charge(entry)
        entry.dispatch_number = self.ledger[replica_id].dispatches

    def _start(self, entry: Entry, now: float) -> None:
        if entry.started or entry.replica_id is None:
            return
        entry.started = True
        self._prefills.first_token(entry, now)
        self.ledger.start(entry.replica_id, now)

    def _release(self, entry: Entry, now: float, *, ran: bool) -> None:
        assert entry.replica_id is not None
        self._engine_priorities.left(entry.request)
        self.ledger.release(entry.replica_id, entry.hold, now, started=entry.started, ran=ran)
        entry.replica_id, entry.hold, entry.started = None, NOTHING, False

    def _take_from_its_place(self, entry: Entry, now: float) -> None:
        if entry.queued:
            self.room.remove(entry)
            self._expiry.prune(len(self.room))
        else:
            self._release(entry, now, ran=True)

    # Conclusions

    def _refuse_waiting(self, entry: Entry, refusal: Refusal) -> None:
        self.room.remove(entry)
        self._expiry.prune(len(self.room))
        self._conclude_refused(entry.request, refusal)

    def _conclude_refused(self, request: Request, refusal: Refusal) -> None:
        self._conclude(request, refusal.outcome, message=refusal.message, retry_after_s=refusal.retry_after_s)

    def _conclude(
        self,
        request: Request,
        outcome: Outcome,
        *,
        dispatched: bool = False,
        message: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        """Say how it ended. One that is refused at the door was never remembered."""
        self._forget(request)
        self._commands.append(
            Conclude(
                request_id=request.request_id,
                gateway_id=request.gateway_id,
                outcome=outcome,
                dispatched=dispatched,
                message=message,
                retry_after_s=retry_after_s,
            )
        )

    def _forget(self, request: Request) -> None:
        if (entry := self._entries.pop(request.request_id)) is not None:
            self.router.left(entry.estimate, entry.counted_at)
