"""Residency: the contexts on a replica, their eviction, its capacity, and the gaps between turns."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.events import Finished
from serve_app.core.programs.program import Conversation
from serve_app.core.programs.residency import Gaps, GapTimes, LearnedCapacity, ReplicaContexts, Residency
from serve_app.core.routing.prefill_cost import DecayingRate
from serve_app.core.routing.prefix import LIKELY_KV_TOKENS
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.errors import Outcome
from serve_app.request import TurnEnd, Usage
from tests.builders import spec
from tests.core.programs.builders import ProgramDriver, fleet

CAPACITY = 10_000


def conversation(name: str) -> Conversation:
    return Conversation("t1", name, 0.0, replica_id="s1")


def in_gap(contexts: ReplicaContexts, name: str, tokens: int, retained_until: float = 0.0) -> Conversation:
    found = conversation(name)
    contexts.retire(found, tokens, retained_until)
    return found


def replica(held_tokens: int = 0) -> ReplicaState:
    state = ReplicaState(spec("s1"), 0, DecayingRate(60.0, 0.0), CAPACITY)
    state.held_tokens = held_tokens
    return state


def residency() -> Residency:
    found = Residency(lambda _state: CAPACITY)
    found.growth_tokens = 0.0
    return found


def test_the_least_recently_used_context_is_evicted_first() -> None:
    contexts = ReplicaContexts()
    first, second, third = (in_gap(contexts, name, 3_000) for name in "abc")
    assert contexts.evict(9_000) == []
    contexts.activate(first)
    contexts.retire(first, 3_000, 0.0)
    assert contexts.evict(8_999) == [second]
    assert [each for each, _ in contexts.idle()] == [third, first]
    assert contexts.evict(2_999) == [third, first]
    assert len(contexts) == 0


def test_an_active_context_is_not_evicted() -> None:
    contexts = ReplicaContexts()
    one = in_gap(contexts, "a", 3_000)
    contexts.activate(one)
    assert contexts.evict(0) == []
    assert contexts.holds(one)


def test_what_other_requests_left_is_evicted_with_what_is_older() -> None:
    contexts = ReplicaContexts()
    older = in_gap(contexts, "a", 3_000)
    contexts.leave(5_000)
    newer = in_gap(contexts, "b", 3_000)
    assert contexts.evict(11_000) == []
    # The 5,000 tokens are used later than the first context and earlier than the second.
    assert contexts.evict(10_999) == [older]
    assert contexts.evict(3_000) == []
    assert contexts.holds(newer)


def test_what_other_requests_left_in_an_empty_cache_takes_no_room() -> None:
    contexts = ReplicaContexts()
    contexts.leave(5_000)
    in_gap(contexts, "a", 3_000)
    assert contexts.evict(3_000) == []


def test_a_context_is_retained_until_its_time() -> None:
    contexts = ReplicaContexts()
    in_gap(contexts, "a", 3_000, retained_until=5.0)
    in_gap(contexts, "b", 2_000, retained_until=3.0)
    assert contexts.retained(2.9) == 5_000
    assert contexts.next_at(2.9) == 3.0
    # The newer context still takes room, because the older one is evicted first.
    assert contexts.retained(3.0) == 5_000
    assert contexts.next_at(3.0) == 5.0
    assert contexts.retained(5.0) == 0
    assert contexts.next_at(5.0) == math.inf


def test_an_older_context_need_not_be_retained_for_a_newer_one() -> None:
    contexts = ReplicaContexts()
    in_gap(contexts, "a", 3_000, retained_until=3.0)
    in_gap(contexts, "b", 2_000, retained_until=5.0)
    assert contexts.retained(2.0) == 5_000
    assert contexts.retained(3.0) == 2_000


def test_what_other_requests_left_is_retained_with_an_older_context() -> None:
    contexts = ReplicaContexts()
    in_gap(contexts, "a", 3_000, retained_until=5.0)
    assert contexts.retained(1.0) == 3_000
    contexts.leave(500)
    assert contexts.retained(1.0) == 3_500


def test_a_context_that_returns_or_leaves_is_no_longer_retained() -> None:
    contexts = ReplicaContexts()
    one, other = (in_gap(contexts, name, 1_000, retained_until=9.0) for name in "ab")
    assert contexts.retained(1.0) == 2_000
    contexts.activate(one)
    assert contexts.retained(1.0) == 1_000
    contexts.remove(other)
    assert contexts.retained(1.0) == 0
    assert repr(contexts) == "<ReplicaContexts active=1 idle=0 admitted=0>"


def test_room_is_what_is_neither_held_nor_admitted_nor_retained() -> None:
    contexts = (found := residency()).of("s1")
    contexts.admitted = 1_000
    in_gap(contexts, "a", 3_000, retained_until=5.0)
    assert found.room(replica(held_tokens=2_000), 1.0) == CAPACITY - 2_000 - 1_000 - 3_000
    assert found.next_at(1.0) == 5.0
    assert found.room(replica(held_tokens=2_000), 5.0) == CAPACITY - 2_000 - 1_000
    assert found.next_at(5.0) is None


def test_room_is_left_for_the_growth_of_each_context_in_use() -> None:
    contexts = (found := residency()).of("s1")
    contexts.activate(conversation("a"))
    in_gap(contexts, "not retained", 3_000)
    assert found.room(replica(), 1.0) == CAPACITY
    for _ in range(3):
        found.observe_growth(100)
    # Of five turns.
    assert found.room(replica(), 1.0) == CAPACITY - 500
    contexts.activate(conversation("b"))
    assert found.room(replica(), 1.0) == CAPACITY - 1_000
    for _ in range(1_000):
        found.observe_growth(300)
    assert found.growth_tokens == pytest.approx(300, abs=1)


def test_a_context_that_became_shorter_counts_as_no_growth() -> None:
    found = residency()
    found.observe_growth(-5_000)
    assert found.growth_tokens == 0.0


def test_a_replica_is_unused_if_it_runs_and_retains_nothing() -> None:
    contexts = (found := residency()).of("s1")
    in_gap(contexts, "a", 3_000, retained_until=5.0)
    assert not found.is_unused(replica(), 1.0)
    assert found.is_unused(replica(), 5.0)
    busy = replica()
    busy.in_flight = 1
    assert not found.is_unused(busy, 5.0)
    contexts.activate(conversation("b"))
    assert not found.is_unused(replica(), 5.0)


def test_an_evicted_context_is_on_no_replica() -> None:
    contexts = (found := residency()).of("s1")
    one = in_gap(contexts, "a", 3_000)
    contexts.admitted = 4_000
    found.evict(replica(held_tokens=3_000))
    assert one.replica_id == "s1"
    found.evict(replica(held_tokens=3_001))
    assert one.replica_id is None


def test_a_lost_replica_has_no_contexts() -> None:
    contexts = (found := residency()).of("s1")
    idle, active = in_gap(contexts, "a", 3_000), conversation("b")
    contexts.activate(active)
    assert found.lose("s1") == [active]
    assert idle.replica_id is None
    assert found.known("s1") is None
    assert found.lose("s1") == []


# -- learned capacity of a replica that does not report it ------------------------------------------------


def learned(*hits: int) -> LearnedCapacity:
    capacity = LearnedCapacity()
    for depth in hits:
        capacity.on_hit(depth)
    return capacity


@pytest.mark.parametrize(
    ("hits", "misses", "tokens"),
    [
        pytest.param((), (), LIKELY_KV_TOKENS, id="no evidence"),
        pytest.param((5_000,), (), LIKELY_KV_TOKENS, id="a small context is cached"),
        pytest.param((200_000,), (), 210_000, id="a deeper context is cached: a little beyond it"),
        pytest.param((30_000,), (60_000,), 60_000, id="a context is not cached"),
        pytest.param((), (60_000,), LIKELY_KV_TOKENS, id="the engine has reported no cached tokens"),
        pytest.param((300_000,), (200_000,), 200_000, id="a refuted lower bound is forgotten"),
    ],
)
def test_hits_and_misses_bound_the_capacity(
    hits: tuple[int, ...], misses: tuple[int, ...], tokens: int
) -> None:
    capacity = learned(*hits)
    for depth in misses:
        capacity.on_miss(depth)
    assert capacity.tokens == tokens


def test_an_upper_bound_that_was_refuted_rises_with_every_refutation() -> None:
    capacity = learned(30_000)
    capacity.on_miss(60_000)
    seen = [capacity.tokens]
    for _ in range(60):
        capacity.on_hit(capacity.tokens)
        seen.append(capacity.tokens)
    assert seen == sorted(set(seen))
    assert seen[-1] > 2 * seen[0]


def test_an_upper_bound_is_forgotten_slowly() -> None:
    capacity = learned(30_000)
    capacity.on_miss(60_000)
    for _ in range(100):
        capacity.on_hit(30_000)
    assert 60_000 < capacity.tokens < 66_000


def test_it_converges_on_the_size_of_a_cache() -> None:
    capacity, actual, depth = LearnedCapacity(), 400_000, 0
    for _ in range(500):
        # Contexts of 20,000 tokens return from every depth that is expected to be cached, or is a bit deeper.
        depth = depth + 20_000 if depth < 1.1 * capacity.tokens else 20_000
        if depth <= actual:
            capacity.on_hit(depth)
        elif depth <= capacity.tokens:
            capacity.on_miss(capacity.tokens)
    assert capacity.tokens == pytest.approx(actual, rel=0.1)


# In the scheduler


def hidden() -> ProgramDriver:
    driver = fleet()
    driver.join_fleet("s1", kv_tokens=None)
    return driver


def turn(driver: ProgramDriver, name: str, number: int, context: int, cached: int) -> None:
    """Play a turn of a conversation whose prompt extends the last one."""
    prefix = tuple(hash((name, block)) for block in range(10 + number))
    driver.start_turn(f"{name}{number}", name, prompt_tokens=context, prefix=prefix, messages=2 + 2 * number)
    while driver.programs.parked:
        driver.wake()
    usage = Usage(prompt_tokens=context, output_tokens=10, cached_tokens=cached, ending=TurnEnd.TOOLS)
    driver.feed(Finished(f"{name}{number}", Outcome.COMPLETED, usage), after_s=1.0)


def test_a_reported_capacity_is_used_as_it_is() -> None:
    driver = fleet("s1", kv_tokens=150_000)
    turn(driver, "a", 0, 60_000, 0)
    turn(driver, "a", 1, 61_000, 60_000)
    assert driver.programs.capacity(driver.scheduler.ledger["s1"]) == 150_000
    assert "of 0 to inf" in repr(driver.contexts().capacity)


def test_contexts_that_the_model_evicts_and_the_engine_does_not_raise_the_capacity() -> None:
    driver = hidden()
    state = driver.scheduler.ledger["s1"]
    for number in range(3):
        for name in "abc":
            turn(driver, name, number, 60_000 + number, 0 if number == 0 else 60_000)
    assert 180_000 < driver.programs.capacity(state) < 200_000
    assert all(driver.conversation(name).replica_id == "s1" for name in "abc")


def test_contexts_that_the_engine_evicts_and_the_model_does_not_lower_the_capacity() -> None:
    driver = hidden()
    state = driver.scheduler.ledger["s1"]
    turn(driver, "a", 0, 20_000, 0)
    turn(driver, "a", 1, 20_100, 20_000)
    turn(driver, "b", 0, 30_000, 0)
    turn(driver, "a", 2, 20_200, 0)
    assert driver.programs.capacity(state) < 60_000


def test_a_shorter_context_that_is_not_cached_shows_nothing() -> None:
    driver = hidden()
    turn(driver, "a", 0, 900, 0)
    turn(driver, "a", 1, 950, 800)
    turn(driver, "a", 2, 990, 0)
    assert driver.programs.capacity(driver.scheduler.ledger["s1"]) == LIKELY_KV_TOKENS


# -- learned gaps: the time for which a context is retained -----------------------------------------------

# All gaps end in the bin from 0.71 to 1 s, in the middle of which they count.
SOON = ((1.0, 0.9),)
# Half of them do, and the other conversations do not return.
HALF_SOON = ((0.5, 0.9),)


@pytest.mark.parametrize(
    ("prior", "recompute_s", "expected_s"),
    [
        # E[min(G, 1)] = 0.71 + 0.29 / 2 = 0.85.
        (SOON, 0.79, 0.0),
        (SOON, 1.0, 1.0),
        # E[min(G, 1)] = 0.71 + 0.29 * 3/4 = 0.93, which is less than half of the recomputation above 1.85 s.
        (HALF_SOON, 1.6, 0.0),
        (HALF_SOON, 2.0, 1.0),
    ],
)
def test_a_context_is_retained_as_long_as_that_costs_less_than_computing_it(
    prior: tuple[tuple[float, float], ...], recompute_s: float, expected_s: float
) -> None:
    assert GapTimes(prior).retention_s(recompute_s, price=1.0) == expected_s


@pytest.mark.parametrize("ending", list(TurnEnd))
def test_a_context_that_is_cheap_to_compute_is_not_retained_in_a_long_gap(ending: TurnEnd) -> None:
    assert Gaps().after(ending).retention_s(0.1, price=1.0) == 0.0


def test_a_context_is_retained_after_calls_of_tools_sooner_than_after_an_answer() -> None:
    gaps = Gaps()
    after_tools = gaps.after(TurnEnd.TOOLS).retention_s(5.0, price=1.0)
    assert after_tools > gaps.after(TurnEnd.DONE).retention_s(5.0, price=1.0)
    assert gaps.after(None).retention_s(5.0, price=1.0) == after_tools


def test_only_the_ratio_of_the_costs_matters() -> None:
    gaps = Gaps().after(TurnEnd.TOOLS)
    assert gaps.retention_s(20.0, price=1.0) == gaps.retention_s(5.0, price=0.25)


@given(
    gaps=st.lists(st.sampled_from([0.01, 0.3, 2.0, 50.0, 1e5, math.inf]), max_size=60),
    costs=st.tuples(st.floats(1e-3, 1e4), st.floats(1e-3, 1e4)),
)
def test_retains_longer_what_costs_more(gaps: list[float], costs: tuple[float, float]) -> None:
    times = GapTimes(HALF_SOON)
    for gap_s in gaps:
        times.observe(gap_s)
    cheap, dear = sorted(costs)
    assert 0.0 <= times.retention_s(cheap, price=1.0) <= times.retention_s(dear, price=1.0)


def test_the_retention_follows_the_observed_gaps() -> None:
    times = Gaps().after(TurnEnd.TOOLS)
    assert times.retention_s(1.0, price=1.0) == 0.0
    for _ in range(400):
        times.observe(0.3)
    assert times.retention_s(1.0, price=1.0) == pytest.approx(2**-1.5)
    for _ in range(2_000):
        times.observe(math.inf)
    assert times.retention_s(1.0, price=1.0) == 0.0


def test_the_two_ways_of_ending_are_learned_apart() -> None:
    gaps = Gaps()
    after_tools = gaps.after(TurnEnd.TOOLS).retention_s(1.0, price=1.0)
    for _ in range(400):
        gaps.after(TurnEnd.DONE).observe(0.3)
    assert gaps.after(TurnEnd.DONE).retention_s(1.0, price=1.0) > 0.0
    assert gaps.after(TurnEnd.TOOLS).retention_s(1.0, price=1.0) == after_tools
    assert repr(gaps) == "<Gaps after tools <GapTimes n=0>, otherwise <GapTimes n=400>>"
