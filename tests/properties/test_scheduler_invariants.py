"""The scheduler's named invariants, checked exactly after every step of a random history.

The machine derives its own record from events and commands alone, and compares it with the scheduler's state.
"""

import math
from collections import Counter
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, initialize, invariant, multiple, rule

from serve_app.core import events as ev
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.pools import PoolRouter, RoutingSettings
from serve_app.core.routing.replica_state import PrefillClass
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from tests.builders import report, request, running_of
from tests.properties.recording_machine import (
    BATCH,
    DEFAULT,
    FLOORS,
    INTERACTIVE,
    SPECS,
    THREE_POOLS,
    KnownReplica,
    RecordingMachine,
    replica_ids,
    steps_of_time,
)


class SchedulerMachine(RecordingMachine):
    requests = Bundle("requests")

    @initialize(replica_ids=st.sets(replica_ids, min_size=1))
    def begin(self, replica_ids: set[str]) -> None:
        """Most histories begin with working replicas, which later rules may lose."""
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
        adapter=st.sampled_from([None, None, None, "a", "b", "listed-nowhere"]),
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
        adapter: str | None,
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
            adapter=adapter if bound_to is None else None,
            revocable=priority is BATCH,
        )
        self.feed(ev.Arrived(arrived))
        self.feed(ev.Arrived(arrived)) if request_id not in self.concluded else None
        return request_id

    @rule(
        target=requests,
        replica_id=replica_ids,
        started=st.booleans(),
        timeout_s=st.sampled_from([0.3, 1.0, 5.0, math.inf]),
        attempts=st.integers(0, 7),
    )
    def resume(self, replica_id: str, started: bool, timeout_s: float, attempts: int) -> str:
        request_id = self.new_request("g1", timeout_s)
        self.running[request_id] = replica_id
        if started:
            self.started.add(request_id)
        running = request(
            request_id,
            prompt_tokens=480,
            arrived_at=self.now,
            expires_at=self.expires_at[request_id],
            attempts=attempts,
        )
        self.feed(ev.Resumed(running, replica_id, started))
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
        # The answer may have begun if the gateway assembles it for its client.
        self.started.discard(request_id)
        # It waits again at once, unless the same step concludes or dispatches it.
        del self.running[request_id]
        self.waiting.add(request_id)
        self.returning = request_id
        generated = 20 if failure is ev.DispatchFailure.REVOKED else 0
        if generated:
            self.expires_at[request_id] = self.now + self.timeout_s[request_id]
        self.feed(ev.DispatchFailed(request_id, replica_id, failure, generated_tokens=generated))
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
        """Apply new settings as a tuner does."""
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
            self.lost_at[replica_id] = self.now
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
        at_home = {pool: work.requests for pool, work in self.scheduler.queue.non_batch_work.items()}
        assert +Counter(at_home) == Counter(scheduled.pools[0] for scheduled in wait)

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
            held.setdefault(replica_id, []).append(running_of(scheduled).tokens)
        for state in self.scheduler.ledger:
            here = held.pop(state.spec.replica_id, [])
            running = [r for r, replica in self.running.items() if replica == state.spec.replica_id]
            assert state.held_tokens == sum(here)
            assert state.in_flight == len(here)
            assert state.unstarted == len([r for r in running if r not in self.started])
            assert 0 <= state.unseen <= state.unstarted
            requests = [self.find(request_id) for request_id in running]
            prefill_classes = [running_of(scheduled).prefill_class for scheduled in requests]
            assert state.prefills.long == (
                sum(prefill_class >= PrefillClass.LONG for prefill_class in prefill_classes),
                prefill_classes.count(PrefillClass.LONGEST),
            )
            assert state.quarantined == sum(running_of(scheduled).quarantined for scheduled in requests) <= 1
            assert state.prefills.tokens == sum(running_of(e).prefill_tokens for e in requests)
            for request_id, scheduled in zip(running, requests, strict=True):
                # A streamed request holds its long prefill exactly until its first token.
                kept = scheduled.prefill_class if request_id not in self.started else 0
                assert running_of(scheduled).prefill_class in {0, kept}
                if scheduled.request.spec.streamed and request_id in self.sent:
                    assert running_of(scheduled).prefill_class == kept
        assert not held

    @invariant()
    def reserves_capacity_only_for_waiting_requests(self) -> None:
        """At most one reservation per pool, and none remains after its dispatch."""
        kept = list(self.scheduler.dispatcher.reservations)
        assert all(each.scheduled.request.request_id in self.waiting for each in kept)
        assert len({each.scheduled.pools[0] for each in kept}) == len(kept)
        for state in self.scheduler.ledger:
            assert state.reserved_tokens == sum(each.tokens for each in kept if each.replica is state)

    @invariant()
    def leaves_no_capacity_idle(self) -> None:
        """No sub-queue head waits while a replica could serve it; other requests wait for their head."""
        sub_queues: dict[tuple[object, ...], list[ScheduledRequest]] = {}
        for scheduled in self.scheduler.queue:
            if scheduled.attempts.backoff_until:
                # In backoff, which ends on time.
                assert scheduled.attempts.backoff_until > self.now
                continue
            if scheduled.parked:
                continue
            whose = scheduled.request.priority, scheduled.request.tenant
            sub_queues.setdefault(
                (
                    *whose,
                    scheduled.length_queue,
                    scheduled.pools,
                    scheduled.prefill_class,
                    scheduled.destination,
                ),
                [],
            ).append(scheduled)
        for requests in sub_queues.values():
            pools = requests[0].pools
            head = min(
                requests,
                key=lambda e: (not e.attempts.returned, not e.claimed, e.request.arrived_at, e.sequence),
            )
            for replica_id, known in self.replicas.items():
                if not head.destination.admits(replica_id, known.spec.adapters):
                    continue
                assert known.spec.pool not in pools or not self.has_capacity(replica_id, head)

    @invariant()
    def waits_for_pools_that_fit(self) -> None:
        """Waiting requests are routed by the current context limits."""
        router = PoolRouter(self.routing, self.context_limit)
        for scheduled in self.scheduler.queue:
            bound_to = scheduled.request.bound_to
            if (adapter := scheduled.request.spec.adapter) is not None:
                held = {each.spec.pool for each in self.replicas.values() if adapter in each.spec.adapters}
                assert not held or held.issuperset(scheduled.pools)
                continue
            if bound_to is not None:
                if known := self.replicas.get(bound_to):
                    assert scheduled.pools == (known.spec.pool,)
                continue
            assert scheduled.pools == router.route(
                scheduled.request, scheduled.estimate, above_tokens=scheduled.attempts.above_tokens
            )
            assert scheduled.pools

    @invariant()
    def no_request_waits_past_its_deadline(self) -> None:
        for request_id in self.waiting:
            # A timeout that begins again is a sum of other floats here than in the core.
            assert self.expires_at[request_id] > self.now - 1e-9

    @invariant()
    def no_bound_request_waits_for_a_lost_replica(self) -> None:
        """Past the grace period."""
        for scheduled in self.scheduler.queue:
            bound_to = scheduled.request.bound_to
            if bound_to is not None and bound_to not in self.replicas:
                lost_at = max(self.lost_at.get(bound_to, 0.0), scheduled.request.arrived_at)
                assert self.now <= lost_at + 1.0 + 1e-9

    @invariant()
    def wake_ups_are_never_in_the_past(self) -> None:
        wake_at = self.scheduler.next_wakeup()
        assert wake_at is None or wake_at >= self.now - 1e-9


class IsolatingMachine(SchedulerMachine):
    policy = "fcfs-isolated"


class ThreePoolsMachine(SchedulerMachine):
    policy = "fcfs-isolated"
    specs = THREE_POOLS
    routing = RoutingSettings(pools=("short", "mid", "long"), b_short_tokens=600, costs=(1.0, 3.0, 2.0))


class FloorsMachine(IsolatingMachine):
    floors = FLOORS


TestSchedulerMachine = SchedulerMachine.TestCase
TestThreePoolsMachine = ThreePoolsMachine.TestCase
TestIsolatingMachine = IsolatingMachine.TestCase
TestFloorsMachine = FloorsMachine.TestCase
for case, examples in (
    (TestSchedulerMachine, 50),
    (TestIsolatingMachine, 50),
    (TestThreePoolsMachine, 30),
    (TestFloorsMachine, 50),
):
    case.settings = settings(
        max_examples=examples, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow]
    )
# Otherwise pytest would collect it as one more case.
del case
