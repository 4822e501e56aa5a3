"""Residency: the contexts on a replica, their eviction, and the room for another one."""

import math

import pytest

from serve_app.core.programs.program import Conversation
from serve_app.core.programs.residency import ReplicaContexts, Residency
from serve_app.core.routing.prefill_cost import DecayingRate
from serve_app.core.routing.replica_state import ReplicaState
from tests.builders import spec

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
