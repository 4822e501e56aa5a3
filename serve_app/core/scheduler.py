"""The scheduler: decides which request is dispatched next, to which replica, and when. It has no clock.

Theory of operation. `handle(event, now)` first processes what has timed out (queue timeouts, stale reports),
then applies the event, then dispatches until no head of any sub-queue fits anywhere. It returns the commands,
in order. `next_wakeup()` returns when time alone will change something. The live scheduler and the simulator
do the same three things with it: feed events, execute commands, schedule the next wake-up.

A request is in exactly one of three states: queued, running on a replica in the ledger, or concluded and
removed.

Rules:
- A dispatch holds its capacity: `Dispatch` is returned when the ledger already holds the request's tokens.
- Late binding: a request waits for *a pool that may serve it*. Each pool first serves requests whose home
  pool it is, then those that spill.
- A head that does not fit blocks the sub-queue behind it. Otherwise small requests would starve large ones.
- An event about an unknown request, or about one in another state than the event implies, is ignored: it
  crossed another event in transit. Only the end of a request counts in every state, because its gateway
  decides about it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from serve_app.core import commands as cmd
from serve_app.core import events as ev
from serve_app.core.accounting.wait_causes import WaitCause
from serve_app.core.accounting.waits import WaitUpdater, record_attempt, wait_breakdown
from serve_app.core.admission.admission import Admission
from serve_app.core.admission.wait_prediction import SlotRate
from serve_app.core.dispatch.backfill import Backfill, TenantHeadroom
from serve_app.core.dispatch.backpressure import EngineBackpressure
from serve_app.core.dispatch.dispatcher import Dispatcher, PassThrough, Placement
from serve_app.core.dispatch.in_flight import (
    InFlight,
    SlowStarts,
    Suspensions,
    record_put_back,
    restore_put_backs,
    retry_limit_conclusion,
)
from serve_app.core.dispatch.promotion import EnginePriorities
from serve_app.core.isolation import FeedbackDelay, PrefillIsolation, PrefillTracker
from serve_app.core.latency_targets import LatencyTargets
from serve_app.core.policies import POLICIES, MakePolicy, make_policy
from serve_app.core.policies.protocol import PolicyInputs
from serve_app.core.programs.program_scheduler import ProgramScheduler
from serve_app.core.queueing.expiry import ExpiryHeap, earliest
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest, of_gateway
from serve_app.core.retuning import checked_retuning
from serve_app.core.routing.estimation.estimate import TokenEstimate, TokenEstimator
from serve_app.core.routing.ledger import ContextLearning, ReplicaLedger
from serve_app.core.routing.pools import ArrivedWork, PoolRouter
from serve_app.core.routing.prefill_cost import PrefillCosts
from serve_app.core.routing.prefix import PrefixAffinity
from serve_app.core.routing.replica_state import ReplicaState, Running
from serve_app.core.routing.request_routing import Rejections, RequestRouting
from serve_app.core.settings import SchedulerSettings
from serve_app.errors import Conclusion, Outcome
from serve_app.request import PriorityClass, Request


class Scheduler:
    """The scheduler of one model: events in, commands out.

    Args:
        now: start time, in seconds on the clock of its events.
        policies: the policies that `settings.policy` may name; simulations add baselines.
        estimator: replaces the estimator that the settings describe; simulations add noise to it.

    Attributes:
        queue: the queued requests.
        ledger: the replicas, with their holds and reservations.
        estimator: token estimates, with learned bytes per token and output lengths.
        suspensions: suspends failing replicas.
        affinity: the prefix caches of replicas.
        isolation: the prefill classes and their limits.
        dispatcher: selects the next request and its replica.
        headroom: capacity that tenants beyond their share leave to the others.
        targets: the latency targets of requests.
        in_flight: the requests on replicas, and their engine time.
        prefill_costs: learned duration of prefills in each pool.
        pass_through: selects the requests that bypass the scheduler.
        admission: decides which requests may queue, and predicts their wait.
        router: selects the pools that may serve a request.
        arrived: the work that has arrived so far, for autoscaling.
        waits: attributes waits to their causes.
        programs: binds the turns of programs to the replicas of their contexts, and parks others.
        requests: all queued and running requests, by id.
        ended: the requests that the last call of `handle` concluded, by id.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        now: float = 0.0,
        policies: Mapping[str, MakePolicy] = POLICIES,
        estimator: TokenEstimator | None = None,
    ) -> None:
        self.settings = settings
        self.prefill_costs = PrefillCosts()
        inputs = PolicyInputs(prefill_costs=self.prefill_costs, ewsjf=settings.ewsjf)
        self._policy = make_policy(settings.policy, inputs, policies)
        self.queue = RequestQueue(self._policy, settings.fairness, settings.delay_bound, settings.floors)
        backpressure = settings.effective_backpressure
        self._backfill = Backfill(settings.backfill, self.prefill_costs)
        self._backpressure = EngineBackpressure(backpressure, self.prefill_costs, self._backfill)
        self.ledger = ReplicaLedger(
            backpressure=self._backpressure, report_limit_s=backpressure.report_limit_s
        )
        self.estimator = estimator or TokenEstimator(settings.estimator)
        self._prefills = PrefillTracker(self.ledger, self.prefill_costs, lag := FeedbackDelay())
        self.isolation = PrefillIsolation(settings.isolation, lag, isolates=self._policy.isolates)
        self.suspensions = Suspensions(self.ledger)
        self._slow_starts = SlowStarts(self.ledger)
        priorities = EnginePriorities(settings.engine_priority)
        self.headroom = TenantHeadroom(
            self.ledger, self.queue.weights, is_enabled=self.queue.is_fair and self._policy.promotes
        )
        self.in_flight = InFlight(
            self.ledger, self._prefills, self.suspensions, priorities, self.headroom, self._backfill
        )
        self.affinity = PrefixAffinity(settings.affinity, self.estimator.bytes_per_token)
        costs = self.prefill_costs
        self.targets = LatencyTargets(settings.latency_targets, self.ledger, costs, self._backfill)
        placement = Placement(self.ledger, self.isolation, self.affinity, self.targets)
        self.dispatcher = Dispatcher(
            settings, self.queue, self.ledger, placement, self._policy, self.headroom
        )
        self.waits = WaitUpdater(settings.routing.pools, self.queue.waits, self.ledger, self.isolation)
        self.pass_through = PassThrough(settings.active_share, self.ledger)
        self.router = PoolRouter(settings.routing, self.ledger.contexts.of, self.ledger.contexts.reported)
        self._contexts = ContextLearning(self.ledger)
        self.arrived = ArrivedWork(settings.routing.pools)
        slots = SlotRate(self.queue, self.ledger, self.prefill_costs, self._backpressure)
        self.admission = Admission(settings, self.queue, slots, self.targets, now)
        self._routing = RequestRouting(
            self.router, self.admission, self.queue, self.ledger, settings.no_replica_grace_s
        )
        self.programs = ProgramScheduler(
            settings.programs,
            self.queue,
            self.ledger,
            self.affinity,
            self.prefill_costs,
            settings.promotion,
        )
        self._expiry = ExpiryHeap()
        self.requests: dict[str, ScheduledRequest] = {}
        self.ended: dict[str, ScheduledRequest] = {}
        self._sequence = 0
        self._now = now
        self._commands: list[cmd.Command] = []
        self._handlers: Mapping[type, Callable[[Any, float], None]] = {
            ev.Arrived: self._on_arrival,
            ev.Resumed: self._on_resume,
            ev.FirstToken: self._on_first_token,
            ev.Finished: self._on_finish,
            ev.DispatchFailed: self._on_dispatch_failure,
            ev.Cancelled: self._on_cancel,
            ev.GatewayLost: self._on_gateway_loss,
            ev.ReplicaJoined: self._on_replica_join,
            ev.ReplicaReported: self._on_report,
            ev.ReplicaLost: self._on_replica_loss,
            ev.PartitionChanged: self._on_partition_change,
            ev.Retuned: self._on_retune,
            ev.ActiveShareChanged: lambda event, _now: self.pass_through.change(event.active_share),
            ev.Woke: lambda _event, _now: None,
        }

    def handle(self, event: ev.Event, now: float) -> list[cmd.Command]:
        """Apply one event and return the resulting commands, in order.

        Args:
            now: time in seconds, not less than in the previous call.

        Raises:
            ValueError: the time decreased.
        """
        if now < self._now:
            raise ValueError(
                f"time decreased from {self._now!r} to {now!r}: feed events in the order of one clock"
            )
        self._now = now
        self.queue.set_time(now)
        commands = self._commands = []
        self.ended = {}
        self._process_timeouts(now)
        self._handlers[type(event)](event, now)
        self._release_parked(now)
        self._dispatch(now)
        self.waits.update(now)
        self._revoke(now)
        return commands

    def next_wakeup(self) -> float | None:
        """Return when time alone changes something, or None if only an event can."""
        report, outage = self.ledger.next_report_expiry(), self.admission.outages.next_at()
        routing, start = self._routing.next_at(), self._slow_starts.next_at()
        if not self.queue.waiting:
            return earliest(report, outage, routing, start)
        timeout, backoff = self._expiry.next_at(), self.queue.next_backoff_end()
        prefill, programs = self._prefills.next_at(), self.programs.next_at()
        floors = self.queue.floors
        floor = floors.next_due_at(self._now) if floors.are_used else None
        return earliest(timeout, backoff, report, outage, routing, start, prefill, programs, floor)

    @property
    def now(self) -> float:
        """Time of the last event, in seconds on its clock."""
        return self._now

    def find(self, request_id: str) -> ScheduledRequest | None:
        """Return the current state of a request, or None if it is unknown or has ended."""
        return self.requests.get(request_id)

    def __len__(self) -> int:
        """Return the number of queued and running requests."""
        return len(self.requests)

    def __repr__(self) -> str:
        running = len(self.requests) - len(self.queue)
        return f"<Scheduler {self.settings.model} waiting={len(self.queue)} running={running} {self.ledger}>"

    # Events about requests

    def _on_arrival(self, event: ev.Arrived, now: float) -> None:
        request = event.request
        if request.request_id in self.requests:
            return
        scheduled = self._admit(request, now)
        if scheduled is None:
            return
        choice = self.pass_through.choice(scheduled)
        rejection = self.admission.queue_rejection(scheduled, now) if choice is None else None
        if scheduled.target is not None and choice is None:
            waits = not self.dispatcher.fits(scheduled, now)
            missed = self.admission.target_rejection(scheduled, now, waits=waits)
            if missed is not None:
                self._conclude(scheduled, missed)
                return
        if rejection is not None and not self.dispatcher.fits(scheduled, now):
            self._conclude(scheduled, self.admission.reject_queueing(scheduled, rejection, now))
            return
        self._register(scheduled)
        self.programs.on_arrival(scheduled, now)
        may_skip_queue = not (choice or rejection or self.queue.waiting or scheduled.parked)
        if may_skip_queue and (immediate := self.dispatcher.choose_immediate(scheduled, now)) is not None:
            self._send(scheduled, immediate, now)
            self.dispatcher.on_immediate_dispatch(scheduled, now)
            return
        self._enqueue(scheduled)
        if choice is not None:
            self._send(scheduled, choice, now)
        elif rejection is not None:
            # It may still fit now, because the queued requests may wait for another pool.
            self._release_parked(now)
            self._dispatch(now)
            if scheduled.queued:
                self._reject_waiting(scheduled, self.admission.reject_queueing(scheduled, rejection, now))

    def _admit(self, request: Request, now: float) -> ScheduledRequest | None:
        estimate = self.estimator.estimate(request)
        pools, rejection = self._routing.route(request, estimate, now)
        if rejection := self.admission.arrival_rejection(request, estimate, rejection, now):
            if rejection.outcome is Outcome.REJECTED_NO_REPLICA:
                self.arrived.add(pools, request, estimate)
            rejected = ScheduledRequest(request, estimate, self._sequence, pools, request.expires_at)
            self._conclude(rejected, rejection)
            return None
        cached_tokens = self.affinity.cached_tokens(request, estimate.expected_prompt_tokens)
        self.arrived.add(pools, request, estimate, cached_tokens)
        return self._scheduled(request, estimate, pools, now, cached_tokens)

    def _scheduled(
        self,
        request: Request,
        estimate: TokenEstimate,
        pools: tuple[str, ...],
        now: float,
        cached_tokens: int = 0,
    ) -> ScheduledRequest:
        """Return a request that is new to this scheduler, with what an earlier one knew about it."""
        self._sequence += 1
        scheduled = ScheduledRequest(
            request, estimate, self._sequence, pools, request.expires_at, cached_tokens=cached_tokens
        )
        self.isolation.on_arrival(scheduled, now)
        self.targets.on_arrival(scheduled)
        restore_put_backs(scheduled, self.settings)
        return scheduled

    def _on_resume(self, event: ev.Resumed, now: float) -> None:
        """Resume a request on its replica. The gateway that holds it is authoritative about its state."""
        scheduled = self.requests.get(event.request.request_id)
        if scheduled is None:
            estimate, home = self.estimator.estimate(event.request), self.settings.routing.pools[:1]
            scheduled = self._scheduled(event.request, estimate, home, now)
            self._register(scheduled)
        elif scheduled.replica_id == event.replica_id:
            if event.started:
                self.in_flight.start(scheduled, now)
            return
        else:
            self._detach(scheduled, now)
            scheduled.dispatch = None
        replica, tokens = self.ledger.of(event.replica_id, now), scheduled.estimate.expected_tokens
        running = Running(replica, tokens, started=event.started)
        self.in_flight.hold(scheduled, running, now, seen=True)
        self._on_held(scheduled, replica)

    def _on_first_token(self, event: ev.FirstToken, now: float) -> None:
        scheduled = self.requests.get(event.request_id)
        if scheduled is not None:
            self.in_flight.start(scheduled, now)
            self.programs.on_first_token(scheduled, now)
            if scheduled.target is not None and scheduled.running is not None:
                self.targets.on_first_token(scheduled, scheduled.running.replica, now)

    def _on_finish(self, event: ev.Finished, now: float) -> None:
        scheduled = self.requests.get(event.request_id)
        if scheduled is None:
            return
        # No prompt is empty: a server that counts none does not count.
        scheduled.usage = usage = event.usage if event.usage and event.usage.prompt_tokens > 0 else None
        scheduled.seen_tokens = event.seen_tokens
        # The count of an interrupted answer would bias output lengths down.
        if event.outcome is Outcome.COMPLETED and usage is not None:
            self.estimator.observe(scheduled.request, usage)
            self.queue.settle(scheduled, usage)
            self._on_contexts_learned(self._contexts.on_completion(scheduled, usage), now)
        running = scheduled.running
        if running is not None and event.outcome is Outcome.COMPLETED:
            self.in_flight.complete(scheduled, running, usage, now)
        self._detach(scheduled, now)
        self._conclude(scheduled, Conclusion(event.outcome), dispatched=running is not None)

    def _on_cancel(self, event: ev.Cancelled, now: float) -> None:
        scheduled = self.requests.get(event.request_id)
        if scheduled is not None:
            dispatched = scheduled.running is not None
            self._detach(scheduled, now)
            self._conclude(scheduled, Conclusion(Outcome.CANCELLED), dispatched=dispatched)

    def _on_gateway_loss(self, event: ev.GatewayLost, now: float) -> None:
        for scheduled in of_gateway(self.requests, event.gateway_id):
            if scheduled.running is None:
                self._on_cancel(ev.Cancelled(scheduled.request.request_id), now)

    def _on_dispatch_failure(self, event: ev.DispatchFailed, now: float) -> None:
        scheduled = self.requests.get(event.request_id)
        running = None if scheduled is None else scheduled.running
        if scheduled is None or running is None or scheduled.replica_id != event.replica_id:
            return
        replica = running.replica
        if event.failure is ev.DispatchFailure.TOO_LONG:
            self._on_contexts_learned(self._contexts.on_rejection(scheduled, event.stated_context), now)
        is_revoked = event.failure is ev.DispatchFailure.REVOKED
        was_moved = scheduled.attempts.moved_from == event.replica_id
        cause = WaitCause.REVOKED if is_revoked and not was_moved else WaitCause.EARLIER_ATTEMPT
        record_attempt(scheduled, cause, now)
        if event.generated_tokens != scheduled.attempts.generated:
            scheduled.attempts = replace(scheduled.attempts, generated=event.generated_tokens)
            scheduled.expect(self.estimator.estimate(scheduled.request).after(event.generated_tokens))
        record_put_back(scheduled, event, replica, now)
        self._release(scheduled, running, now, ran=is_revoked)
        if event.failure is not ev.DispatchFailure.ENGINE_ERROR:
            # The tenant remains charged after an engine error, because the engine has worked for it.
            self.queue.refund(scheduled, running)
        self.suspensions.on_failure(event, scheduled.dispatched_at, now)
        many_lost = self.suspensions.many_lost(now)
        conclusion = retry_limit_conclusion(scheduled, self.settings, many_lost=many_lost)
        if conclusion := conclusion or self.admission.overdue_conclusion(scheduled, now):
            self._conclude(scheduled, conclusion, dispatched=True)
        else:
            self._put_back(scheduled, event.message, replica.lost_at, now)

    def _put_back(self, scheduled: ScheduledRequest, message: str, lost_at: float, now: float) -> None:
        """Queue a put-back request again, as `record_put_back` has recorded."""
        # Route it again, because an engine may have rejected it as too long, and pools may have changed
        # since.
        scheduled.pools, rejection = self._routing.route_again(scheduled, now, lost_at)
        if rejection:
            if rejection.outcome is Outcome.REJECTED_TOO_LONG and message:
                rejection = replace(rejection, message=message)
            self._conclude(scheduled, rejection, dispatched=True)
            return
        prompt_tokens, scheduled.prediction = scheduled.estimate.expected_prompt_tokens, None
        scheduled.expect_cached(self.affinity.cached_tokens(scheduled.request, prompt_tokens))
        self.programs.on_put_back(scheduled, now)
        self._enqueue(scheduled)

    def _on_contexts_learned(self, learned: list[cmd.ContextLearned], now: float) -> None:
        if learned:
            self._commands += learned
            self._reject_all(self._routing.all_waiting(now))

    # Events about replicas

    def _on_replica_join(self, event: ev.ReplicaJoined, now: float) -> None:
        self.ledger.join(event.spec, now)
        self.affinity.join(event.spec)
        self._reject_all(self._routing.on_fleet_change(now))

    def _on_replica_loss(self, event: ev.ReplicaLost, now: float) -> None:
        self.ledger.lose(event.replica_id, now)
        self.affinity.lose(event.replica_id)
        self._backfill.on_loss(self.ledger)
        for scheduled in self.programs.on_replica_loss(event.replica_id):
            self.queue.bind(scheduled, None)
        self._reject_all(self._routing.on_fleet_change(now))

    def _on_report(self, event: ev.ReplicaReported, now: float) -> None:
        state = self.ledger.get(event.replica_id)
        was_usable = state is not None and state.is_usable
        if state is not None:
            self._backfill.on_report(state, event.report)
        if self.ledger.report(event.replica_id, event.report, now):
            self._commands.append(cmd.ReportFresh(replica_id=event.replica_id))
        if state is not None and state.is_usable and not was_usable:
            self.programs.on_replica_change()
        if state is not None and (silent_s := state.hang_detector.check(now)) is not None:
            self._commands.append(cmd.EngineSilent(replica_id=event.replica_id, silent_s=silent_s))
            self.ledger.open.update(state)
        self.admission.outages.observe(self.ledger.has_alive, now)

    # Time

    def _process_timeouts(self, now: float) -> None:
        for replica_id, age_s in self.ledger.expire_reports(now):
            self._commands.append(cmd.ReportStale(replica_id=replica_id, age_s=age_s))
            self.admission.outages.observe(self.ledger.has_alive, now)
        self._prefills.end_assumed(now)
        self.admission.predictor.on_time(self.queue.waiting, now)
        if self.admission.outages.pop_due(now) or self._routing.is_due(now):
            self._reject_all(self._routing.all_waiting(now))
            self._routing.discard_ended(now)
        if not self.queue.waiting:
            return
        for scheduled in self._expiry.pop_expired(now):
            self._dequeue(scheduled)
            self._conclude(scheduled, self.admission.expiry_conclusion(scheduled, now))
        self.queue.end_backoffs(now)
        for scheduled in self.programs.pop_unbound(now):
            self.queue.bind(scheduled, None)
        for scheduled in self.targets.pop_late(now):
            self.queue.lose_precedence(scheduled)

    # Dispatch

    def _on_partition_change(self, event: ev.PartitionChanged, _now: float) -> None:
        if self._policy.replace_partition(event.partition):
            self.queue.reassign_length_queues()

    def _on_retune(self, event: ev.Retuned, _now: float) -> None:
        """Apply retunable settings. The ledger's copies of limits are not among them."""
        self.settings = settings = checked_retuning(self.settings, event.settings)
        self._policy.retune(settings.ewsjf)
        self.isolation.retune(settings.isolation)
        self.queue.retune(settings.delay_bound)
        self._backpressure.retune(settings.effective_backpressure)
        self.ledger.on_limits_changed()

    def _release_parked(self, now: float) -> None:
        for scheduled in self.programs.release(now):
            self.queue.bind(scheduled, scheduled.resident_on)
            self.programs.on_enqueue(scheduled)

    def _dispatch(self, now: float) -> None:
        for scheduled, running in self.dispatcher.choices(now):
            self._send(scheduled, running, now)

    def _revoke(self, now: float) -> None:
        for scheduled in self._slow_starts.overdue(now):
            assert scheduled.attempts.moved_from is not None, "it is marked as moved"
            self._commands.append(_revocation(scheduled, scheduled.attempts.moved_from))
        for scheduled, replica_id in self._backfill.revocations(self.ledger, self.queue, now):
            self._commands.append(_revocation(scheduled, replica_id))

    def _send(self, scheduled: ScheduledRequest, running: Running, now: float) -> None:
        """Hold the capacity that was chosen for a request, and emit its command."""
        replica = running.replica
        if scheduled.queued:
            self._dequeue(scheduled)
        self.waits.on_dispatch(scheduled, running, now)
        self.admission.predictor.on_dispatch(scheduled, now)
        running.prefilled_alone = replica.unstarted == 0
        scheduled.expect_cached(scheduled.estimate.expected_prompt_tokens - running.prefill_tokens)
        if scheduled.target is not None:
            self.targets.on_dispatch(scheduled, replica)
        self.in_flight.hold(scheduled, running, now)
        self._on_held(scheduled, replica)
        if running.by_floor and scheduled.request.priority is PriorityClass.BATCH:
            self.arrived.add(
                scheduled.pools, scheduled.request, scheduled.estimate, scheduled.cached_tokens, by_floor=True
            )
        self._prefills.on_dispatch(scheduled, running, now)
        self._slow_starts.on_dispatch(scheduled, running, now)
        request = scheduled.request
        scheduled.dispatch = cmd.Dispatch(
            request_id=request.request_id,
            gateway_id=request.gateway_id,
            replica_id=replica.spec.replica_id,
            pool=replica.spec.pool,
            length_queue=scheduled.length_queue,
            estimated_tokens=scheduled.estimate.budget_tokens,
            queue_wait_s=now - request.arrived_at,
            engine_priority=running.engine_priority,
            rate_limits=self.admission.keys.status(request.submission.key, now),
            passed=running.bypassed,
            waited=wait_breakdown(scheduled, now),
        )
        self._commands.append(scheduled.dispatch)

    # The three states of a request

    def _register(self, scheduled: ScheduledRequest) -> None:
        self.requests[scheduled.request.request_id] = scheduled
        self.admission.keys.on_admission(scheduled, self._now)

    def _dequeue(self, scheduled: ScheduledRequest) -> None:
        self.queue.remove(scheduled)
        if scheduled.target is not None:
            self.targets.on_dequeue(scheduled)
        self.admission.predictor.on_dequeue(scheduled)

    def _enqueue(self, scheduled: ScheduledRequest) -> None:
        self.dispatcher.before_enqueue(scheduled)
        if scheduled.target is not None:
            self.targets.before_enqueue(scheduled)
        self.queue.add(scheduled)
        self._expiry.add(scheduled)
        self.admission.predictor.on_enqueue(scheduled)
        self.programs.on_enqueue(scheduled)

    def _on_held(self, scheduled: ScheduledRequest, replica: ReplicaState) -> None:
        self.affinity.on_dispatch(replica.spec.replica_id, scheduled.request)
        self.programs.on_dispatch(scheduled, replica)
        self.queue.charge(scheduled)

    def _detach(self, scheduled: ScheduledRequest, now: float) -> None:
        if scheduled.queued:
            self._dequeue(scheduled)
        elif scheduled.running is not None:
            self._release(scheduled, scheduled.running, now, ran=True)

    def _release(self, scheduled: ScheduledRequest, running: Running, now: float, *, ran: bool) -> None:
        """Release what a request holds on its replica; `ran` as in `ReplicaLedger`."""
        self.in_flight.release(scheduled, running, now, ran=ran)
        self.programs.on_release(scheduled, running.replica.spec.replica_id)
        if scheduled.target is not None:
            self.targets.on_release(scheduled, running.replica.spec.replica_id)

    def _reject_all(self, rejected: Rejections) -> None:
        """Reject the queued requests that can no longer be served, after replicas or routes have changed."""
        self.programs.on_replica_change()
        for scheduled, rejection in rejected:
            self._reject_waiting(scheduled, rejection)

    def _reject_waiting(self, scheduled: ScheduledRequest, rejection: Conclusion) -> None:
        self._dequeue(scheduled)
        self._conclude(scheduled, rejection)

    def _conclude(
        self, scheduled: ScheduledRequest, conclusion: Conclusion, *, dispatched: bool = False
    ) -> None:
        """Emit the outcome of a request. A request rejected on arrival is not in the table."""
        request, waited = scheduled.request, None
        if scheduled.target is not None:
            self.targets.on_end(scheduled, self._now)
        if self.requests.pop(request.request_id, None) is not None:
            self.admission.keys.on_end(scheduled, conclusion.outcome, self._now, dispatched=dispatched)
            if dispatched or scheduled.attempts.generated:
                self.admission.spending.on_end(scheduled, conclusion.outcome, self._now)
            self.programs.on_end(scheduled, self._now, dispatched=dispatched)
            waited = None if dispatched else wait_breakdown(scheduled, self._now)
        if request.submission.key is not None:
            conclusion = self.admission.keys.with_rate_limits(request, conclusion, self._now)
        self.ended[request.request_id] = scheduled
        self._commands.append(
            cmd.Conclude(
                request_id=request.request_id,
                gateway_id=request.gateway_id,
                conclusion=conclusion,
                dispatched=dispatched,
                waited=waited,
            )
        )


def _revocation(scheduled: ScheduledRequest, replica_id: str) -> cmd.Revoke:
    request = scheduled.request
    return cmd.Revoke(request_id=request.request_id, gateway_id=request.gateway_id, replica_id=replica_id)
