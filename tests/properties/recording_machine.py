"""State machine that records events and commands, the reference for all invariants."""

import math
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from serve_app.core import Scheduler
from serve_app.core import events as ev
from serve_app.core.admission.admission import RETRY_AFTER_CAP_S
from serve_app.core.commands import Conclude, Dispatch, ReportFresh, ReportStale, Revoke
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.dispatch.promotion import PromotionSettings
from serve_app.core.isolation import IsolationSettings
from serve_app.core.queueing.floors import FloorSettings
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.pools import RoutingSettings, least_budget_tokens
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from tests.builders import settings as scheduler_settings
from tests.builders import spec

INTERACTIVE, DEFAULT, BATCH = PriorityClass
REPORT_LIMIT_S = 2.0
TARGET = 2
SPECS = {
    "s1": spec("s1", "short", max_model_len=1_000, kv_tokens=2_500, max_num_seqs=3, adapters=("a", "b")),
    "s2": spec("s2", "short", max_model_len=1_200, kv_tokens=1_200, max_num_seqs=2),
    "l1": spec("l1", "long", max_model_len=4_000, kv_tokens=6_000, max_num_seqs=3, adapters=("b",)),
    # A server without metrics and without known limits.
    "l2": spec("l2", "long", max_model_len=4_000, kv_tokens=None, max_num_seqs=None),
}
THREE_POOLS = {**SPECS, "s2": spec("s2", "mid", max_model_len=2_000, kv_tokens=2_400, max_num_seqs=2)}
ROUTING = RoutingSettings(b_short_tokens=1_000)
PROMOTION = PromotionSettings(interactive_s=0.5, default_s=1.0, batch_s=2.0, promoted_share=0.5)
# Of a tenant with two classes, and of the batch class; a request has 1 to 5,000 tokens.
FLOORS = FloorSettings(tenants={"b": 500.0}, classes={BATCH: 200.0})
ISOLATION = IsolationSettings(
    max_long_prefills=2, max_longest_prefills=1, prior_boundary_tokens=350, prior_longest_tokens=600
)
REJECTED_BY_QUEUE = {Outcome.REJECTED_QUEUE_FULL, Outcome.REJECTED_DEADLINE_UNMEETABLE}
RETRYABLE = REJECTED_BY_QUEUE | {Outcome.REJECTED_NO_REPLICA, Outcome.EXPIRED}
replica_ids = st.sampled_from(sorted(SPECS))
steps_of_time = st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.5, 3.0])


@dataclass
class KnownReplica:
    """Recorded state of a connected replica."""

    spec: ReplicaSpec
    reported_at: float | None = None
    draining: bool = False

    def is_alive(self, now: float) -> bool:
        is_fresh = self.reported_at is not None and now < self.reported_at + REPORT_LIMIT_S
        return is_fresh and not self.draining


class RecordingMachine(RuleBasedStateMachine):
    """Feeds a scheduler, and derives its state from events and commands alone."""

    policy = "fcfs"
    floors = FloorSettings()
    specs = SPECS
    routing = ROUTING

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
                floors=self.floors,
                no_replica_grace_s=1.0,
                routing=self.routing,
                # Without growth by pace, capacity follows from this record alone.
                backpressure=BackpressureSettings(
                    target_waiting=TARGET, lag_factor=0.0, report_limit_s=REPORT_LIMIT_S
                ),
            )
        )
        self.submitted: set[str] = set()
        self.waiting: set[str] = set()
        self.running: dict[str, str] = {}
        self.started: set[str] = set()
        self.revoked: set[str] = set()
        self.concluded: dict[str, int] = {}
        self.expires_at: dict[str, float] = {}
        self.timeout_s: dict[str, float] = {}
        self.no_wait: set[str] = set()
        self.gateway_of: dict[str, str] = {}
        self.replicas: dict[str, KnownReplica] = {}
        self.known_stale: set[str] = set()
        self.lost_at: dict[str, float] = {}
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
                    self.revoked.discard(command.request_id)
                    self.sent.add(command.request_id)
                case Conclude():
                    was_sent = command.request_id in self.running or command.request_id == self.returning
                    assert command.dispatched is was_sent
                    self.rejects_only_with_a_backlog(command)
                    self.waiting.discard(command.request_id)
                    self.running.pop(command.request_id, None)
                    self.started.discard(command.request_id)
                    self.concluded[command.request_id] = self.concluded.get(command.request_id, 0) + 1
                case ReportStale():
                    assert command.replica_id not in self.known_stale
                    self.known_stale.add(command.replica_id)
                case ReportFresh():
                    self.known_stale.remove(command.replica_id)
                case Revoke():
                    self.revokes_once_and_only_batch_work_or_overdue_starts(command)

    def revokes_once_and_only_batch_work_or_overdue_starts(self, command: Revoke) -> None:
        assert self.running[command.request_id] == command.replica_id
        scheduled = self.find(command.request_id)
        request = scheduled.request
        if scheduled.attempts.moved_from == command.replica_id:
            assert request.spec.streamed
            assert not scheduled.started
            assert self.now >= scheduled.dispatched_at + 5.0
        else:
            assert request.priority is BATCH
            assert request.submission.revocable
        assert command.request_id not in self.revoked
        self.revoked.add(command.request_id)

    def suspended(self) -> set[str]:
        return {state.spec.replica_id for state in self.scheduler.ledger if state.suspension.active}

    def suspends_at_most_half_of_a_pool(self, newly: set[str]) -> None:
        """Checked when a replica is suspended; replicas that die later leave fewer."""
        for pool in {self.replicas[each].spec.pool for each in newly}:
            alive = {
                each
                for each, known in self.replicas.items()
                if known.spec.pool == pool and known.is_alive(self.now)
            }
            assert len(alive & self.suspended()) <= max(1, len(alive) // 2)

    def rejects_only_with_a_backlog(self, command: Conclude) -> None:
        """Queue limits apply only with a backlog or no-wait. A retryable rejection has a `Retry-After`."""
        if command.conclusion.outcome in RETRYABLE:
            assert command.conclusion.retry_after_s is not None
            assert 0 < command.conclusion.retry_after_s <= RETRY_AFTER_CAP_S
        if command.conclusion.outcome in REJECTED_BY_QUEUE:
            assert self.waiting - {command.request_id} or command.request_id in self.no_wait

    def check_dispatch(self, command: Dispatch) -> None:
        known = self.replicas[command.replica_id]
        assert command.pool == known.spec.pool
        sent = self.find(command.request_id)
        self.bound_requests_go_only_to_their_replica(sent, command.replica_id)
        assert sent.request.destination.admits(command.replica_id, known.spec.adapters)
        assert least_budget_tokens(sent.request, sent.estimate) <= known.spec.max_model_len
        assert command.queue_wait_s >= 0
        assert self.accepts(command.replica_id)
        assert self.expires_at[command.request_id] > self.now - 1e-9

    def bound_requests_go_only_to_their_replica(self, sent: ScheduledRequest, replica_id: str) -> None:
        assert sent.request.bound_to in (None, replica_id)

    def accepts(self, replica_id: str) -> bool:
        """Return whether the replica accepts requests; suspensions and hangs are taken from the scheduler."""
        state = self.scheduler.ledger[replica_id]
        # An overdue first token, which the scheduler has moved elsewhere, shows a hang.
        hangs = state.hang_detector.hangs and any(
            at == replica_id and request_id not in self.started for request_id, at in self.running.items()
        )
        return self.replicas[replica_id].is_alive(self.now) and not (state.suspension.active or hangs)

    def new_request(self, gateway_id: str, timeout_s: float) -> str:
        request_id = f"r{len(self.submitted)}"
        self.submitted.add(request_id)
        self.gateway_of[request_id] = gateway_id
        self.expires_at[request_id] = self.now + timeout_s
        self.timeout_s[request_id] = timeout_s
        return request_id

    def pass_time(self, seconds: float) -> None:
        """Advance the clock and wake the scheduler at each time that it asked for."""
        until = self.now + seconds
        while (wake_at := self.scheduler.next_wakeup()) is not None and wake_at <= until:
            self.now = max(self.now, wake_at)
            self.feed(ev.Woke())
        self.now = until

    def has_capacity(self, replica_id: str, head: ScheduledRequest) -> bool:
        known, state = self.replicas[replica_id], self.scheduler.ledger[replica_id]
        if not self.accepts(replica_id) or self.is_excluded(replica_id, head):
            return False
        running = [request_id for request_id, at in self.running.items() if at == replica_id]
        if known.spec.max_num_seqs is None:
            # Up to the limits that are learned, which have their own tests.
            backpressure = self.scheduler.ledger.open.is_open(state, self.now)
            if not backpressure or state.learned_limit is None or head.request.priority is BATCH:
                return False
        elif not self.has_short_queue(known.spec.max_num_seqs, running, head, state):
            return False
        context = self.context_limit(known.spec.pool)
        assert context is not None
        used = state.peak_tokens
        isolation = self.scheduler.settings.isolation
        limits = (isolation.max_long_prefills, isolation.max_longest_prefills)
        for count, limit in zip(state.prefills.long, limits[: head.prefill_class], strict=False):
            if count >= limit:
                return False
        reservation = self.scheduler.dispatcher.reservations.of(known.spec.pool)
        if reservation is None or reservation.scheduled is not head:
            used += state.reserved_tokens
        if running:
            used += self.scheduler.headroom.tokens(head, known.spec.pool)
        kv_tokens = math.inf if known.spec.kv_tokens is None else known.spec.kv_tokens
        return min(head.estimate.expected_tokens, context) <= kv_tokens - used

    def has_short_queue(
        self, max_num_seqs: int, running: list[str], head: ScheduledRequest, state: ReplicaState
    ) -> bool:
        """Return whether the engine's own queue accepts one more request."""
        if len(running) >= max_num_seqs + self.target:
            return False
        unstarted = [request_id for request_id in running if request_id not in self.started]
        queues = len(unstarted) - state.prefills.long[0], state.reported_queue
        if min(queues) >= self.target:
            return False
        # What batch work gets beside others has its own tests.
        return head.request.priority is not BATCH or not running

    def is_excluded(self, replica_id: str, head: ScheduledRequest) -> bool:
        """Return whether earlier failures exclude this replica for the request."""
        others = [
            each
            for each, known in self.replicas.items()
            if known.spec.pool in head.pools and head.request.destination.admits(each, known.spec.adapters)
        ]
        elsewhere = any(self.accepts(each) and each not in head.attempts.avoided for each in others)
        if replica_id in head.attempts.avoided and elsewhere and head.request.bound_to is None:
            return True
        return head.attempts.losses > 0 and self.scheduler.ledger[replica_id].quarantined > 0

    def find(self, request_id: str) -> ScheduledRequest:
        scheduled = self.scheduler.find(request_id)
        assert scheduled is not None
        return scheduled

    def context_limit(self, pool: str) -> int | None:
        return min(
            (b.spec.max_model_len for b in self.replicas.values() if b.spec.pool == pool), default=None
        )
