"""The scheduler's named invariants, checked exactly after every step of a random history.

The machine keeps its own record from events and commands alone, and compares it with the scheduler's state.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from serve_app.routing.pools import PoolRouter, RoutingSettings, least_budget_tokens
from serve_app.routing.replica import ReplicaSpec
from serve_app.routing.replica_state import PrefillClass, ReplicaState
from serve_app.scheduling import Scheduler
from serve_app.scheduling import events as ev
from serve_app.scheduling.commands import Conclude, Dispatch, ReportFresh, ReportStale
from serve_app.scheduling.dispatch.backpressure import BackpressureSettings
from serve_app.scheduling.dispatch.promotion import PromotionSettings
from serve_app.scheduling.isolation.prefill_isolation import IsolationSettings
from serve_app.scheduling.request import ScheduledRequest
from tests.builders import report, request, spec
from tests.builders import settings as scheduler_settings

INTERACTIVE, DEFAULT, BATCH = PriorityClass
REPORT_LIMIT_S = 2.0
TARGET = 2
SPECS = {
    "s1": spec("s1", "short", max_model_len=1_000, kv_tokens=2_500, max_num_seqs=3),
    "s2": spec("s2", "short", max_model_len=1_200, kv_tokens=1_200, max_num_seqs=2),
    "l1": spec("l1", "long", max_model_len=4_000, kv_tokens=6_000, max_num_seqs=3),
    # A server without metrics that states no limit.
    "l2": spec("l2", "long", max_model_len=4_000, kv_tokens=None, max_num_seqs=None),
}
THREE_POOLS = {**SPECS, "s2": spec("s2", "mid", max_model_len=2_000, kv_tokens=2_400, max_num_seqs=2)}
ROUTING = RoutingSettings(b_short_tokens=1_000)
PROMOTION = PromotionSettings(interactive_s=0.5, default_s=1.0, batch_s=2.0, promoted_share=0.5)
ISOLATION = IsolationSettings(
    max_long_prefills=2, max_longest_prefills=1, prior_boundary_tokens=350, prior_longest_tokens=600
)
DENIED = {Outcome.REJECTED_QUEUE_FULL, Outcome.REJECTED_DEADLINE_UNMEETABLE}
MAY_RETURN = DENIED | {Outcome.REJECTED_NO_REPLICA, Outcome.EXPIRED}
replica_ids = st.sampled_from(sorted(SPECS))
steps_of_time = st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.5, 3.0])


@dataclass
class KnownReplica:
    """What the machine knows of a connected replica."""

    spec: ReplicaSpec
    reported_at: float | None = None
    draining: bool = False

    def is_alive(self, now: float) -> bool:
        is_fresh = self.reported_at is not None and now < self.reported_at + REPORT_LIMIT_S
        return is_fresh and not self.draining


class SchedulerMachine(RuleBasedStateMachine):
    policy = "fcfs"
    specs = SPECS
    routing = ROUTING
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.scheduler = Scheduler(
            scheduler_settings(
                policy=self.policy,
                isolation=ISOLATION,
                max_waiting=6,
                max_attempts=2,
                max_put_backs=5,
                promotion=PROMOTION,
                no_replica_grace_s=1.0,
                routing=self.routing,
                # Without growth by pace, capacity follows from the machine's own record alone.
                backpressure=BackpressureSettings(
                    target_waiting=TARGET, lag_factor=0.0, report_limit_s=REPORT_LIMIT_S
                ),
            )
        )
        self.submitted: set[str] = set()
        self.waiting: set[str] = set()
        self.running: dict[str, str] = {}
        self.started: set[str] = set()
        self.concluded: dict[str, int] = {}
        self.expires_at: dict[str, float] = {}
        self.no_wait: set[str] = set()
        self.gateway_of: dict[str, str] = {}
        self.replicas: dict[str, KnownReplica] = {}
        self.known_stale: set[str] = set()
        self.gone_at: dict[str, float] = {}
        self.returning = ""
        self.sent: set[str] = set()
        self.target = TARGET

    def feed(self, event: ev.Event) -> None:
        before = self.suspended()
        commands = self.scheduler.handle(event, self.now)
        self.suspends_at_most_half_of_a_pool(self.suspended() - before)
        for command in commands:
            match command:
                case Dispatch():
                    self.check_dispatch(command)
                    self.waiting.remove(command.request_id)
                    self.running[command.request_id] = command.replica_id
                    self.sent.add(command.request_id)
                case Conclude():
                    was_sent = command.request_id in self.running or command.request_id == self.returning
                    assert command.dispatched is was_sent
                    self.refuses_honestly(command)
                    self.waiting.discard(command.request_id)
                    self.running.pop(command.request_id, None)
                    self.started.discard(command.request_id)
                    self.concluded[command.request_id] = self.concluded.get(command.request_id, 0) + 1
                case ReportStale():
                    assert command.replica_id not in self.known_stale
                    self.known_stale.add(command.replica_id)
                case ReportFresh():
                    self.known_stale.remove(command.replica_id)

    def suspended(self) -> set[str]:
        return {state.spec.replica_id for state in self.scheduler.ledger if state.suspended}

    def suspends_at_most_half_of_a_pool(self, newly: set[str]) -> None:
        """At the time of a suspension; replicas that die later leave fewer."""
        for pool in {self.replicas[each].spec.pool for each in newly}:
            alive = {
                each
                for each, known in self.replicas.items()
                if known.spec.pool == pool and known.is_alive(self.now)
            }
            assert len(alive & self.suspended()) <= max(1, len(alive) // 2)

    def refuses_honestly(self, command: Conclude) -> None:
        """No request is denied while the queue is empty, and one that may return is told when."""
        if command.conclusion.outcome in MAY_RETURN:
            assert command.conclusion.retry_after_s is not None
            assert 0 < command.conclusion.retry_after_s <= self.scheduler.settings.retry_after_cap_s
        if command.conclusion.outcome in DENIED:
            assert self.waiting - {command.request_id} or command.request_id in self.no_wait

    def check_dispatch(self, command: Dispatch) -> None:
        known = self.replicas[command.replica_id]
        assert command.pool == known.spec.pool
        sent = self.find(command.request_id)
        self.bound_requests_go_only_to_their_replica(sent, command.replica_id)
        assert least_budget_tokens(sent.request, sent.estimate) <= known.spec.max_model_len
        assert command.queue_wait_s >= 0
        assert self.accepts(command.replica_id)
        assert self.expires_at[command.request_id] > self.now

    def bound_requests_go_only_to_their_replica(self, sent: ScheduledRequest, replica_id: str) -> None:
        assert sent.request.bound_to in (None, replica_id)

    def accepts(self, replica_id: str) -> bool:
        """Whether it takes requests; which ones to suspend is the scheduler's own to decide."""
        return (
            self.replicas[replica_id].is_alive(self.now) and not self.scheduler.ledger[replica_id].suspended
        )

    def new_request(self, gateway_id: str, timeout_s: float) -> str:
        request_id = f"r{len(self.submitted)}"
        self.submitted.add(request_id)
        self.gateway_of[request_id] = gateway_id
        self.expires_at[request_id] = self.now + timeout_s
        return request_id

    def pass_time(self, seconds: float) -> None:
        """As a driver does: wake up at each time that the scheduler asks for."""
        until = self.now + seconds
        while (wake_at := self.scheduler.next_wakeup()) is not None and wake_at <= until:
            self.now = max(self.now, wake_at)
            self.feed(ev.Woke())
        self.now = until

    @initialize(replica_ids=st.sets(replica_ids, min_size=1))
    def begin(self, replica_ids: set[str]) -> None:
        """Most histories begin with replicas that work; the rules also lose them."""
        for replica_id in sorted(replica_ids):
            self.join(replica_id)
            self.make_report(replica_id, 0, 0, False, 0.0)

    @rule(
        target=requests,
        prompt_tokens=st.sampled_from([1, 40, 300, 480, 900, 1_100, 3_000, 5_000]),
        max_output_tokens=st.sampled_from([0, 1, 50, 600]),
        timeout_s=st.sampled_from([0.3, 1.0, 5.0, math.inf]),
        gateway_id=st.sampled_from(["g1", "g2"]),
        no_wait=st.booleans(),
        streamed=st.booleans(),
        whose=st.sampled_from([("a", DEFAULT), ("b", DEFAULT), ("b", INTERACTIVE), ("c", BATCH)]),
        bound_to=st.sampled_from([None, None, None, *sorted(SPECS), "never-seen"]),
        seconds=steps_of_time,
    )
    def arrive(
        self,
        prompt_tokens: int,
        max_output_tokens: int,
        timeout_s: float,
        gateway_id: str,
        no_wait: bool,
        streamed: bool,
        whose: tuple[str, PriorityClass],
        bound_to: str | None,
        seconds: float,
    ) -> str:
        self.pass_time(seconds)
        tenant, priority = whose
        request_id = self.new_request(gateway_id, timeout_s)
        self.waiting.add(request_id)
        if no_wait:
            self.no_wait.add(request_id)
        arrived = request(
            request_id,
            prompt_tokens=prompt_tokens,
            max_output_tokens=max_output_tokens,
            arrived_at=self.now,
            expires_at=self.now + timeout_s,
            gateway_id=gateway_id,
            no_wait=no_wait,
            streamed=streamed,
            tenant=tenant,
            priority=priority,
            bound_to=bound_to,
        )
        self.feed(ev.Arrived(arrived))
        self.feed(ev.Arrived(arrived)) if request_id not in self.concluded else None
        return request_id

    @rule(target=requests, replica_id=replica_ids, started=st.booleans())
    def resume(self, replica_id: str, started: bool) -> str:
        request_id = self.new_request("g1", math.inf)
        self.running[request_id] = replica_id
        if started:
            self.started.add(request_id)
        self.feed(ev.Resumed(request(request_id, arrived_at=self.now), replica_id, started))
        return request_id

    @rule(request_id=requests, seconds=steps_of_time)
    def first_token(self, request_id: str, seconds: float) -> None:
        self.pass_time(seconds)
        if request_id in self.running:
            self.started.add(request_id)
        self.feed(ev.FirstToken(request_id))

    @rule(
        request_id=consumes(requests),
        outcome=st.sampled_from([Outcome.COMPLETED, Outcome.FAILED, Outcome.CANCELLED]),
        seconds=steps_of_time,
    )
    def finish(self, request_id: str, outcome: Outcome, seconds: float) -> None:
        self.pass_time(seconds)
        if request_id in self.running:
            self.feed(ev.Finished(request_id, outcome, Usage(prompt_tokens=50, output_tokens=5)))
            assert self.scheduler.find(request_id) is None

    @rule(
        target=requests,
        request_id=consumes(requests),
        failure=st.sampled_from(list(ev.DispatchFailure)),
        seconds=steps_of_time,
    )
    def fail_dispatch(self, request_id: str, failure: ev.DispatchFailure, seconds: float):  # type: ignore[no-untyped-def]
        self.pass_time(seconds)
        replica_id = self.running.get(request_id)
        if replica_id is None:
            return request_id
        # Its answer may have begun, where the gateway assembles it for its client.
        self.started.discard(request_id)
        # It waits again at once, unless it is concluded or sent in the same step.
        del self.running[request_id]
        self.waiting.add(request_id)
        self.returning = request_id
        self.feed(ev.DispatchFailed(request_id, replica_id, failure))
        self.returning = ""
        return multiple() if request_id in self.concluded else request_id

    @rule(request_id=requests, seconds=steps_of_time)
    def cancel(self, request_id: str, seconds: float) -> None:
        self.pass_time(seconds)
        self.feed(ev.Cancelled(request_id))

    @rule(gateway_id=st.sampled_from(["g1", "g2"]))
    def lose_gateway(self, gateway_id: str) -> None:
        self.feed(ev.GatewayLost(gateway_id))
        assert not [r for r in self.waiting if self.gateway_of[r] == gateway_id]

    @rule(replica_id=replica_ids)
    def join(self, replica_id: str) -> None:
        self.replicas[replica_id] = KnownReplica(self.specs[replica_id])
        self.known_stale.discard(replica_id)
        self.feed(ev.ReplicaJoined(self.specs[replica_id]))

    @rule(
        replica_id=replica_ids,
        received=st.integers(0, 30),
        waiting=st.sampled_from([0, 0, 1, 3]),
        draining=st.sampled_from([False, False, False, True]),
        seconds=steps_of_time,
    )
    def make_report(
        self, replica_id: str, received: int, waiting: int, draining: bool, seconds: float
    ) -> None:
        self.pass_time(seconds)
        known = self.replicas.get(replica_id)
        if known is not None:
            known.reported_at, known.draining = self.now, draining
        load = report(received=received, waiting=waiting, draining=draining)
        if SPECS[replica_id].max_num_seqs is None:
            load = report(received=None, waiting=None, running=None, kv_usage_ratio=None, draining=draining)
        self.feed(ev.ReplicaReported(replica_id, load))

    @rule(
        in_engine=st.integers(1, 4),
        long=st.integers(1, 3),
        longest=st.integers(1, 3),
        share=st.sampled_from([0.1, 0.25, 0.5]),
    )
    def retune(self, in_engine: int, long: int, longest: int, share: float) -> None:
        """What the tuner changes in a running scheduler."""
        waiting = set(self.waiting)
        now = self.scheduler.settings
        isolation = replace(
            now.isolation, max_long_prefills=long, max_longest_prefills=longest, short_work_share=share
        )
        backpressure = replace(now.backpressure, target_waiting=in_engine)
        self.target = in_engine
        self.feed(ev.Retuned(replace(now, isolation=isolation, backpressure=backpressure)))
        assert self.waiting <= waiting

    @rule(replica_id=replica_ids)
    def lose(self, replica_id: str) -> None:
        if self.replicas.pop(replica_id, None) is not None:
            self.gone_at[replica_id] = self.now
        self.known_stale.discard(replica_id)
        self.feed(ev.ReplicaLost(replica_id))

    @invariant()
    def conserves_requests(self) -> None:
        queue = {scheduled.request.request_id for scheduled in self.scheduler.queue}
        assert queue == self.waiting
        assert len(self.scheduler.queue) == len(self.waiting)
        assert len(self.scheduler) == len(self.waiting) + len(self.running)
        assert self.submitted == self.waiting | set(self.running) | set(self.concluded)
        assert self.scheduler.queue.waiting_tokens == sum(
            scheduled.estimate.expected_tokens for scheduled in self.scheduler.queue
        )
        wait = [scheduled for scheduled in self.scheduler.queue if scheduled.request.priority is not BATCH]
        assert +self.scheduler.queue.waiting_at == Counter(scheduled.pools[0] for scheduled in wait)

    @invariant()
    def concludes_each_request_once(self) -> None:
        assert all(count == 1 for count in self.concluded.values())
        assert not self.concluded.keys() & (self.waiting | set(self.running))

    @invariant()
    def holds_exactly_what_is_running(self) -> None:
        held: dict[str, list[int]] = {}
        for request_id, replica_id in self.running.items():
            scheduled = self.find(request_id)
            assert scheduled.replica_id == replica_id
            held.setdefault(replica_id, []).append(scheduled.hold.tokens)
        for state in self.scheduler.ledger:
            here = held.pop(state.spec.replica_id, [])
            running = [r for r, replica in self.running.items() if replica == state.spec.replica_id]
            assert state.held_tokens == sum(here)
            assert state.in_flight == len(here)
            assert state.unstarted == len([r for r in running if r not in self.started])
            assert 0 <= state.unseen <= state.unstarted
            requests = [self.find(request_id) for request_id in running]
            prefill_classes = [scheduled.hold.prefill_class for scheduled in requests]
            assert state.long_prefills == (
                sum(prefill_class >= PrefillClass.LONG for prefill_class in prefill_classes),
                prefill_classes.count(PrefillClass.LONGEST),
            )
            assert state.quarantined == sum(scheduled.hold.quarantined for scheduled in requests) <= 1
            assert state.pending_prefill_tokens == sum(e.hold.prefill_tokens for e in requests)
            for request_id, scheduled in zip(running, requests, strict=True):
                # A streamed request holds its long prefill exactly until its first token.
                kept = scheduled.prefill_class if request_id not in self.started else 0
                assert scheduled.hold.prefill_class in {0, kept}
                if scheduled.request.spec.streamed and request_id in self.sent:
                    assert scheduled.hold.prefill_class == kept
        assert not held

    @invariant()
    def reserves_capacity_only_for_waiting_requests(self) -> None:
        """At most one of each pool, and none remains after its dispatch."""
        kept = list(self.scheduler.dispatcher.reservations)
        assert all(each.scheduled.request.request_id in self.waiting for each in kept)
        assert len({each.scheduled.pools[0] for each in kept}) == len(kept)
        for state in self.scheduler.ledger:
            assert state.reserved_tokens == sum(each.tokens for each in kept if each.replica is state)

    @invariant()
    def leaves_no_room_idle(self) -> None:
        """No head of a sub-queue waits while a replica could take it; those behind it wait for the head."""
        sub_queues: dict[tuple[object, ...], list[ScheduledRequest]] = {}
        for scheduled in self.scheduler.queue:
            if scheduled.resting_until:
                # In backoff, which ends on time.
                assert scheduled.resting_until > self.now
                continue
            whose = scheduled.request.priority, scheduled.request.tenant
            sub_queues.setdefault(
                (
                    *whose,
                    scheduled.length_queue,
                    scheduled.pools,
                    scheduled.prefill_class,
                    scheduled.request.bound_to,
                ),
                [],
            ).append(scheduled)
        for requests in sub_queues.values():
            pools = requests[0].pools
            head = min(
                requests, key=lambda e: (not e.returned, not e.claimed, e.request.arrived_at, e.sequence)
            )
            for replica_id, known in self.replicas.items():
                if head.request.bound_to not in (None, replica_id):
                    continue
                assert known.spec.pool not in pools or not self.has_room(replica_id, head)

    def has_room(self, replica_id: str, head: ScheduledRequest) -> bool:
        known, state = self.replicas[replica_id], self.scheduler.ledger[replica_id]
        if not self.accepts(replica_id) or self.is_shut_to(replica_id, head):
            return False
        running = [request_id for request_id, at in self.running.items() if at == replica_id]
        if known.spec.max_num_seqs is None:
            # As far as the limit goes that its latency moves, which has tests of its own.
            limit = state.in_flight_limit
            if limit is None or len(running) + 1 > limit or head.request.priority is BATCH:
                return False
        elif not self.has_short_queue(known.spec.max_num_seqs, running, head, state):
            return False
        context = self.context_limit(known.spec.pool)
        assert context is not None
        held = sum(self.find(request_id).hold.tokens for request_id in running)
        isolation = self.scheduler.settings.isolation
        limits = (isolation.max_long_prefills, isolation.max_longest_prefills)
        for count, limit in zip(state.long_prefills, limits[: head.prefill_class], strict=False):
            if count >= limit:
                return False
        reservation = self.scheduler.dispatcher.reservations.of(known.spec.pool)
        if reservation is None or reservation.scheduled is not head:
            held += state.reserved_tokens
        kv_tokens = math.inf if known.spec.kv_tokens is None else known.spec.kv_tokens
        return min(head.estimate.expected_tokens, context) <= kv_tokens - held

    def has_short_queue(
        self, max_num_seqs: int, running: list[str], head: ScheduledRequest, state: ReplicaState
    ) -> bool:
        """Whether the engine's own queue is short enough for one more."""
        if len(running) >= max_num_seqs + self.target:
            return False
        unstarted = [request_id for request_id in running if request_id not in self.started]
        queues = len(unstarted) - state.long_prefills[0], state.reported_queue
        if min(queues) >= self.target:
            return False
        return head.request.priority is not BATCH or min(len(unstarted), state.reported_queue) == 0

    def is_shut_to(self, replica_id: str, head: ScheduledRequest) -> bool:
        """Whether a request goes elsewhere because of how it failed before."""
        others = [each for each, known in self.replicas.items() if known.spec.pool in head.pools]
        elsewhere = any(self.accepts(each) and each not in head.avoided for each in others)
        if replica_id in head.avoided and elsewhere and head.request.bound_to is None:
            return True
        return head.losses > 0 and self.scheduler.ledger[replica_id].quarantined > 0

    def find(self, request_id: str) -> ScheduledRequest:
        scheduled = self.scheduler.find(request_id)
        assert scheduled is not None
        return scheduled

    @invariant()
    def waits_where_it_can_go(self) -> None:
        """Waiting requests are routed by the current context limits."""
        router = PoolRouter(self.routing, self.context_limit)
        for scheduled in self.scheduler.queue:
            bound_to = scheduled.request.bound_to
            if bound_to is not None:
                if known := self.replicas.get(bound_to):
                    assert scheduled.pools == (known.spec.pool,)
                continue
            assert scheduled.pools == router.route(
                scheduled.request, scheduled.estimate, above_tokens=scheduled.above_tokens
            )
            assert scheduled.pools

    def context_limit(self, pool: str) -> int | None:
        return min(
            (b.spec.max_model_len for b in self.replicas.values() if b.spec.pool == pool), default=None
        )

    @invariant()
    def nobody_waits_past_the_bound(self) -> None:
        for request_id in self.waiting:
            assert self.expires_at[request_id] > self.now

    @invariant()
    def no_bound_request_waits_for_a_replica_that_is_gone(self) -> None:
        """Past the grace."""
        for scheduled in self.scheduler.queue:
            bound_to = scheduled.request.bound_to
            if bound_to is not None and bound_to not in self.replicas:
                gone_at = max(self.gone_at.get(bound_to, 0.0), scheduled.request.arrived_at)
                assert self.now <= gone_at + 1.0 + 1e-9

    @invariant()
    def time_never_goes_back(self) -> None:
        wake_at = self.scheduler.next_wakeup()
        assert wake_at is None or wake_at >= self.now - 1e-9


class IsolatingMachine(SchedulerMachine):
    policy = "fcfs-isolated"


class ThreePoolsMachine(SchedulerMachine):
    policy = "fcfs-isolated"
    specs = THREE_POOLS
    routing = RoutingSettings(pools=("short", "mid", "long"), b_short_tokens=600, costs=(1.0, 3.0, 2.0))


TestSchedulerMachine = SchedulerMachine.TestCase
TestThreePoolsMachine = ThreePoolsMachine.TestCase
TestIsolatingMachine = IsolatingMachine.TestCase
for case, examples in (
    (TestSchedulerMachine, 400),
    (TestIsolatingMachine, 400),
    (TestThreePoolsMachine, 100),
):
    case.settings = settings(
        max_examples=examples, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow]
    )
