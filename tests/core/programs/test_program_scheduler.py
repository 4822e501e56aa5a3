"""The scheduling of programs: contexts stay on their replicas, and other turns wait for room."""

from typing import Any
from unittest.mock import Mock

import pytest

from serve_app.core.accounting.waits import current_cause
from serve_app.core.events import (
    Cancelled,
    DispatchFailed,
    DispatchFailure,
    Event,
    Finished,
    FirstToken,
    GatewayLost,
    ReplicaLost,
    Resumed,
    Woke,
)
from serve_app.core.programs import program_scheduler
from serve_app.core.programs.program_scheduler import programs_document
from serve_app.core.settings import ProgramsSettings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from tests.builders import (
    concluded,
    dispatched,
    fill,
    only_conclusion,
    requests_in_memory,
    running_of,
)
from tests.core.programs.builders import KV_TOKENS, ProgramDriver, causes, fleet

# Of a context of 60,000 of 100,000 tokens, after calls of tools.
RETENTION_S = 2**0.5
# Contexts are retained for longer than the starvation bound.
LONG = ProgramsSettings(retention=100.0)


def full(**changes: object) -> ProgramDriver:
    """Return one replica whose cache has room for the running turn of program `a` only."""
    driver = fleet("s1", **changes)  # type: ignore[arg-type]
    assert dispatched(driver.start_turn("a1", "a")) == [("a1", "s1")]
    driver.feed(FirstToken("a1"))
    return driver


def parked(**changes: object) -> ProgramDriver:
    """Return one replica whose cache has no room for the parked turn of program `b`."""
    driver = full(**changes)
    assert driver.start_turn("b1", "b") == []
    assert driver.find("b1").parked
    return driver


def bound() -> ProgramDriver:
    """Return a busy replica `s1` for which turn `a2` waits, and an idle replica `s2`."""
    driver = fleet("s1", "s2")
    driver.start_turn("a1", "a", prompt_tokens=40_000)
    driver.end_turn("a1", context=40_000)
    fill(driver, bound_to="s1")
    assert driver.start_turn("a2", "a", prompt_tokens=45_000) == []
    assert driver.find("a2").resident_on == "s1"
    return driver


def assert_nothing_is_left(driver: ProgramDriver) -> None:
    """Check that no turn is open, and that nothing counts as admitted or active."""
    assert len(driver.programs.parked) == 0
    assert driver.scheduler.queue.parked == {}
    for state in driver.scheduler.ledger:
        contexts = driver.contexts(state.spec.replica_id)
        assert (contexts.admitted, contexts.active) == (0, set())
    for program in driver.programs.table.programs():
        assert [each for each in program.conversations if each.turns_open or each.running] == []


# Turns with a context


def test_a_turn_goes_to_the_replica_of_its_context_even_if_another_is_freer() -> None:
    driver = fleet("s1", "s2")
    ((_, home),) = dispatched(driver.start_turn("a1", "a", prompt_tokens=40_000))
    driver.end_turn("a1", context=40_000)
    driver.arrive("other", prompt_tokens=30_000, bound_to=home)
    for number in range(2, 5):
        assert dispatched(driver.start_turn(f"a{number}", "a", prompt_tokens=41_000)) == [
            (f"a{number}", home)
        ]
        driver.end_turn(f"a{number}", context=41_000)
    assert driver.conversation("a").replica_id == home
    assert driver.programs.moved == 0


def test_the_context_counts_as_cached_if_the_prompt_extends_it() -> None:
    driver = fleet("s1")
    driver.start_turn("a1", "a", prompt_tokens=40_000, prefix=(1,), messages=2)
    driver.end_turn("a1", context=40_000)
    driver.start_turn("a2", "a", prompt_tokens=41_000, prefix=(1, 2), messages=4)
    assert driver.find("a2").cached_tokens == 40_000
    assert running_of(driver.find("a2")).prefill_tokens == 1_000


def test_a_turn_waits_for_a_busy_replica_as_long_as_computing_its_context_takes() -> None:
    driver = bound()
    recompute_s = driver.scheduler.prefill_costs.of("only").seconds(45_000)
    assert driver.programs.next_at() == pytest.approx(recompute_s)
    assert "it is bound to replica s1" in driver.wait_reasons("a2")
    assert current_cause(driver.find("a2")).value == "residency"
    assert dispatched(driver.feed(Woke(), after_s=recompute_s - 0.1)) == []
    commands = driver.feed(Woke(), after_s=0.1)
    assert dispatched(commands) == [("a2", "s2")]
    assert causes(commands) == {"residency": pytest.approx(recompute_s)}
    assert driver.programs.moved == 1
    assert driver.conversation("a").replica_id == "s2"
    assert len(driver.contexts("s1")) == 0
    assert driver.contexts("s1").admitted == driver.contexts("s2").admitted == 0


def test_it_waits_no_longer_than_computing_what_is_cached_takes() -> None:
    driver = fleet("s1", "s2")
    driver.start_turn("a1", "a", prompt_tokens=20_000, prefix=(1,), messages=2)
    driver.end_turn("a1", context=20_000)
    fill(driver, bound_to="s1")
    driver.start_turn("a2", "a", prompt_tokens=45_000, prefix=(1, 2), messages=4)
    recompute_s = driver.scheduler.prefill_costs.of("only").seconds(20_000)
    assert driver.programs.next_at() == pytest.approx(recompute_s)


def test_a_turn_that_waits_for_its_replica_is_sent_there_when_it_has_capacity() -> None:
    driver = bound()
    assert driver.contexts("s1").admitted == driver.find("a2").estimate.expected_tokens
    assert dispatched(driver.feed(Finished("f0", Outcome.COMPLETED))) == [("a2", "s1")]
    assert driver.contexts("s1").admitted == 0
    assert driver.programs.moved == 0


def test_the_context_of_a_lost_replica_is_forgotten_and_its_turns_go_elsewhere() -> None:
    driver = bound()
    assert dispatched(driver.feed(ReplicaLost("s1"))) == [("a2", "s2")]
    assert driver.conversation("a").replica_id == "s2"


def test_a_context_moves_if_its_replica_accepts_nothing() -> None:
    driver = fleet("s1", "s2")
    driver.start_turn("a1", "a")
    driver.end_turn("a1")
    driver.report("s1", draining=True)
    assert dispatched(driver.start_turn("a2", "a")) == [("a2", "s2")]
    assert len(driver.contexts("s1")) == 0
    driver.end_turn("a2")
    assert driver.conversation("a").replica_id == "s2"
    assert_nothing_is_left(driver)


def test_a_turn_that_ends_on_a_lost_replica_leaves_no_context() -> None:
    driver = fleet("s1", "s2")
    driver.start_turn("a1", "a")
    driver.feed(ReplicaLost("s1"))
    driver.feed(Resumed(driver.find("a1").request, "s2", started=False))
    driver.feed(ReplicaLost("s2"))
    driver.feed(Resumed(driver.find("a1").request, "s1", started=False))
    driver.end_turn("a1")
    assert driver.conversation("a").replica_id is None
    driver.join_fleet("s1")
    assert len(driver.contexts("s1")) == 0


# Turns without a context


def test_a_first_turn_is_dispatched_at_once_if_there_is_room() -> None:
    driver = fleet("s1", "s2")
    assert dispatched(driver.start_turn("a1", "a")) == [("a1", "s1")]
    # The other replica has more room.
    assert dispatched(driver.start_turn("b1", "b", prompt_tokens=20_000)) == [("b1", "s2")]
    assert dispatched(driver.start_turn("c1", "c", prompt_tokens=20_000)) == [("c1", "s2")]


def test_it_goes_where_most_of_its_prompt_is_cached() -> None:
    driver = fleet("s1", "s2")
    driver.arrive("first", prompt_tokens=30_000, prefix=(1, 2, 3), messages=3, bound_to="s2")
    driver.feed(Finished("first", Outcome.COMPLETED))
    driver.arrive("busy", prompt_tokens=10_000, bound_to="s2")
    turn = driver.start_turn("a1", "a", prompt_tokens=40_000, prefix=(1, 2, 3, 4), messages=5)
    assert dispatched(turn) == [("a1", "s2")]


def test_a_turn_without_room_is_parked_until_a_context_need_not_be_retained() -> None:
    driver = parked()
    assert current_cause(driver.find("b1")).value == "residency"
    assert dispatched(driver.end_turn("a1", after_s=10.0)) == []
    assert driver.programs.next_at() == pytest.approx(driver.now + RETENTION_S)
    assert dispatched(driver.feed(Woke(), after_s=RETENTION_S - 0.01)) == []
    commands = driver.wake()
    assert dispatched(commands) == [("b1", "s1")]
    assert causes(commands) == {"residency": pytest.approx(10.0 + RETENTION_S)}
    # Its context has evicted the other one.
    assert driver.conversation("a").replica_id is None


def test_turns_are_not_tried_one_by_one_while_none_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = parked()
    tried = Mock(side_effect=driver.programs.residency.room)
    monkeypatch.setattr(driver.programs.residency, "room", tried)
    for number in range(20):
        driver.start_turn(f"c{number}", f"c{number}", tenant=f"t{number}")
    # Each event compares the largest room with the smallest turn.
    assert tried.call_count == 20


def test_an_unused_replica_accepts_a_turn_of_any_size() -> None:
    driver = fleet("s1", kv_tokens=20_000)
    assert dispatched(driver.start_turn("a1", "a", prompt_tokens=60_000)) == [("a1", "s1")]


def test_a_turn_that_was_parked_beside_a_draining_replica_is_dispatched_when_it_recovers() -> None:
    driver = fleet("s1")
    driver.report("s1", draining=True)
    assert driver.start_turn("a1", "a") == []
    assert dispatched(driver.report("s1")) == [("a1", "s1")]


def test_a_turn_that_may_not_wait_is_dispatched_if_there_is_room() -> None:
    driver = fleet("s1")
    assert dispatched(driver.start_turn("a1", "a", no_wait=True)) == [("a1", "s1")]
    assert concluded(driver.start_turn("b1", "b", no_wait=True)) == [("b1", "rejected_queue_full")]
    driver.feed(Cancelled("a1"))
    assert_nothing_is_left(driver)


@pytest.mark.parametrize(
    ("kv_tokens", "prompt_tokens", "is_parked"),
    [
        # Less than 1/64 of the cache.
        (1_000_000, 15_000, False),
        (1_000_000, 16_000, True),
        # Computed within a second.
        (KV_TOKENS, 9_000, False),
        (KV_TOKENS, 10_000, True),
    ],
)
def test_a_turn_that_costs_little_is_never_parked(
    kv_tokens: int, prompt_tokens: int, is_parked: bool
) -> None:
    driver = fleet("s1", kv_tokens=kv_tokens)
    driver.report("s1", draining=True)
    assert driver.start_turn("a1", "a", prompt_tokens=prompt_tokens) == []
    assert driver.find("a1").parked is is_parked


def test_requests_without_a_program_pass_parked_turns() -> None:
    driver = parked()
    assert dispatched(driver.arrive("other", prompt_tokens=30_000)) == [("other", "s1")]
    assert driver.find("other").turn is None
    assert driver.find("b1").parked


def test_what_requests_without_a_program_hold_takes_room() -> None:
    driver = fleet("s1")
    driver.arrive("other", prompt_tokens=60_000)
    driver.feed(FirstToken("other"))
    assert driver.start_turn("a1", "a") == []
    assert dispatched(driver.feed(Finished("other", Outcome.COMPLETED))) == [("a1", "s1")]


def test_without_residency_no_turn_is_parked() -> None:
    driver = full(programs=ProgramsSettings(residency=False))
    driver.start_turn("b1", "b", prompt_tokens=50_000)
    assert not driver.find("b1").parked


def test_without_staying_no_turn_is_bound() -> None:
    driver = fleet("s1", "s2", programs=ProgramsSettings(stay=False))
    driver.start_turn("a1", "a")
    driver.end_turn("a1")
    driver.start_turn("a2", "a")
    assert driver.find("a2").resident_on is None
    driver.end_turn("a2")
    assert_nothing_is_left(driver)


def test_disabled_scheduling_of_programs_recognises_no_turn() -> None:
    driver = full(programs=ProgramsSettings(enabled=False))
    commands = driver.start_turn("b1", "b", prompt_tokens=30_000)
    assert dispatched(commands) == [("b1", "s1")]
    assert driver.find("b1").turn is None
    assert driver.programs.table.programs() == []


# The starvation bound


@pytest.mark.parametrize(
    ("priority", "bound_s"), [(PriorityClass.INTERACTIVE, 15.0), (PriorityClass.DEFAULT, 60.0)]
)
def test_a_parked_turn_is_admitted_at_its_bound(priority: PriorityClass, bound_s: float) -> None:
    driver = full(programs=LONG)
    assert driver.start_turn("b1", "b", priority=priority) == []
    driver.end_turn("a1")
    assert driver.programs.next_at() == bound_s
    assert dispatched(driver.feed(Woke(), after_s=bound_s - 0.1)) == []
    commands = driver.feed(Woke(), after_s=0.1)
    assert dispatched(commands) == [("b1", "s1")]
    assert causes(commands) == {"residency": bound_s}
    assert driver.programs.forced == 1


def test_few_turns_are_admitted_at_their_bound() -> None:
    driver = parked(programs=LONG)
    driver.start_turn("c1", "c")
    driver.end_turn("a1")
    assert dispatched(driver.feed(Woke(), after_s=60.0)) == [("b1", "s1")]
    assert driver.programs.forced == 1
    assert driver.find("c1").parked
    # The next one waits for the allowance or for the end of the retention.
    assert driver.programs.next_at() == pytest.approx(100 * RETENTION_S)
    driver.end_turn("b1", after_s=1.0)
    assert driver.find("c1").parked
    # Nine turns of 60,000 tokens are not ten times the prompt of the first forced one.
    served = 0
    while driver.find("c1").parked and served < 20:
        driver.start_turn(f"b{served + 2}", "b")
        driver.end_turn(f"b{served + 2}", after_s=1.0)
        served += 1
    assert 7 <= served <= 10
    assert driver.programs.forced == 2


def test_service_is_saved_up_for_few_turns() -> None:
    """After much service without parked turns, four prompts of 60,000 tokens exceed what was saved."""
    driver = fleet("s1", programs=LONG)
    for number in range(300):
        driver.arrive(f"other {number}", prompt_tokens=20_000)
        driver.feed(Finished(f"other {number}", Outcome.COMPLETED))
    driver.start_turn("a1", "a")
    for number in range(8):
        driver.start_turn(f"p{number}", f"p{number}")
    driver.feed(Woke(), after_s=61.0)
    assert driver.programs.forced == 4


def test_overdue_turns_are_tried_again_when_the_usable_replicas_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = full(programs=LONG)
    driver.join("lora", "only", max_model_len=90_000, kv_tokens=KV_TOKENS, adapters=("x",))
    driver.report("lora", draining=True)
    for number in range(20):
        driver.start_turn(f"b{number}", f"b{number}", adapter="x")
    tried = Mock(side_effect=driver.scheduler.ledger.of_pool)
    monkeypatch.setattr(driver.scheduler.ledger, "of_pool", tried)
    driver.feed(Woke(), after_s=61.0)
    assert tried.call_count >= 20
    tried.reset_mock()
    for _ in range(5):
        driver.feed(Woke(), after_s=1.0)
    assert tried.call_count < 20
    driver.feed(Cancelled("b0"))
    assert driver.programs.forced == 0
    driver.report("lora")
    assert not driver.find("b1").parked


def test_turns_that_have_left_are_forgotten_before_their_bound() -> None:
    driver = parked()
    before = requests_in_memory()
    for number in range(500):
        driver.start_turn(f"c{number}", f"c{number}")
        driver.feed(Cancelled(f"c{number}"))
    assert requests_in_memory() - before < 100


def test_an_overdue_turn_is_tried_again_when_its_engine_answers_after_a_hang() -> None:
    driver = fleet("s1", programs=LONG)
    driver.join("e", "only", max_model_len=90_000, kv_tokens=KV_TOKENS, adapters=("x",), stall_timeout_s=20.0)
    driver.arrive("long", prompt_tokens=60_000, adapter="x")
    driver.start_turn("late", "a", adapter="x")
    driver.report("e", after_s=61.0)
    assert driver.find("late").parked
    driver.feed(FirstToken("long"))
    assert driver.programs.forced == 1


# Ends


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Cancelled("b1"), ""),
        (GatewayLost("gone"), ""),
        (Woke(), "main cause: the KV caches had no room for the context of its program"),
    ],
)
def test_a_parked_turn_that_ends_leaves_nothing(event: Event, message: str) -> None:
    driver = full()
    assert driver.start_turn("b1", "b", gateway_id="gone", expires_at=30.0) == []
    ended = driver.feed(event, after_s=30.0)
    assert [request_id for request_id, _ in concluded(ended)] == ["b1"]
    assert message in only_conclusion(ended).message
    assert causes(ended) == {"residency": 30.0}
    driver.feed(Cancelled("a1"))
    assert_nothing_is_left(driver)


def test_a_turn_that_is_cancelled_before_its_dispatch_leaves_no_context() -> None:
    driver = fleet("s1")
    fill(driver, bound_to="s1")
    assert driver.start_turn("a1", "a", prompt_tokens=40_000) == []
    assert driver.find("a1").resident_on == "s1"
    driver.feed(Cancelled("a1"))
    assert_nothing_is_left(driver)
    assert driver.conversation("a").replica_id is None
    assert len(driver.contexts("s1")) == 0


@pytest.mark.parametrize(
    ("failure", "replica_id"),
    [
        (DispatchFailure.BUSY, "s1"),
        (DispatchFailure.ENGINE_ERROR, "s1"),
        (DispatchFailure.REVOKED, "s1"),
        (DispatchFailure.LOST, "s2"),
        (DispatchFailure.UNREACHABLE, "s2"),
    ],
)
def test_a_turn_that_was_put_back_is_placed_again(failure: DispatchFailure, replica_id: str) -> None:
    driver = fleet("s1", "s2")
    driver.start_turn("a1", "a")
    assert dispatched(driver.feed(DispatchFailed("a1", "s1", failure))) == [("a1", replica_id)]
    assert driver.conversation("a").replica_id == replica_id
    driver.end_turn("a1")
    assert_nothing_is_left(driver)


def test_a_turn_in_backoff_waits_for_its_end_and_for_room() -> None:
    driver = full()
    driver.start_turn("b1", "b", prompt_tokens=10_000)
    for _ in range(2):
        driver.feed(DispatchFailed("b1", "s1", DispatchFailure.BUSY))
    again = driver.find("b1")
    assert again.attempts.backoff_until > driver.now
    commands = driver.feed(Woke(), after_s=again.attempts.backoff_until - driver.now)
    assert dispatched(commands) == [("b1", "s1")]
    assert set(causes(commands)) <= {"backoff", "earlier_attempt"}
    driver.end_turn("b1")
    driver.end_turn("a1")
    assert_nothing_is_left(driver)


def test_only_the_time_without_room_adds_to_the_waits_of_a_program() -> None:
    driver = parked()
    driver.end_turn("a1", after_s=5.0)
    for number in range(3):
        driver.arrive(f"other{number}")
    # It has room now, and waits for the busy engine.
    driver.wake()
    room_after_s = driver.now
    assert driver.find("b1").queued
    driver.feed(Finished("other0", Outcome.COMPLETED), after_s=0.01)
    driver.feed(DispatchFailed("b1", "s1", DispatchFailure.BUSY), after_s=1.0)
    driver.feed(Cancelled("b1"), after_s=1.0)
    program = driver.conversation("b").program
    assert program is not None
    assert program.waiting_s == pytest.approx(room_after_s)
    assert program.running == program.open_agents == 0


def test_requests_that_are_never_continued_do_not_shorten_retention() -> None:
    """After their time, they are forgotten like programs, but say nothing about gaps between turns."""
    driver = fleet("s1")
    for number in range(500):
        driver.arrive(f"chat{number}", prefix=(number,), messages=1)
        driver.feed(Finished(f"chat{number}", Outcome.COMPLETED))
    driver.now += 7 * 3_600.0
    driver.report("s1")
    driver.start_turn("a1", "a")
    assert len(driver.programs.table) == 1
    driver.start_turn("b1", "b")
    driver.end_turn("a1")
    assert driver.programs.next_at() == pytest.approx(driver.now + RETENTION_S)


# -- snapshot for operators -------------------------------------------------------------------------------


def rows_of(driver: ProgramDriver) -> dict[str, dict[str, Any]]:
    document = programs_document(driver.programs, driver.now, 10)
    return {row["program"]: row for row in document["rows"]}


def test_a_program_is_running_waiting_or_in_a_gap() -> None:
    driver = fleet("s1")
    driver.start_turn("a1", "a")
    driver.start_turn("b1", "b", tenant="t2")
    driver.now = 5.0
    rows = rows_of(driver)
    assert (rows["a"]["state"], rows["a"]["replicas"], rows["a"]["turns"]) == ("running", ("s1",), 0)
    assert (rows["b"]["state"], rows["b"]["replicas"], rows["b"]["tenant"]) == ("waiting", (), "t2")
    driver.end_turn("a1", after_s=5.0)
    ended = rows_of(driver)["a"]
    assert (ended["state"], ended["turns"], ended["context_tokens"]) == ("in a gap", 1, 60_000)
    assert (ended["queued_s"], ended["engine_s"], ended["age_s"]) == (0.0, 10.0, 10.0)


def test_the_document_counts_recent_programs_and_shows_the_last_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = fleet("s1")
    for number in range(4):
        driver.start_turn(f"r{number}", f"p{number}", prompt_tokens=1_000)
        driver.end_turn(f"r{number}", context=1_000, after_s=1.0)
    driver.start_turn("again", "p2", prompt_tokens=1_500)
    driver.end_turn("again", context=1_500, after_s=3.0)
    document = programs_document(driver.programs, driver.now, 2)
    assert (document["known"], document["recent_by_state"], document["turns"]) == (4, {"in a gap": 4}, 5)
    assert [row["program"] for row in document["rows"]] == ["p2", "p3"]
    assert document["rows"][0]["gap_s"] == 1.0
    monkeypatch.setattr(program_scheduler, "_EXAMINED", 3)
    document = programs_document(driver.programs, driver.now, 2)
    assert (document["known"], document["recent_by_state"]) == (4, {"in a gap": 3})
