"""A request that needs most of an engine's KV cache, beside a stream of small ones that fill each gap."""

import pytest

from serve_app.errors import Outcome
from serve_app.routing.pools import RoutingSettings
from serve_app.scheduling.commands import Command
from serve_app.scheduling.dispatch.backpressure import BackpressureSettings
from serve_app.scheduling.dispatch.promotion import PromotionSettings
from serve_app.scheduling.events import Cancelled, Event, Finished, FirstToken, ReplicaLost
from serve_app.scheduling.isolation.prefill_isolation import IsolationSettings
from serve_app.scheduling.request import ScheduledRequest
from tests.builders import Simulation, dispatched

KV, SMALL = 10_000, 1_000


class Crowd(Simulation):
    """One pool, always full of small requests, each of which ends ten seconds after it was sent."""

    def __init__(self, replicas: int = 1, *, policy: str = "ewsjf", promoted_after_s: float = 20.0) -> None:
        super().__init__(
            policy=policy,
            routing=RoutingSettings(pools=("only",)),
            isolation=IsolationSettings(max_long_prefills=0),
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
        """A second passes: some end, new ones come."""
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

    def find(self, request_id: str) -> ScheduledRequest:
        scheduled = self.scheduler.find(request_id)
        assert scheduled is not None
        return scheduled

    @property
    def kept(self) -> list[int]:
        return [state.reserved_tokens for state in self.scheduler.ledger]


def huge(world: Simulation, request_id: str = "huge", tokens: int = 9_000) -> None:
    world.arrive(request_id, prompt_tokens=tokens - 10, max_output_tokens=10)


@pytest.mark.parametrize("replicas", [1, 3])
def test_whoever_fits_nowhere_gets_in_soon_after_its_time(replicas: int) -> None:
    crowd = Crowd(replicas)
    crowd.seconds(15, replicas)
    huge(crowd)
    came = crowd.now
    crowd.seconds(20, replicas)
    assert "huge" not in crowd.sent_at
    crowd.seconds(13, replicas)
    # Within the time in which all that ran when its turn came has ended.
    assert came + 20.0 < crowd.sent_at["huge"] <= came + 33.0
    assert crowd.kept == [0] * replicas


def test_without_promotion_it_would_wait_for_ever() -> None:
    crowd = Crowd(promoted_after_s=1e9)
    crowd.seconds(15)
    huge(crowd)
    crowd.seconds(120)
    assert "huge" not in crowd.sent_at


def test_room_is_kept_on_one_replica_and_the_others_go_on() -> None:
    crowd = Crowd(3)
    crowd.seconds(15, 3)
    huge(crowd)
    crowd.seconds(24, 3)
    assert sorted(crowd.kept) == [0, 0, 9_000]
    before = len(crowd.sent_at)
    crowd.seconds(5, 3)
    assert len(crowd.sent_at) > before


def test_what_is_kept_is_given_back_when_the_request_goes_away() -> None:
    crowd = Crowd()
    crowd.seconds(15)
    huge(crowd)
    crowd.seconds(24)
    assert crowd.kept == [9_000]
    why = crowd.scheduler.dispatcher.why_waiting(crowd.find("huge"), crowd.now)
    assert "room is being kept for it" in why
    crowd.feed(Cancelled("huge"))
    assert crowd.kept == [0]
    before = len(crowd.sent_at)
    crowd.seconds(3)
    assert len(crowd.sent_at) > before


def test_a_replica_that_is_lost_keeps_nothing_and_another_one_does() -> None:
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
    assert not any(crowd.kept)


def test_one_at_a_time_and_all_get_in() -> None:
    crowd = Crowd()
    crowd.seconds(15)
    for number in range(3):
        huge(crowd, f"huge {number}")
    crowd.seconds(90)
    times = [crowd.sent_at[f"huge {number}"] for number in range(3)]
    assert times == sorted(times)
    # Between them the small ones had their turns.
    between = [
        at for name, at in crowd.sent_at.items() if name.startswith("small") and times[0] < at < times[2]
    ]
    assert between
