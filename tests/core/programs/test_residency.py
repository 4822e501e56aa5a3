"""Residency: the contexts on a replica, their eviction, its capacity, and the gaps between turns."""

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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


conversations = st.sampled_from([conversation(name) for name in "abcd"])
amounts = st.integers(1, 5)


class ContextsMachine(RuleBasedStateMachine):
    """Compares the contexts of a replica with a list of all that its cache has."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts, self.now = ReplicaContexts(), 0.0
        self.active: set[Conversation] = set()
        # The least recently used first: tokens, and how long they are to be retained. Other requests leave
        # tokens of no conversation.
        self.cache: list[tuple[Conversation | None, int, float]] = []

    @rule(one=conversations)
    def activate(self, one: Conversation) -> None:
        self.contexts.activate(one)
        self.drop(one)
        self.active.add(one)

    @rule(one=conversations, tokens=amounts, retained_s=amounts)
    def retire(self, one: Conversation, tokens: int, retained_s: int) -> None:
        self.contexts.retire(one, tokens, self.now + retained_s)
        self.drop(one)
        self.cache.append((one, tokens, self.now + retained_s))

    @rule(one=conversations)
    def remove(self, one: Conversation) -> None:
        self.contexts.remove(one)
        self.drop(one)

    @rule(tokens=amounts)
    def leave(self, tokens: int) -> None:
        self.contexts.leave(tokens)
        self.cache.append((None, tokens, 0.0))

    @rule(free_tokens=st.integers(0, 20))
    def evict(self, free_tokens: int) -> None:
        evicted = []
        while (idle := self.idle()) and self.tokens_from(idle[0]) > free_tokens:
            evicted.append(idle[0])
            self.drop(idle[0])
        assert self.contexts.evict(free_tokens) == evicted

    @rule(seconds=amounts)
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def knows_what_is_cached(self) -> None:
        contexts, idle = self.contexts, self.idle()
        assert list(contexts.idle()) == [(one, tokens) for one, tokens, _ in self.cache if one is not None]
        assert (contexts.active, len(contexts)) == (self.active, len(self.active) + len(idle))
        assert contexts.depth() == (self.tokens_from(idle[0]) if idle else 0)
        assert [contexts.depth(one) for one in idle] == [self.tokens_from(one) for one in idle]

    @invariant()
    def retains_what_is_not_older_than_a_context_to_retain(self) -> None:
        until = {one: at for one, _, at in self.cache if one is not None and at > self.now}
        assert self.contexts.retained(self.now) == max(map(self.tokens_from, until), default=0)
        assert self.contexts.next_at(self.now) == min(until.values(), default=math.inf)
        assert self.contexts.in_use(self.now) == len(self.active) + len(until)

    def drop(self, one: Conversation) -> None:
        self.active.discard(one)
        self.cache = [entry for entry in self.cache if entry[0] is not one]

    def idle(self) -> list[Conversation]:
        return [one for one, _, _ in self.cache if one is not None]

    def tokens_from(self, oldest: Conversation) -> int:
        """Return the tokens of a context and of what was used after it."""
        place = next(place for place, entry in enumerate(self.cache) if entry[0] is oldest)
        return sum(tokens for _, tokens, _ in self.cache[place:])


TestContextsMachine = ContextsMachine.TestCase


def replica(held_tokens: int = 0) -> ReplicaState:
    state = ReplicaState(spec("s1"), 0, DecayingRate(60.0, 0.0), CAPACITY)
    state.held_tokens = held_tokens
    return state


@pytest.fixture
def residency() -> Residency:
    """Return a replica with one context of 3,000 tokens, which is retained until 5 s."""
    found = Residency(lambda _state: CAPACITY)
    found.of("s1").retire(conversation("idle"), 3_000, 5.0)
    return found


def test_room_is_what_is_neither_held_nor_admitted_nor_retained(residency: Residency) -> None:
    residency.of("s1").admitted = 1_000
    assert residency.room(replica(held_tokens=2_000), 1.0) == CAPACITY - 2_000 - 1_000 - 3_000
    assert residency.next_at(1.0) == 5.0
    assert residency.room(replica(held_tokens=2_000), 5.0) == CAPACITY - 2_000 - 1_000
    assert residency.next_at(5.0) is None


def test_room_is_left_for_the_growth_of_each_context_in_use(residency: Residency) -> None:
    residency.of("s1").activate(conversation("a"))
    # A context that became shorter counts as no growth.
    residency.observe_growth(-5_000)
    assert residency.room(replica(), 5.0) == CAPACITY
    for growth_tokens in (200, 100):
        residency.observe_growth(growth_tokens)
    # Of five turns.
    assert residency.room(replica(), 5.0) == CAPACITY - 500
    residency.of("s1").activate(conversation("b"))
    assert residency.room(replica(), 5.0) == CAPACITY - 1_000
    for _ in range(1_000):
        residency.observe_growth(300)
    assert residency.growth_tokens == pytest.approx(300, abs=1)


def test_an_evicted_context_is_on_no_replica(residency: Residency) -> None:
    ((one, _),) = residency.of("s1").idle()
    residency.of("s1").admitted = 4_000
    residency.evict(replica(held_tokens=3_000))
    assert one.replica_id == "s1"
    residency.evict(replica(held_tokens=3_001))
    assert one.replica_id is None


def test_a_lost_replica_has_no_contexts(residency: Residency) -> None:
    ((idle, _),), active = residency.of("s1").idle(), conversation("active")
    residency.of("s1").activate(active)
    assert repr(residency) == "<Residency {'s1': <ReplicaContexts active=1 idle=1 admitted=0>}>"
    assert residency.lose("s1") == [active]
    assert idle.replica_id is None
    assert residency.known("s1") is None
    assert residency.lose("s1") == []


# -- learned capacity of a replica that does not report it ------------------------------------------------


@pytest.mark.parametrize(
    ("hits_and_misses", "tokens"),
    [
        pytest.param([], LIKELY_KV_TOKENS, id="no evidence"),
        pytest.param([5_000], LIKELY_KV_TOKENS, id="a small context is cached"),
        pytest.param([200_000], 210_000, id="a deeper context is cached: a little beyond it"),
        pytest.param([30_000, -60_000], 60_000, id="a context is not cached"),
        pytest.param([-60_000], LIKELY_KV_TOKENS, id="the engine has reported no cached tokens"),
        pytest.param([300_000, -200_000, *[1_000] * 400], 210_000, id="a refuted lower bound is forgotten"),
        pytest.param([30_000, -60_000, *[1_000] * 100], 61_211, id="an upper bound is forgotten slowly"),
        pytest.param([30_000, -60_000, 60_000], 61_200, id="a refuted upper bound rises"),
        pytest.param([30_000, -60_000, 60_000, 61_200], 62_424, id="with every refutation"),
    ],
)
def test_hits_and_misses_bound_the_capacity(hits_and_misses: Iterable[int], tokens: int) -> None:
    capacity = LearnedCapacity()
    for depth in hits_and_misses:
        if depth > 0:
            capacity.on_hit(depth)
        else:
            capacity.on_miss(-depth)
    assert capacity.tokens == tokens


# In the scheduler


def take_turn(driver: ProgramDriver, name: str, number: int, context: int, cached: int) -> None:
    """Play a turn of a conversation whose prompt extends the last one."""
    prefix = tuple(hash((name, block)) for block in range(10 + number))
    driver.start_turn(f"{name}{number}", name, prompt_tokens=context, prefix=prefix, messages=2 + 2 * number)
    while driver.programs.parked:
        driver.wake()
    usage = Usage(prompt_tokens=context, output_tokens=10, cached_tokens=cached, ending=TurnEnd.TOOLS)
    driver.feed(Finished(f"{name}{number}", Outcome.COMPLETED, usage), after_s=1.0)


def hidden() -> ProgramDriver:
    driver = fleet()
    driver.join_fleet("s1", kv_tokens=None)
    return driver


def test_a_reported_capacity_is_used_as_it_is() -> None:
    driver = fleet("s1", kv_tokens=150_000)
    take_turn(driver, "a", 0, 60_000, 0)
    take_turn(driver, "a", 1, 61_000, 60_000)
    assert driver.programs.capacity(driver.scheduler.ledger["s1"]) == 150_000
    assert "of 0 to inf" in repr(driver.contexts().capacity)


def test_contexts_that_the_model_evicts_and_the_engine_does_not_raise_the_capacity() -> None:
    driver = hidden()
    for number in range(3):
        for name in "abc":
            take_turn(driver, name, number, 60_000 + number, 0 if number == 0 else 60_000)
    assert 180_000 < driver.programs.capacity(driver.scheduler.ledger["s1"]) < 200_000
    assert all(driver.conversation(name).replica_id == "s1" for name in "abc")


@pytest.mark.parametrize(
    ("turns", "capacity"),
    [
        pytest.param(
            [("a", 20_000, 0), ("a", 20_100, 20_000), ("b", 30_000, 0), ("a", 20_200, 0)],
            50_120,
            id="lowers the capacity",
        ),
        pytest.param(
            [("a", 900, 0), ("a", 950, 800), ("a", 990, 0)],
            LIKELY_KV_TOKENS,
            id="shows nothing if it is short",
        ),
    ],
)
def test_a_context_that_the_engine_evicts_and_the_model_does_not(
    turns: list[tuple[str, int, int]], capacity: int
) -> None:
    driver = hidden()
    for number, (name, context, cached) in enumerate(turns):
        take_turn(driver, name, number, context, cached)
    assert driver.programs.capacity(driver.scheduler.ledger["s1"]) == capacity


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
    times = GapTimes(prior)
    assert times.retention_s(recompute_s, price=1.0) == expected_s
    # Only the ratio of the costs matters.
    assert times.retention_s(recompute_s / 4, price=0.25) == expected_s


def test_a_context_is_retained_after_calls_of_tools_sooner_than_after_an_answer() -> None:
    gaps = Gaps()
    after_tools = gaps.after(TurnEnd.TOOLS).retention_s(5.0, price=1.0)
    assert after_tools > gaps.after(TurnEnd.DONE).retention_s(5.0, price=1.0)
    assert gaps.after(None).retention_s(5.0, price=1.0) == after_tools
    # One that is cheap to compute is not retained in a long gap.
    assert {gaps.after(ending).retention_s(0.1, price=1.0) for ending in TurnEnd} == {0.0}


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


@pytest.mark.parametrize(("ending", "other"), [(TurnEnd.TOOLS, TurnEnd.DONE), (TurnEnd.DONE, TurnEnd.TOOLS)])
def test_the_retention_follows_the_gaps_after_this_ending(ending: TurnEnd, other: TurnEnd) -> None:
    gaps = Gaps()
    times = gaps.after(ending)
    before = gaps.after(other).retention_s(1.0, price=1.0)
    assert times.retention_s(1.0, price=1.0) == 0.0
    for _ in range(400):
        times.observe(0.3)
    assert times.retention_s(1.0, price=1.0) == pytest.approx(2**-1.5)
    assert gaps.after(other).retention_s(1.0, price=1.0) == before
    for _ in range(2_000):
        times.observe(math.inf)
    assert times.retention_s(1.0, price=1.0) == 0.0
    assert (repr(times), repr(gaps.after(other))) == ("<GapTimes n=2400>", "<GapTimes n=0>")
    assert repr(times) in repr(gaps)
