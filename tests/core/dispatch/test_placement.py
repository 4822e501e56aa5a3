"""Prefix affinity in the scheduler: each request's replica, and the prompt length that counts."""

from typing import Any

from serve_app.core.commands import Command
from serve_app.core.events import DispatchFailed, DispatchFailure, Finished, FirstToken, ReplicaLost, Resumed
from serve_app.core.routing.prefix import AffinitySettings
from serve_app.errors import Outcome
from serve_app.request import Usage
from tests.builders import ONE_POOL, ManualDriver, dispatched, request

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
    assert (second.replica_id, second.hold.prefill_tokens) == ("s2", 3_300)


def test_a_session_stays_in_the_cache_of_a_slow_replica_while_the_fast_one_is_busy() -> None:
    sessions = on_unlike_replicas()
    assert sessions.replica_of("another", (90, 91)) == "s2"
    sessions.started("another")
    sessions.arrive("second", prompt_tokens=3_300, prefix=SESSION, max_output_tokens=400)
    second = sessions.find("second")
    assert (second.replica_id, second.hold.prefill_tokens) == ("s1", 100)


def test_only_uncached_tokens_are_reserved_and_charged() -> None:
    sessions = Sessions(policy="ewsjf")
    sessions.ask("first")
    sessions.done("first")
    sessions.ask("second")
    assert sessions.find("second").hold.prefill_tokens == 100
    assert sessions.find("second").prefill_tokens == 100
    assert sessions.scheduler.ledger["s1"].pending_prefill_tokens == 100
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
    assert sessions.find("second").hold.prefill_class == 0


def test_a_replica_that_was_lost_is_no_longer_preferred() -> None:
    sessions = Sessions()
    assert sessions.replica_of("first") == "s1"
    sessions.feed(ReplicaLost("s1"))
    sessions.ask("second")
    assert sessions.find("second").cached_tokens == 0
    assert sessions.find("second").replica_id == "s2"


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
