"""Prefix affinity inside the scheduler: where requests go, and how long they count as."""

from typing import Any

from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.routing.prefix.affinity import AffinitySettings
from serve_app.scheduling.commands import Command
from serve_app.scheduling.events import (
    DispatchFailed,
    DispatchFailure,
    Finished,
    FirstToken,
    ReplicaLost,
    Resumed,
)
from serve_app.scheduling.request import ScheduledRequest
from tests.builders import Simulation, dispatched, request

SESSION = tuple(range(1, 26))  # 25 blocks, 3,200 tokens


class Sessions(Simulation):
    """Two replicas in one pool, and requests that say how their prompts begin."""

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

    def find(self, request_id: str) -> ScheduledRequest:
        scheduled = self.scheduler.find(request_id)
        assert scheduled is not None
        return scheduled


def test_a_session_stays_on_its_replica_where_load_alone_would_move_it() -> None:
    for enabled, expected in ((True, "s1"), (False, "s2")):
        world = Sessions(affinity=AffinitySettings(enabled=enabled))
        assert world.replica_of("first") == "s1"
        world.done("first")
        assert world.replica_of("another", (90, 91)) == "s1"
        world.started("another")
        assert world.replica_of("second", (*SESSION, 77)) == expected


def test_only_what_is_left_to_compute_is_promised_and_charged() -> None:
    world = Sessions(policy="ewsjf")
    world.ask("first")
    world.done("first")
    world.ask("second")
    assert world.find("second").hold.prefill_tokens == 100
    assert world.find("second").prefill_tokens == 100
    assert world.scheduler.ledger["s1"].pending_prefill_tokens == 100
    world.ask("fresh", (90, 91))
    assert world.find("fresh").charged - world.find("second").charged == 3_200


def test_a_long_prompt_that_is_mostly_cached_is_a_short_prefill_where_it_is() -> None:
    world = Sessions(policy="ewsjf")
    world.ask("first")
    world.done("first")
    longs = [f"long {number}" for number in range(1, 6)]
    for number, name in enumerate(longs, 1):
        world.ask(name, tuple(range(100 * number, 100 * number + 25)))
    assert all(world.find(name).prefill_class for name in longs)
    # Each replica has as many long prefills under way as it may have, and takes no other.
    assert world.find(longs[-1]).queued
    assert dispatched(world.ask("second")) == [("second", "s1")]
    assert world.find("second").hold.prefill_class == 0


def test_a_replica_that_was_lost_is_no_longer_preferred() -> None:
    world = Sessions()
    assert world.replica_of("first") == "s1"
    world.feed(ReplicaLost("s1"))
    world.ask("second")
    assert world.find("second").cached_tokens == 0
    assert world.find("second").replica_id == "s2"


def test_a_request_that_comes_back_counts_by_what_is_cached_elsewhere() -> None:
    world = Sessions()
    world.ask("first")
    world.started("first")
    world.ask("second")
    assert world.find("second").cached_tokens == 3_200
    world.feed(ReplicaLost("s1"))
    world.feed(DispatchFailed("second", "s1", DispatchFailure.LOST))
    assert world.find("second").replica_id == "s2"
    assert world.find("second").cached_tokens == 0


def test_a_new_scheduler_learns_from_what_gateways_say_is_running() -> None:
    world = Sessions()
    running = request("first", prompt_tokens=3_300, prefix=SESSION)
    world.feed(Resumed(running, "s2", started=True))
    world.feed(Finished("first", Outcome.COMPLETED, None))
    assert world.replica_of("second") == "s2"
