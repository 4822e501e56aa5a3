"""Batch work beside other requests: how much a replica gets, and which requests are revoked."""

import math

import pytest

from serve_app.core import events as ev
from serve_app.core.accounting.wait_causes import WaitCause
from serve_app.core.accounting.waits import wait_so_far
from serve_app.core.commands import Command, Revoke
from serve_app.core.dispatch.backfill import BackfillSettings, IterationTime
from serve_app.core.dispatch.backpressure import ALONE_FACTOR, BackpressureSettings
from serve_app.core.dispatch.promotion import ClassFloorSettings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from tests.builders import ManualDriver, concluded, dispatched, one_replica

BATCH, INTERACTIVE = PriorityClass.BATCH, PriorityClass.INTERACTIVE
# No growth by pace and a long engine queue, so only the rules for batch work apply.
BACKPRESSURE = BackpressureSettings(lag_factor=0.0, target_waiting=1_000)
PROMPT = 100
# Sequences that double an iteration, before anything is learned.
PRIOR = 64


def make_driver(
    *,
    kv_tokens: int = 500_000,
    max_num_seqs: int = 1_000,
    slowdown: float = 0.1,
    reserve: float = 0.05,
    chunk: int = 0,
) -> ManualDriver:
    return one_replica(
        limits={
            "kv_tokens": kv_tokens,
            "max_num_seqs": max_num_seqs,
            "long_prefill_token_threshold": chunk,
        },
        class_floors=ClassFloorSettings(batch_share=0.0),
        backpressure=BACKPRESSURE,
        backfill=BackfillSettings(max_slowdown=slowdown, reserve=reserve),
    )


def batch_arrives(
    driver: ManualDriver, name: str, *, prompt_tokens: int = 1, max_output_tokens: int = 100
) -> list[Command]:
    return driver.arrive(
        name,
        priority=BATCH,
        prompt_tokens=prompt_tokens,
        max_output_tokens=max_output_tokens,
        revocable=True,
    )


def run_batch(driver: ManualDriver, count: int, name: str = "b", **sizes: int) -> list[str]:
    """Start batch requests one after the other. Return those that were dispatched."""
    started = []
    for number in range(count):
        for request_id, _ in dispatched(batch_arrives(driver, f"{name}{number}", **sizes)):
            driver.feed(ev.FirstToken(request_id), after_s=0.02)
            started.append(request_id)
    return started


def revoked(commands: list[Command]) -> list[str]:
    return [each.request_id for each in commands if isinstance(each, Revoke)]


def put_back(driver: ManualDriver, request_id: str, generated: int = 0) -> list[Command]:
    failure = ev.DispatchFailure.REVOKED
    return driver.feed(ev.DispatchFailed(request_id, "r1", failure, generated_tokens=generated))


def test_batch_prefills_alone_fill_iterations() -> None:
    def sent(driver: ManualDriver) -> int:
        return sum(
            len(dispatched(batch_arrives(driver, f"b{number}", prompt_tokens=PROMPT)))
            for number in range(100)
        )

    alone, shared = make_driver(), make_driver(slowdown=1e6)
    shared.arrive("i", prompt_tokens=1)
    per_request_s = PROMPT * alone.scheduler.prefill_costs.shared.per_token_s
    expected = BACKPRESSURE.batch_prefill_s / per_request_s
    assert sent(alone) == int(ALONE_FACTOR * expected + 1e-9) + 1
    assert sent(shared) <= int(expected) + 1


def test_alone_it_leaves_a_reserve_of_places() -> None:
    assert len(run_batch(make_driver(max_num_seqs=40, reserve=0.1), 50)) == 36


def test_alone_it_leaves_a_reserve_of_kv_cache() -> None:
    driver = make_driver(kv_tokens=10_000, reserve=0.5)
    running = run_batch(driver, 50, prompt_tokens=500, max_output_tokens=500)
    assert running
    assert 0 < driver.scheduler.ledger["r1"].free_tokens <= 5_000
    assert dispatched(driver.arrive("i", priority=INTERACTIVE, prompt_tokens=900)) == [("i", "r1")]


@pytest.mark.parametrize(("slowdown", "expected"), [(0.1, 6), (0.47, 30), (0.001, 1)])
def test_beside_others_it_may_slow_iterations_down_by_a_share(slowdown: float, expected: int) -> None:
    driver = make_driver(slowdown=slowdown)
    driver.arrive("i", prompt_tokens=1, priority=INTERACTIVE)
    driver.feed(ev.FirstToken("i"))
    assert len(run_batch(driver, 80)) == expected == max(1, int(slowdown * (PRIOR + 1)))


def test_beside_others_a_batch_prefill_starts_only_while_no_chunks_of_another_are_computed() -> None:
    driver = make_driver(chunk=256)
    driver.arrive("i", prompt_tokens=900, priority=INTERACTIVE)
    assert not dispatched(batch_arrives(driver, "b0", prompt_tokens=900))
    assert not dispatched(batch_arrives(driver, "b1", prompt_tokens=900))
    assert dispatched(driver.feed(ev.FirstToken("i"))) == [("b0", "r1")]
    assert dispatched(driver.feed(ev.FirstToken("b0"))) == [("b1", "r1")]


@pytest.mark.parametrize(
    ("chunk", "with_arrivals", "least", "most"),
    [
        (0, False, 0.05, 0.13),
        # An iteration hides small chunks, but not beside another prefill.
        (256, False, 0.5, math.inf),
        (256, True, 0.0, 0.15),
        (2_048, False, 0.0, 0.15),
    ],
)
def test_beside_others_its_prefills_take_at_most_that_share_of_the_time(
    chunk: int, with_arrivals: bool, least: float, most: float
) -> None:
    driver = make_driver(slowdown=0.1, chunk=chunk)
    prefill_s = 900 * driver.scheduler.prefill_costs.shared.per_token_s
    driver.arrive("i", prompt_tokens=1, priority=INTERACTIVE)
    driver.feed(ev.FirstToken("i"))
    running: list[tuple[str, str]] = []
    for number in range(600):
        running += dispatched(batch_arrives(driver, f"b{number}", prompt_tokens=900, max_output_tokens=1))
    ended = 0
    for step in range(600):
        if with_arrivals:
            driver.arrive(f"i{step}", prompt_tokens=1, priority=INTERACTIVE)
            driver.feed(ev.FirstToken(f"i{step}"))
        for _ in range(len(running)):
            usage = Usage(prompt_tokens=900, output_tokens=1)
            running += dispatched(driver.feed(ev.Finished(running.pop(0)[0], Outcome.COMPLETED, usage)))
            ended += 1
        running += dispatched(driver.report("r1", after_s=0.1, received=1_000, tpot_s=0.03))
    assert least < ended * prefill_s / driver.now <= most


def test_a_replica_counts_as_shared_some_time_after_the_last_other_request() -> None:
    driver = make_driver()
    driver.arrive("i", prompt_tokens=1, priority=INTERACTIVE)
    driver.feed(ev.FirstToken("i"))
    few = run_batch(driver, 30)
    driver.feed(ev.Cancelled("i"))
    driver.report("r1", after_s=1.5, received=1_000)
    assert driver.scheduler.ledger["r1"].in_flight == len(few)
    driver.report("r1", after_s=1.0, received=1_000)
    assert driver.scheduler.ledger["r1"].in_flight == 30


def test_an_idle_replica_always_accepts_batch_work() -> None:
    driver = make_driver(slowdown=0.0, max_num_seqs=1)
    driver.arrive("i", prompt_tokens=1, priority=INTERACTIVE)
    assert not dispatched(batch_arrives(driver, "b"))
    assert dispatched(driver.feed(ev.Cancelled("i"))) == [("b", "r1")]


def test_other_requests_revoke_what_exceeds_the_share() -> None:
    driver = make_driver()
    run_batch(driver, 20)
    commands = driver.arrive("i", prompt_tokens=1, priority=INTERACTIVE)
    assert dispatched(commands) == [("i", "r1")]
    # Those that were dispatched last have computed least.
    assert revoked(commands) == [f"b{number}" for number in range(19, 5, -1)]
    # Revocations in transit are not repeated.
    assert not revoked(driver.arrive("j", prompt_tokens=1, priority=INTERACTIVE))


def test_requests_with_the_most_progress_are_not_revoked() -> None:
    driver = make_driver()
    run_batch(driver, 20)
    for request_id in revoked(driver.arrive("i", prompt_tokens=1, priority=INTERACTIVE)):
        put_back(driver, request_id, generated=900)
    driver.feed(ev.Cancelled("i"))
    resumed = dispatched(driver.report("r1", after_s=3.0, received=1_000))
    for request_id, _ in resumed:
        resumed += dispatched(driver.feed(ev.FirstToken(request_id)))
    assert len(resumed) == 14
    again = revoked(driver.arrive("j", prompt_tokens=1, priority=INTERACTIVE, arrived_at=driver.now))
    assert {"b0", "b1", "b2", "b3", "b4", "b5"} < set(again)


def test_only_revocable_batch_requests_are_revoked() -> None:
    driver = make_driver(slowdown=0.0)
    driver.arrive("no gateway", priority=BATCH, prompt_tokens=1)
    run_batch(driver, 2)
    driver.feed(ev.FirstToken("no gateway"))
    assert revoked(driver.arrive("i", prompt_tokens=1, priority=INTERACTIVE)) == ["b1", "b0"]


def test_requests_of_a_class_floor_are_not_revoked() -> None:
    driver = one_replica(
        class_floors=ClassFloorSettings(batch_share=0.5),
        backpressure=BACKPRESSURE,
        backfill=BackfillSettings(max_slowdown=0.0),
        limits={"max_num_seqs": 100},
    )
    driver.arrive("i0", prompt_tokens=1, priority=INTERACTIVE)
    for number in range(4):
        batch_arrives(driver, f"b{number}")
    # The first one is backfill, and the others follow by their floor share.
    for number in range(1, 5):
        assert set(revoked(driver.arrive(f"i{number}", prompt_tokens=1, priority=INTERACTIVE))) <= {"b0"}
    assert driver.find("b1").replica_id == driver.find("b2").replica_id == "r1"


def test_a_waiting_request_revokes_as_much_kv_cache_as_it_needs() -> None:
    driver = make_driver(kv_tokens=12_000, reserve=0.0)
    running = run_batch(driver, 20, prompt_tokens=500, max_output_tokens=500)
    assert len(running) >= 10
    commands = driver.arrive("i", priority=INTERACTIVE, prompt_tokens=900, max_output_tokens=50)
    assert not dispatched(commands)
    stopped = revoked(commands)
    assert 1 <= len(stopped) <= 2
    found = [put_back(driver, request_id, generated=10) for request_id in stopped]
    assert ("i", "r1") in [each for commands in found for each in dispatched(commands)]


def test_a_draining_replica_revokes_all_batch_work_and_streams_that_can_move() -> None:
    driver = make_driver()
    run_batch(driver, 5)
    driver.arrive("i", priority=INTERACTIVE)
    driver.arrive("s", priority=INTERACTIVE, revocable=True)
    # Nothing else could serve them yet.
    assert not revoked(driver.report("r1", received=5, draining=True))
    driver.join("r2", "only")
    assert sorted(revoked(driver.report("r1", received=5, draining=True))) == [
        *(f"b{number}" for number in range(5)),
        "s",
    ]
    assert not revoked(driver.report("r1", received=5, draining=True))
    assert dispatched(put_back(driver, "s", generated=3)) == [("s", "r2")]


def test_a_revoked_request_continues_as_one_with_a_longer_prompt() -> None:
    driver = make_driver()
    run_batch(driver, 20, prompt_tokens=10, max_output_tokens=500)
    driver.arrive("i", prompt_tokens=1, priority=INTERACTIVE)
    before = driver.find("b19").estimate
    driver.now += 5.0
    put_back(driver, "b19", generated=200)
    waiting = driver.find("b19")
    assert waiting.queued
    assert (waiting.attempts.put_backs, waiting.attempts.backoff_until, waiting.attempts.avoided) == (
        0,
        0.0,
        frozenset(),
    )
    assert waiting.estimate.expected_prompt_tokens == before.expected_prompt_tokens + 200
    assert waiting.estimate.max_output_tokens == before.max_output_tokens - 200
    assert waiting.estimate.budget_tokens == before.budget_tokens
    assert max(waiting.estimate.output.ends(0.0)) <= 300
    causes = wait_so_far(waiting, driver.now).causes
    assert causes[WaitCause.REVOKED] == pytest.approx(5e9, rel=0.01)
    # The second time, the count includes the first one.
    driver.feed(ev.Cancelled("i"))
    driver.report("r1", after_s=3.0, received=1_000)
    assert driver.find("b19").replica_id == "r1"
    put_back(driver, "b19", generated=250)
    assert driver.find("b19").estimate.expected_prompt_tokens == before.expected_prompt_tokens + 250


def test_a_revocation_after_the_end_changes_nothing() -> None:
    driver = make_driver()
    run_batch(driver, 20)
    (first, *_) = revoked(driver.arrive("i", prompt_tokens=1, priority=INTERACTIVE))
    driver.feed(ev.Finished(first, Outcome.COMPLETED, Usage(prompt_tokens=1, output_tokens=9)))
    assert not put_back(driver, first)
    assert driver.scheduler.find(first) is None


def test_a_replica_that_joins_again_is_not_shared() -> None:
    driver = make_driver()
    driver.arrive("i", prompt_tokens=1, priority=INTERACTIVE)
    assert len(run_batch(driver, 10)) == 6
    for name in ("i", *(f"b{number}" for number in range(10))):
        driver.feed(ev.Cancelled(name))
    driver.feed(ev.ReplicaLost("r1"))
    driver.join("r1", "only", kv_tokens=500_000, max_num_seqs=1_000)
    assert len(run_batch(driver, 10, "c")) == 10


def test_the_duration_of_an_iteration_is_learned_beside_prefills() -> None:
    """8 ms and 0.1 ms for each sequence; every third report includes prefills."""
    time = IterationTime()
    for number in range(3_000):
        running = (2, 5, 12, 30, 60)[number // 600]
        prefill_s = 0.01 * (number % 3 == 0)
        time.observe(running, 0.008 + 1e-4 * running + prefill_s)
    assert time.to_double() == pytest.approx(80, rel=0.1)


def test_the_effect_of_a_sequence_has_bounds() -> None:
    time = IterationTime()
    assert time.to_double() == PRIOR
    for running, tpot_s in ((2, 0.01), (60, 0.010_001)):
        time.observe(running, tpot_s)
    assert time.to_double() == 256
    assert repr(time) == "<IterationTime doubled by 256 sequences>"
    for _ in range(100):
        time.observe(2, 0.02)
        time.observe(60, 0.01)
    # Noise that hides the effect does not allow more.
    assert time.to_double() == PRIOR


@pytest.mark.parametrize(
    ("failure", "generated", "expired"),
    [
        (ev.DispatchFailure.REVOKED, 0, False),
        (ev.DispatchFailure.LOST, 50, False),
        (ev.DispatchFailure.LOST, 0, True),
    ],
)
def test_the_queue_timeout_begins_again_after_a_part_of_the_answer(
    failure: ev.DispatchFailure, generated: int, expired: bool
) -> None:
    driver = make_driver()
    driver.arrive("s", priority=INTERACTIVE, revocable=True, expires_at=60.0)
    driver.feed(ev.FirstToken("s"))
    # The answer takes longer than the request may have waited.
    driver.now = 100.0
    driver.report("r1", received=1, running=1)
    event = ev.DispatchFailed("s", "r1", failure, generated_tokens=generated)
    commands = driver.feed(event)
    assert concluded(commands) == ([("s", "expired")] if expired else [])
    if not expired:
        assert driver.find("s").expires_at == 160.0


def test_a_request_that_begins_anew_is_estimated_from_its_beginning() -> None:
    driver = make_driver()
    run_batch(driver, 20, prompt_tokens=10, max_output_tokens=500)
    driver.arrive("i", prompt_tokens=1, priority=INTERACTIVE)
    before = driver.find("b19").estimate
    put_back(driver, "b19", generated=200)
    driver.feed(ev.Cancelled("i"))
    driver.report("r1", after_s=3.0, received=1_000)
    assert driver.find("b19").replica_id == "r1"
    # The engine could not continue it, and it has generated less when it is revoked again.
    put_back(driver, "b19", generated=0)
    assert (driver.find("b19").estimate, driver.find("b19").attempts.generated) == (before, 0)


def test_a_request_that_waits_for_something_else_revokes_nothing() -> None:
    driver = one_replica(
        limits={"kv_tokens": 4_000, "max_num_seqs": 100, "max_model_len": 1_000},
        class_floors=ClassFloorSettings(batch_share=0.0),
        backpressure=BackpressureSettings(lag_factor=0.0, target_waiting=2),
        backfill=BackfillSettings(max_slowdown=1.0),
    )
    assert run_batch(driver, 2, prompt_tokens=200) == ["b0", "b1"]
    for number in range(4):
        commands = driver.arrive(f"i{number}", prompt_tokens=100, priority=INTERACTIVE)
        assert not revoked(commands)
    # Two wait for the engine's queue, and the free KV cache exceeds what any request can need.
    assert [driver.find(f"i{number}").queued for number in range(4)] == [False, False, True, True]
    assert 1_000 < driver.scheduler.ledger["r1"].free_tokens < 4_096
