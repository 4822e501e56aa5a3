"""A request that needs most of an engine's KV cache, beside a stream of small ones."""

import pytest

from serve_app.core.commands import Command
from serve_app.core.dispatch import dispatcher
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.dispatch.promotion import PromotionSettings
from serve_app.core.events import Cancelled, Event, Finished, FirstToken, PartitionChanged, ReplicaLost
from serve_app.core.isolation import IsolationSettings
from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.errors import Outcome
from tests.builders import ONE_POOL, ManualDriver, dispatched

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


def test_capacity_is_reserved_early_for_a_tenant_that_is_behind() -> None:
    crowd = Crowd(promoted_after_s=1_000.0)
    crowd.seconds(15)
    crowd.arrive("huge", prompt_tokens=5_990, max_output_tokens=10, tenant="light")
    arrived_at = crowd.now
    crowd.seconds(20, 2)
    # Everything that ran at its arrival has ended, and the service since then ranks the flood behind it.
    assert crowd.sent_at["huge"] <= arrived_at + 15.0
    assert crowd.reserved == [0]


def test_capacity_is_reserved_for_it_even_if_no_similar_request_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the only long prompt, so the heads that are examined as likely to fit do not include it."""
    monkeypatch.setattr(dispatcher, "_FEW_HEADS", 0)
    crowd = Crowd(promoted_after_s=1_000.0, max_long_prefills=2)
    crowd.seconds(15)
    crowd.arrive("huge", prompt_tokens=5_990, max_output_tokens=10, tenant="light")
    arrived_at = crowd.now
    crowd.seconds(20, 2)
    assert crowd.sent_at["huge"] <= arrived_at + 15.0


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
