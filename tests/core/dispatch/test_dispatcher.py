"""The dispatcher: classes, placement, capacity reservations and pass-through requests."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.commands import Command, Conclude, Dispatch
from serve_app.core.decision_log import Decision, LoggedRun, RunHeader, replay
from serve_app.core.dispatch import dispatcher
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.dispatch.promotion import ClassFloorSettings, PromotionSettings
from serve_app.core.events import (
    ActiveShareChanged,
    Arrived,
    Cancelled,
    DispatchFailed,
    DispatchFailure,
    Event,
    Finished,
    FirstToken,
    PartitionChanged,
    ReplicaJoined,
    ReplicaLost,
    ReplicaReported,
    Resumed,
)
from serve_app.core.isolation import IsolationSettings
from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.core.request import NO_ATTEMPTS, Attempts
from serve_app.core.routing.prefix import AffinitySettings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from tests.builders import ONE_POOL, ManualDriver, dispatched, one_replica, report, request, running_of, spec

INTERACTIVE, DEFAULT, BATCH = PriorityClass
# No growth by pace, so three are dispatched before the first of them starts.
FREE = BackpressureSettings(lag_factor=0.0)
# Batch work is dispatched only to engines with an empty queue.
STRICT = BackpressureSettings(lag_factor=0.0, batch_prefill_s=0.0)


def make_driver(**changes: Any) -> ManualDriver:
    """Return one replica that accepts three requests until the first of them starts."""
    limits = {"kv_tokens": 50_000, "max_num_seqs": 200}
    return one_replica(limits=limits, **{"backpressure": FREE, **changes})


def served_one_by_one(driver: ManualDriver, first: list[str]) -> list[str]:
    """Return the order of dispatch when dispatched requests start one by one."""
    order, sent = [], list(first)
    while sent:
        following = driver.feed(FirstToken(sent.pop(0)))
        names = [name for name, _ in dispatched(following)]
        order += names
        sent += names
    return order


def test_a_newcomer_is_dispatched_right_after_what_was_already_sent() -> None:
    driver = make_driver()
    sent = [name for n in range(20) for name, _ in dispatched(driver.arrive(f"a{n}", tenant="a"))]
    driver.arrive("b", tenant="b", prompt_tokens=300)
    driver.arrive("c", tenant="c")
    assert sent == ["a0", "a1", "a2"]
    assert served_one_by_one(driver, sent)[:4] == ["b", "c", "a3", "a4"]


def test_interactive_is_dispatched_first_then_default_then_batch() -> None:
    driver = make_driver(class_floors=ClassFloorSettings(default_share=0.0, batch_share=0.0))
    sent = [name for n in range(3) for name, _ in dispatched(driver.arrive(f"s{n}"))]
    driver.arrive("batch", priority=BATCH)
    driver.arrive("default", priority=DEFAULT)
    driver.arrive("urgent", priority=INTERACTIVE)
    order = served_one_by_one(driver, sent)
    assert order == ["urgent", "default", "batch"]


def test_batch_waits_for_an_engine_with_an_empty_queue() -> None:
    driver = make_driver(class_floors=ClassFloorSettings(batch_share=0.0), backpressure=STRICT)
    driver.arrive("r1")
    assert driver.arrive("b1", priority=BATCH) == []
    assert "capacity that other requests leave" in driver.wait_reasons("b1")
    # A rule that a request is exempt from is not why it waits.
    waiting = driver.find("b1")
    waiting.attempts = Attempts(returned=True)
    assert "capacity that other requests leave" not in driver.wait_reasons("b1")
    waiting.attempts = NO_ATTEMPTS
    assert dispatched(driver.feed(FirstToken("r1"))) == [("b1", "r1")]


def test_batch_joins_a_prefill_that_is_shorter_than_an_iteration() -> None:
    """At the prior of 0.1 ms per token, 0.02 s are 200 tokens."""
    driver = make_driver(class_floors=ClassFloorSettings(batch_share=0.0))
    per_token_s = driver.scheduler.prefill_costs.shared.per_token_s
    enough = int(FREE.batch_prefill_s / per_token_s) + 1
    driver.arrive("r1", prompt_tokens=enough - 50)
    assert dispatched(driver.arrive("b1", priority=BATCH, prompt_tokens=100)) == [("b1", "r1")]
    assert driver.arrive("b2", priority=BATCH, prompt_tokens=10) == []


def test_batch_gets_its_floor_share_during_interactive_traffic() -> None:
    driver = make_driver(class_floors=ClassFloorSettings(batch_share=0.1), backpressure=STRICT)
    driver.arrive("b1", priority=BATCH, tenant="night")
    driver.arrive("b2", priority=BATCH, tenant="night")
    running = ["b1"]
    order: list[str] = []
    for n in range(40):
        commands = driver.arrive(f"u{n}", priority=INTERACTIVE)
        if len(running) >= 3:
            commands += driver.feed(FirstToken(running.pop(0)))
        names = [name for name, _ in dispatched(commands)]
        running += names
        order += names
    assert "b2" in order
    assert order.index("b2") >= 9


def test_service_is_charged_at_dispatch_and_settled_with_what_the_engine_counted() -> None:
    driver = make_driver()
    driver.arrive("a", prompt_tokens=100, max_output_tokens=50, tenant="a")
    shares = driver.scheduler.queue.shares[DEFAULT]
    assert shares.counters()["a"] > 0
    driver.feed(FirstToken("a"))
    driver.feed(Finished("a", Outcome.COMPLETED, Usage(prompt_tokens=100, output_tokens=7)))
    assert shares.counters()["a"] == pytest.approx(114)


def test_a_request_that_was_returned_unserved_is_not_charged() -> None:
    driver = make_driver()
    driver.arrive("a", tenant="a")
    driver.feed(DispatchFailed("a", "r1", DispatchFailure.UNREACHABLE))
    assert driver.scheduler.queue.shares[DEFAULT].counters()["a"] == 0


def test_the_wait_reason_of_a_head_is_readable() -> None:
    driver = make_driver()
    for n in range(4):
        driver.arrive(f"r{n}")
    assert driver.wait_reasons("r3").startswith("only: every replica is at its limit")
    driver = ManualDriver(routing=ONE_POOL)
    driver.arrive("alone")
    assert driver.wait_reasons("alone") == "only: no replica is connected"


# -- prefix affinity: the replica of a request, and the prompt length that counts -------------------------

SESSION = tuple(range(1, 26))  # 25 blocks, 3,200 tokens


class Sessions(ManualDriver):
    """Two replicas in one pool, and requests with given prefixes."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.join("s1", max_model_len=16_000, kv_tokens=100_000)
        self.join("s2", max_model_len=16_000, kv_tokens=100_000)

    def started(self, request_id: str) -> None:
        self.feed(FirstToken(request_id), after_s=0.5)

    def ask(
        self, request_id: str, prefix: tuple[int, ...] = SESSION, prompt_tokens: int = 3_300
    ) -> list[Command]:
        return self.arrive(request_id, prompt_tokens=prompt_tokens, prefix=prefix)

    def done(self, request_id: str) -> list[Command]:
        usage = Usage(prompt_tokens=3_300, output_tokens=10)
        return self.feed(Finished(request_id, Outcome.COMPLETED, usage), after_s=0.5)

    def replica_of(self, request_id: str, prefix: tuple[int, ...] = SESSION) -> str:
        return dict(dispatched(self.ask(request_id, prefix)))[request_id]


def test_a_session_stays_on_its_replica_where_load_alone_would_move_it() -> None:
    for enabled, expected in ((True, "s1"), (False, "s2")):
        sessions = Sessions(affinity=AffinitySettings(enabled=enabled))
        assert sessions.replica_of("first") == "s1"
        sessions.done("first")
        assert sessions.replica_of("another", (90, 91)) == "s2"
        assert sessions.replica_of("third", (92, 93)) == "s1"
        sessions.started("another")
        sessions.started("third")
        assert sessions.replica_of("second", (*SESSION, 77)) == expected


def on_unlike_replicas() -> Sessions:
    """Return a driver whose replica s1 takes twice as long, and has the session cached."""
    sessions = Sessions()
    assert sessions.replica_of("first") == "s1"
    sessions.done("first")
    ledger = sessions.scheduler.ledger
    for replica_id, took_s in (("s1", 2.0), ("s2", 1.0)):
        for _ in range(16):
            ledger[replica_id].speed.record(took_s, 1_000.0, 1.0)
    ledger.speeds.compare("short", ledger.of_pool("short"), 10.0)
    return sessions


def test_a_single_request_goes_to_the_fast_replica_although_the_slow_one_has_its_prompt_cached() -> None:
    sessions = on_unlike_replicas()
    sessions.arrive("second", prompt_tokens=3_300, prefix=SESSION, max_output_tokens=400)
    # What it has to compute there is the whole prompt.
    second = sessions.find("second")
    assert (second.replica_id, running_of(second).prefill_tokens) == ("s2", 3_300)


def test_a_session_stays_in_the_cache_of_a_slow_replica_while_the_fast_one_is_busy() -> None:
    sessions = on_unlike_replicas()
    assert sessions.replica_of("another", (90, 91)) == "s2"
    sessions.started("another")
    sessions.arrive("second", prompt_tokens=3_300, prefix=SESSION, max_output_tokens=400)
    second = sessions.find("second")
    assert (second.replica_id, running_of(second).prefill_tokens) == ("s1", 100)


def test_only_uncached_tokens_are_reserved_and_charged() -> None:
    sessions = Sessions(policy="ewsjf")
    sessions.ask("first")
    sessions.done("first")
    sessions.ask("second")
    assert running_of(sessions.find("second")).prefill_tokens == 100
    assert sessions.find("second").prefill_tokens == 100
    assert sessions.scheduler.ledger["s1"].prefills.tokens == 100
    sessions.ask("fresh", (90, 91))
    assert sessions.find("fresh").charged - sessions.find("second").charged == 3_200


def test_a_mostly_cached_long_prompt_is_a_short_prefill_on_that_replica() -> None:
    sessions = Sessions(policy="ewsjf")
    sessions.ask("first")
    sessions.done("first")
    longs = [f"long {number}" for number in range(1, 6)]
    for number, name in enumerate(longs, 1):
        sessions.ask(name, tuple(range(100 * number, 100 * number + 25)))
    assert all(sessions.find(name).prefill_class for name in longs)
    # Each replica has its maximum of long prefills in flight.
    assert sessions.find(longs[-1]).queued
    assert dispatched(sessions.ask("second")) == [("second", "s1")]
    assert running_of(sessions.find("second")).prefill_class == 0


def test_a_returned_request_counts_by_what_is_cached_elsewhere() -> None:
    sessions = Sessions()
    sessions.ask("first")
    sessions.started("first")
    sessions.ask("second")
    assert sessions.find("second").cached_tokens == 3_200
    sessions.feed(ReplicaLost("s1"))
    sessions.feed(DispatchFailed("second", "s1", DispatchFailure.LOST))
    assert sessions.find("second").replica_id == "s2"
    assert sessions.find("second").cached_tokens == 0


def with_a_full_cache(**changes: Any) -> Sessions:
    """Return a driver whose replica s1 has the session cached, and its KV cache full of running requests."""
    sessions = Sessions(**changes)
    assert sessions.replica_of("first") == "s1"
    sessions.done("first")
    for number in range(7):
        running = request(f"running {number}", prompt_tokens=14_000)
        sessions.feed(Resumed(running, "s1", started=True))
    assert sessions.scheduler.ledger["s1"].free_tokens < 3_300
    return sessions


def test_a_full_kv_cache_moves_no_session() -> None:
    sessions = with_a_full_cache()
    assert sessions.replica_of("fresh", (90, 91)) == "s2"
    assert sessions.replica_of("second") == "s1"
    assert running_of(sessions.find("second")).prefill_tokens == 100


def test_a_session_moves_from_a_full_kv_cache_if_its_tokens_there_are_reserved() -> None:
    sessions = with_a_full_cache()
    ledger = sessions.scheduler.ledger
    ledger.reserve(ledger["s1"], 1_000)
    assert sessions.replica_of("second") == "s2"


def test_a_session_of_batch_work_moves_from_a_full_kv_cache() -> None:
    sessions = with_a_full_cache()
    sessions.arrive("second", prompt_tokens=3_300, prefix=SESSION, priority=BATCH)
    assert sessions.find("second").replica_id == "s2"


def test_a_session_moves_from_a_full_kv_cache_if_its_tenant_must_leave_tokens_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions = with_a_full_cache()
    monkeypatch.setattr(sessions.scheduler.headroom, "tokens", lambda _scheduled, _pool: 500)
    assert sessions.replica_of("second") == "s2"


# Under EWSJF it is a long prompt, of which only a short part is left to compute.
@pytest.mark.parametrize("policy", ["fcfs", "ewsjf"])
def test_a_session_waits_while_all_kv_caches_are_full(policy: str) -> None:
    sessions = with_a_full_cache(policy=policy)
    for number in range(7):
        sessions.feed(Resumed(request(f"other {number}", prompt_tokens=14_000), "s2", started=True))
    sessions.ask("second")
    assert sessions.find("second").queued


def test_a_new_scheduler_learns_prefixes_from_resumed_requests() -> None:
    sessions = Sessions()
    running = request("first", prompt_tokens=3_300, prefix=SESSION)
    sessions.feed(Resumed(running, "s2", started=True))
    sessions.feed(Finished("first", Outcome.COMPLETED, None))
    assert sessions.replica_of("second") == "s2"


def test_idle_replicas_take_turns() -> None:
    driver = ManualDriver(routing=ONE_POOL)
    for replica_id in ("s1", "s2", "s3"):
        driver.join(replica_id, "only")
    chosen = []
    for number in range(6):
        driver.arrive(f"r{number}")
        chosen.append(driver.find(f"r{number}").replica_id)
        driver.feed(Finished(f"r{number}", Outcome.COMPLETED))
    assert chosen == ["s1", "s2", "s3"] * 2


def test_equals_take_turns_beside_a_slow_replica() -> None:
    driver = ManualDriver(routing=ONE_POOL)
    seconds = {"s1": 0.40, "s2": 0.44, "s3": 2.0}
    for replica_id in seconds:
        driver.join(replica_id, "only")
        driver.report(replica_id)
    chosen = []
    for number in range(60):
        for replica_id in seconds:
            driver.report(replica_id)
        driver.arrive(f"r{number}")
        used = driver.find(f"r{number}").replica_id
        assert used is not None
        chosen.append(used)
        driver.feed(FirstToken(f"r{number}"), after_s=seconds[used] / 2)
        usage = Usage(prompt_tokens=40, output_tokens=10)
        driver.feed(Finished(f"r{number}", Outcome.COMPLETED, usage), after_s=seconds[used] / 2)
    assert driver.scheduler.ledger.speeds.are_unlike("only")
    assert chosen.count("s1") > 20
    assert chosen.count("s2") > 20
    assert chosen.count("s3") < 10


# -- a request that needs most of an engine's KV cache, beside a stream of small ones ---------------------

KV, SMALL = 10_000, 980


class Crowd(ManualDriver):
    """A pool that is always full of small requests, each of which ends ten seconds after its dispatch."""

    def __init__(
        self,
        replicas: int = 1,
        *,
        policy: str = "ewsjf",
        promoted_after_s: float = 20.0,
        max_long_prefills: int = 0,
    ) -> None:
        super().__init__(
            policy=policy,
            routing=ONE_POOL,
            isolation=IsolationSettings(max_long_prefills=max_long_prefills),
            backpressure=BackpressureSettings(target_waiting=4),
            promotion=PromotionSettings(default_s=promoted_after_s),
        )
        self.names = [f"s{number}" for number in range(replicas)]
        self.sent_at: dict[str, float] = {}
        self.ends_at: dict[str, float] = {}
        self.number = 0
        for name in self.names:
            self.join(name, "only", max_model_len=KV, kv_tokens=KV, max_num_seqs=64)

    def feed(self, event: Event, *, after_s: float = 0.0) -> list[Command]:
        commands = super().feed(event, after_s=after_s)
        for request_id, _ in dispatched(commands):
            self.sent_at[request_id] = self.now
            self.ends_at[request_id] = self.now + 10.0
        return commands

    def second(self, arrivals: int = 1) -> None:
        """Advance one second: some requests end, others arrive."""
        self.now += 1.0
        for request_id in [each for each, at in self.ends_at.items() if at <= self.now]:
            del self.ends_at[request_id]
            self.feed(Finished(request_id, Outcome.COMPLETED))
        for _ in range(arrivals):
            self.number += 1
            self.arrive(f"small {self.number}", prompt_tokens=SMALL - 10, max_output_tokens=10)
        for request_id in list(self.ends_at):
            self.feed(FirstToken(request_id))
        for name in self.names:
            if self.scheduler.ledger.get(name) is not None:
                self.report(name, received=10_000)

    def seconds(self, count: int, arrivals: int = 1) -> None:
        for _ in range(count):
            self.second(arrivals)

    @property
    def reserved(self) -> list[int]:
        return [state.reserved_tokens for state in self.scheduler.ledger]


def huge(crowd: Crowd, request_id: str = "huge", tokens: int = 9_000) -> None:
    crowd.arrive(request_id, prompt_tokens=tokens - 10, max_output_tokens=10)


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_request_that_fits_nowhere_is_dispatched_soon_after_its_promotion(replicas: int) -> None:
    crowd = Crowd(replicas)
    crowd.seconds(15, replicas)
    huge(crowd)
    arrived_at = crowd.now
    crowd.seconds(20, replicas)
    assert "huge" not in crowd.sent_at
    crowd.seconds(13, replicas)
    # Within the time in which everything that ran at its promotion has ended.
    assert arrived_at + 20.0 < crowd.sent_at["huge"] <= arrived_at + 33.0
    assert crowd.reserved == [0] * replicas


def test_without_promotion_it_waits_forever() -> None:
    crowd = Crowd(promoted_after_s=1e9)
    crowd.seconds(15)
    huge(crowd)
    crowd.seconds(120)
    assert "huge" not in crowd.sent_at


def test_capacity_is_reserved_on_one_replica_and_the_others_continue() -> None:
    crowd = Crowd(3)
    crowd.seconds(15, 3)
    huge(crowd)
    crowd.seconds(24, 3)
    assert sorted(crowd.reserved) == [0, 0, 9_000]
    before = len(crowd.sent_at)
    crowd.seconds(5, 3)
    assert len(crowd.sent_at) > before


def test_a_reservation_is_dropped_when_its_request_is_cancelled() -> None:
    crowd = Crowd()
    crowd.seconds(15)
    huge(crowd)
    crowd.seconds(24)
    assert crowd.reserved == [9_000]
    assert "capacity is reserved for it" in crowd.wait_reasons("huge")
    crowd.feed(Cancelled("huge"))
    assert crowd.reserved == [0]
    before = len(crowd.sent_at)
    crowd.seconds(3)
    assert len(crowd.sent_at) > before


def test_when_its_replica_is_lost_a_request_gets_a_reservation_on_another() -> None:
    crowd = Crowd(2)
    crowd.seconds(15, 2)
    huge(crowd)
    crowd.seconds(24, 2)
    (lost,) = [state.spec.replica_id for state in crowd.scheduler.ledger if state.reserved_tokens]
    crowd.names.remove(lost)
    for request_id in [each for each in crowd.ends_at if crowd.find(each).replica_id == lost]:
        del crowd.ends_at[request_id]
    crowd.feed(ReplicaLost(lost))
    crowd.seconds(25)
    assert "huge" in crowd.sent_at
    assert not any(crowd.reserved)


def test_reservations_are_made_one_at_a_time_and_all_requests_are_dispatched() -> None:
    crowd = Crowd()
    crowd.seconds(15)
    for number in range(3):
        huge(crowd, f"huge {number}")
    crowd.seconds(90)
    times = [crowd.sent_at[f"huge {number}"] for number in range(3)]
    assert times == sorted(times)
    # Small requests were dispatched between them.
    between = [
        at for name, at in crowd.sent_at.items() if name.startswith("small") and times[0] < at < times[2]
    ]
    assert between


@pytest.mark.parametrize("is_only_long_prompt", [False, True])
def test_capacity_is_reserved_early_for_a_tenant_that_is_behind(
    is_only_long_prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_only_long_prompt:
        # The heads that are examined as likely to fit do not include it.
        monkeypatch.setattr(dispatcher, "_FEW_HEADS", 0)
    crowd = Crowd(promoted_after_s=1_000.0, max_long_prefills=2 * is_only_long_prompt)
    crowd.seconds(15)
    crowd.arrive("huge", prompt_tokens=5_990, max_output_tokens=10, tenant="light")
    arrived_at = crowd.now
    crowd.seconds(20, 2)
    # Everything that ran at its arrival has ended, and the service since then ranks the flood behind it.
    assert crowd.sent_at["huge"] <= arrived_at + 15.0
    assert crowd.reserved == [0]


def test_among_equal_shares_no_capacity_stays_idle() -> None:
    crowd = Crowd(promoted_after_s=1_000.0)
    crowd.seconds(15)
    crowd.arrive("huge", prompt_tokens=5_990, max_output_tokens=10)
    for _ in range(20):
        crowd.second(2)
        assert crowd.reserved == [0]


def test_capacity_is_reserved_for_the_largest_head_of_a_tenant_that_is_behind() -> None:
    """A smaller head of the same tenant would fit, but not under the limit on long prefills."""
    isolation = IsolationSettings(max_long_prefills=1, owed_requests=1_000.0)
    driver = ManualDriver(policy="ewsjf", routing=ONE_POOL, isolation=isolation)
    driver.join("e", "only", max_model_len=KV, kv_tokens=KV, max_num_seqs=64)
    bounds = ((1, 1_000), (1_001, 2_000), (2_001, 5_000))
    lengths = (
        LengthInterval(min_tokens=a, max_tokens=b, mean_tokens=(a + b) / 2, count=9) for a, b in bounds
    )
    driver.feed(PartitionChanged(Partition(tuple(lengths))))

    def send(name: str, tokens: int, tenant: str = "heavy") -> list[Command]:
        return driver.arrive(name, prompt_tokens=tokens - 10, max_output_tokens=10, tenant=tenant)

    def send_small(number: int) -> None:
        assert dispatched(send(f"small {number}", SMALL)) == [(f"small {number}", "e")]
        driver.feed(FirstToken(f"small {number}"))

    send("long prefill", 1_500)
    for number in range(6):
        send_small(number)
    for tenant in ("heavy", "light"):
        assert send(f"{tenant} medium", 1_200, tenant) == send(f"{tenant} large", 4_000, tenant) == []
    for number in range(6, 12):
        if driver.scheduler.ledger["e"].reserved_tokens:
            break
        driver.feed(Finished(f"small {number - 6}", Outcome.COMPLETED), after_s=0.1)
        send_small(number)

    assert "capacity is reserved for it" in driver.wait_reasons("light large")


# -- pass-through requests in observe mode, beside scheduled ones -----------------------------------------


def fleet(active_share: float, replicas: int = 3, **limits: int) -> ManualDriver:
    driver = ManualDriver(routing=ONE_POOL, active_share=active_share)
    for number in range(replicas):
        driver.join(f"s{number}", "only", **limits)
    return driver


def sent(driver: ManualDriver, count: int) -> list[Dispatch]:
    found = []
    for number in range(count):
        commands = driver.arrive(f"r{number}")
        found += [command for command in commands if isinstance(command, Dispatch)]
    return found


def test_in_observe_mode_every_request_is_dispatched_immediately_to_the_least_loaded() -> None:
    driver = fleet(0.0, max_num_seqs=2)
    found = sent(driver, 30)
    assert len(found) == 30
    assert all(each.passed and each.queue_wait_s == 0 for each in found)
    assert Counter(each.replica_id for each in found) == {"s0": 10, "s1": 10, "s2": 10}
    # The ledger counts them all the same.
    assert sum(state.in_flight for state in driver.scheduler.ledger) == 30
    driver.feed(Finished(found[0].request_id, Outcome.COMPLETED))
    assert driver.scheduler.ledger["s0"].in_flight == 9


def test_at_a_share_of_one_no_request_bypasses_the_scheduler() -> None:
    driver = fleet(1.0, max_num_seqs=1)
    found = sent(driver, 60)
    assert 0 < len(found) < 60
    assert not any(each.passed for each in found)


def passed(active_share: float, *, count: int = 300, replicas: int = 1, **limits: int) -> set[str]:
    return {each.request_id for each in sent(fleet(active_share, replicas, **limits), count) if each.passed}


def test_a_share_is_scheduled_and_the_same_requests_each_time() -> None:
    found = passed(0.3, count=1_000, max_num_seqs=2)
    assert 650 <= len(found) <= 750
    assert passed(0.3, count=1_000, replicas=2) == found
    # A larger share only adds scheduled requests.
    assert passed(0.6) < passed(0.2)


def test_the_share_can_be_changed_and_restored() -> None:
    driver = fleet(1.0, replicas=1, max_num_seqs=1)
    sent(driver, 20)
    waiting = len(driver.scheduler.queue)
    assert waiting
    driver.feed(ActiveShareChanged(0.0))
    (went,) = driver.arrive("later")
    assert isinstance(went, Dispatch)
    assert went.passed
    # Queued requests are unaffected.
    assert len(driver.scheduler.queue) == waiting
    driver.feed(ActiveShareChanged(1.0))
    assert driver.arrive("last") == []


def test_without_a_live_replica_a_bypassing_request_waits() -> None:
    driver = fleet(0.0, replicas=1)
    driver.feed(ReplicaLost("s0"))
    assert driver.arrive("r") == []
    driver.join("s1", "only")
    assert driver.find("r").replica_id == "s1"


def test_a_bypassing_request_too_long_for_every_replica_is_rejected() -> None:
    driver = fleet(0.0)
    (rejected,) = driver.arrive("r", prompt_tokens=10_000_000)
    assert isinstance(rejected, Conclude)
    assert rejected.conclusion.outcome is Outcome.REJECTED_TOO_LONG


def test_a_bypassing_request_is_retried_on_another_replica() -> None:
    driver = fleet(0.0)
    (went,) = sent(driver, 1)
    commands = driver.feed(DispatchFailed("r0", went.replica_id, DispatchFailure.UNREACHABLE))
    again = [each for each in commands if isinstance(each, Dispatch)]
    assert [each.replica_id != went.replica_id for each in again] == [True]
    # Only arrivals bypass the scheduler.
    assert [each.passed for each in again] == [False]


@given(
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    arrivals=st.lists(st.integers(1, 500), min_size=1, max_size=60),
)
def test_every_request_is_sent_or_waits_and_the_log_replays(shares: list[float], arrivals: list[int]) -> None:
    driver = ManualDriver(routing=ONE_POOL, active_share=shares[0])
    scheduler = driver.scheduler
    decisions: list[tuple[int, Decision]] = []

    def feed(event: Event) -> None:
        decisions.append((len(decisions), Decision(driver.now, event, tuple(driver.feed(event)))))

    for replica_id in ("s0", "s1"):
        feed(ReplicaJoined(spec(replica_id, "only", max_num_seqs=3)))
        feed(ReplicaReported(replica_id, report()))
    for number, tokens in enumerate(arrivals):
        feed(ActiveShareChanged(shares[number % len(shares)]))
        feed(Arrived(request(f"r{number}", prompt_tokens=tokens)))
        running = [each for each in scheduler.requests.values() if not each.queued]
        assert len(running) + len(scheduler.queue) == len(scheduler)
        for state in scheduler.ledger:
            held = [running_of(each).tokens for each in running if each.replica_id == state.spec.replica_id]
            assert (state.in_flight, state.held_tokens) == (len(held), sum(held))
    assert replay(LoggedRun(RunHeader(settings=scheduler.settings), decisions)) is None
