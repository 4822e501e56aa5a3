"""Prefix blocks, the prefix index, and the affinity of requests to replicas."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.prefix import (
    BLOCK_ENDS,
    BLOCK_TOKENS,
    AffinitySettings,
    PrefixAffinity,
    PrefixIndex,
    ReplicaFilter,
    cached_tokens,
)
from serve_app.core.routing.replica_state import ReplicaState, Running
from serve_app.request import PromptShape, Request
from tests.builders import report, request, spec

blocks = st.integers(0, 200)


def test_what_is_left_beyond_the_last_whole_block_is_at_most_an_eighth_of_the_match() -> None:
    later = [(end, size) for end, size in zip(BLOCK_ENDS, BLOCK_TOKENS[1:], strict=False) if end >= 4_096]
    assert later
    assert all(size <= end / 8 for end, size in later)


def test_blocks_follow_each_other_without_a_gap() -> None:
    assert [after - before for before, after in pairwise(BLOCK_ENDS)] == list(BLOCK_TOKENS[1:])


@given(blocks, st.integers(0, 300_000))
def test_no_more_token_ids_are_cached_than_there_are(count: int, prompt_tokens: int) -> None:
    shape = PromptShape(text_bytes=0, prompt_tokens=prompt_tokens)
    cached = cached_tokens(shape, count, 1.0)
    assert 0 <= cached <= prompt_tokens
    assert cached in {0, prompt_tokens, *BLOCK_ENDS}


# -- prefix index: invariants after every step of random histories, and examples --------------------------

REPLICAS = [f"s{number}" for number in range(5)]
replicas = st.sampled_from(REPLICAS)
# Prompts over two words: many share their beginning.
texts = st.lists(st.sampled_from("ab"), max_size=40)


def chain(text: Sequence[str]) -> tuple[int, ...]:
    """Hash a prompt of one word per block; each hash covers all words before it."""
    return tuple(hash("".join(text[: place + 1])) & (2**64 - 1) for place in range(len(text)))


def prefix_index(*joined: str, capacity_tokens: int = 10_000, max_blocks: int = 1_000) -> PrefixIndex:
    index = PrefixIndex(max_blocks)
    for replica_id in joined:
        index.join(replica_id, capacity_tokens)
    return index


def matches(index: PrefixIndex, prefix: Sequence[int]) -> dict[str, int]:
    """Return the number of leading blocks on each replica, most first."""
    _, found = index.better_than("nobody", prefix, len(REPLICAS) + 1)
    return dict(found)


def test_replicas_that_hold_more_are_listed_longest_match_first() -> None:
    index = prefix_index("s1", "s2", "s3")
    index.add("s1", chain("abbb"))
    index.add("s2", chain("ab"))
    index.add("s3", chain("a"))
    assert index.better_than("s3", chain("abbb"), 8) == (1, [("s1", 4), ("s2", 2)])
    assert index.better_than("s3", chain("abbb"), 1) == (1, [("s1", 4)])
    assert index.better_than("s1", chain("abbb"), 8) == (4, [])
    assert index.better_than("nobody", chain("abbb"), 1) == (0, [("s1", 4)])


def test_prompts_that_share_their_beginning_are_offered_different_replicas() -> None:
    index = prefix_index(*REPLICAS)
    for replica_id in REPLICAS:
        index.add(replica_id, chain("aaaa"))
    index.join("new", 10_000)
    prompts = [(*chain("aaaa"), number) for number in range(100, 130)]
    first = {index.better_than("new", prompt, 1)[1][0][0] for prompt in prompts}
    assert first == set(REPLICAS)


def test_the_end_of_the_least_recently_used_prompt_is_evicted_first() -> None:
    index = prefix_index("s1", capacity_tokens=4 * BLOCK_TOKENS[0])
    index.add("s1", chain("aaa"))
    index.add("s1", chain("bb"))
    assert matches(index, chain("aaa")) == {"s1": 2}
    assert matches(index, chain("bb")) == {"s1": 2}


def test_a_block_that_is_used_again_stays() -> None:
    index = prefix_index("s1", capacity_tokens=2 * BLOCK_TOKENS[0])
    for word in ("a", "b", "a", "c"):
        index.add("s1", [ord(word)])
    assert matches(index, [ord("a")]) == {"s1": 1}
    assert matches(index, [ord("b")]) == {}


def test_a_lost_replica_is_forgotten_and_one_that_joins_again_has_an_empty_cache() -> None:
    index = prefix_index("s1", "s2")
    index.add("s1", chain("ab"))
    index.add("s2", chain("a"))
    index.lose("s1")
    assert matches(index, chain("ab")) == {"s2": 1}
    index.join("s9", 10_000)
    assert matches(index, chain("ab")) == {"s2": 1}
    index.join("s2", 10_000)
    assert matches(index, chain("ab")) == {}
    assert len(index) == 0


def test_more_replicas_share_the_same_memory() -> None:
    index = prefix_index("s1", max_blocks=4)
    index.add("s1", chain("abab"))
    assert len(index) == 4
    index.join("s2", 10_000)
    assert matches(index, chain("abab")) == {"s1": 2}


def test_hash_collisions_caused_by_clients_are_harmless() -> None:
    index = prefix_index("s1", "s2", capacity_tokens=3 * BLOCK_TOKENS[0])
    for prompt in ((1, 2, 9), (3, 9), (9, 4), (9,), (5, 5, 5), (4, 9, 1), (3, 9)):
        for replica_id in ("s1", "s2"):
            index.add(replica_id, prompt)
            assert index.longest(prompt) <= len(prompt)
            assert index.better_than(replica_id, prompt, 8)[0] <= len(prompt)
            assert len(index) <= 6
    assert matches(index, [3]) == {"s1": 1, "s2": 1}
    index.lose("s1")
    index.lose("s2")
    assert len(index) == 0
    assert index.longest([3]) == 0


def test_of_a_prompt_that_another_continues_elsewhere_only_the_rest_ages() -> None:
    index = prefix_index("s1", capacity_tokens=6 * BLOCK_TOKENS[0])
    for text in ("aabb", "aaa", "c"):
        index.add("s1", chain(text))
    assert matches(index, chain("aabb")) == {"s1": 4}
    index.add("s1", chain("d"))
    assert matches(index, chain("aabb")) == {"s1": 3}
    index.add("s1", chain("dd"))
    assert matches(index, chain("aabb")) == {"s1": 2}
    assert matches(index, chain("aaa")) == {"s1": 3}


@given(st.lists(texts, max_size=10), texts)
def test_a_single_replica_matches_the_longest_beginning_that_it_was_sent(
    sent: list[list[str]], text: list[str]
) -> None:
    index = prefix_index("s1", capacity_tokens=BLOCK_ENDS[-1], max_blocks=10_000)
    for one in sent:
        index.add("s1", chain(one))
    longest = max((common(one, text) for one in sent), default=0)
    assert matches(index, chain(text)) == ({"s1": longest} if longest else {})
    assert index.longest(chain(text)) == longest


def common(one: Sequence[str], other: Sequence[str]) -> int:
    length = min(len(one), len(other))
    return next((place for place in range(length) if one[place] != other[place]), length)


class Histories(RuleBasedStateMachine):
    """Joins, losses and dispatches in any order, with small caches."""

    @initialize(max_blocks=st.integers(1, 60))
    def begin(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.index = PrefixIndex(max_blocks)
        self.capacity: dict[str, int] = {}
        self.prompts: list[tuple[int, ...]] = []

    @rule(replica_id=replicas, blocks=st.integers(1, 30))
    def join(self, replica_id: str, blocks: int) -> None:
        self.index.join(replica_id, blocks * BLOCK_TOKENS[0])
        self.capacity[replica_id] = blocks * BLOCK_TOKENS[0]

    @rule(replica_id=replicas)
    def lose(self, replica_id: str) -> None:
        self.index.lose(replica_id)
        self.capacity.pop(replica_id, None)

    @rule(replica_id=replicas, text=texts)
    def send(self, replica_id: str, text: list[str]) -> None:
        self.prompts.append(chain(text))
        self.index.add(replica_id, self.prompts[-1])

    def holders(self, block: int) -> set[str]:
        return set(matches(self.index, [block]))

    @invariant()
    def holds_whole_prefixes(self) -> None:
        for prompt in self.prompts:
            sets = [self.holders(block) for block in prompt]
            assert all(later <= earlier for earlier, later in pairwise(sets))

    def positions(self) -> dict[int, int]:
        """Return the blocks of all prompts so far, with their positions."""
        return {block: place for prompt in self.prompts for place, block in enumerate(prompt)}

    @invariant()
    def holders_mirror_the_caches(self) -> None:
        assert sum(len(self.holders(block)) for block in self.positions()) == len(self.index)

    @invariant()
    def stays_within_its_capacity(self) -> None:
        assert len(self.index) <= self.max_blocks
        tokens = dict.fromkeys(self.capacity, 0)
        for block, place in self.positions().items():
            for replica_id in self.holders(block):
                tokens[replica_id] += BLOCK_TOKENS[place]
        assert all(tokens[replica_id] <= capacity for replica_id, capacity in self.capacity.items())

    @invariant()
    def offers_exactly_those_that_hold_more(self) -> None:
        for prompt in self.prompts[-3:]:
            match = matches(self.index, prompt)
            assert list(match.values()) == sorted(match.values(), reverse=True)
            assert self.index.longest(prompt) == max(match.values(), default=0)
            for replica_id in self.capacity:
                held, more = self.index.better_than(replica_id, prompt, len(REPLICAS))
                assert held == match.get(replica_id, 0)
                assert dict(more) == {other: blocks for other, blocks in match.items() if blocks > held}


TestHistories = Histories.TestCase


# -- affinity ---------------------------------------------------------------------------------------------

SESSION = tuple(range(1, 9))  # eight blocks, 1,024 tokens


def prompt(prefix: tuple[int, ...] = SESSION, *, prompt_tokens: int = 1_100) -> Request:
    return request(prompt_tokens=prompt_tokens, prefix=prefix)


class NoBackpressure:
    """Backpressure without any limit."""

    def admits(self, replica: ReplicaState, now: float) -> bool:
        return True

    def admits_backfill(self, replica: ReplicaState, now: float) -> bool:
        return True

    def gates(self, replica: ReplicaState) -> bool:
        return False


class Fleet:
    """Replicas with prefix affinity beside their ledger."""

    def __init__(self, *replica_ids: str) -> None:
        self.affinity = PrefixAffinity(AffinitySettings(), lambda _category: 4.0)
        self.ledger = ReplicaLedger(backpressure=NoBackpressure(), report_limit_s=10)
        for replica_id in replica_ids:
            joined = spec(replica_id)
            self.ledger.join(joined, 0.0)
            self.ledger.report(replica_id, report(), 0.0)
            self.affinity.join(joined)

    def on_dispatch(self, replica_id: str, prefix: tuple[int, ...] = SESSION) -> None:
        self.affinity.on_dispatch(replica_id, prompt(prefix))

    def busy(self, replica_id: str, requests: int, *, prefill_tokens: int = 0) -> None:
        for _ in range(requests):
            self.ledger.hold(Running(self.ledger[replica_id], 10, prefill_tokens=prefill_tokens), 0.0)

    def admissible(self, replica_id: str, _prefill_tokens: int) -> ReplicaState | None:
        return self.ledger[replica_id]

    def choose(
        self, by_load: str | None, asked: Request, admissible: ReplicaFilter | None = None
    ) -> str | None:
        state = None if by_load is None else self.ledger[by_load]
        placed = self.affinity.choose(state, asked, 1_100, admissible or self.admissible)
        return None if placed is None else placed[0].spec.replica_id

    def left_on(self, replica_id: str, asked: Request, prompt_tokens: int = 1_100) -> int:
        """Return the tokens to compute there if no other replica is available."""
        placed = self.affinity.choose(
            self.ledger[replica_id], asked, prompt_tokens, lambda _id, _tokens: None
        )
        assert placed is not None
        return placed[1]


def test_without_a_match_the_load_decides() -> None:
    fleet = Fleet("s1", "s2")
    fleet.on_dispatch("s2")
    assert fleet.choose("s1", prompt((50, 51))) == "s1"
    assert fleet.choose("s1", prompt(())) == "s1"


def test_a_replica_that_may_not_accept_the_request_is_excluded() -> None:
    fleet = Fleet("s1", "s2", "s3")
    fleet.on_dispatch("s2")
    fleet.on_dispatch("s3", SESSION[:4])

    def only_s3(replica_id: str, _prefill_tokens: int) -> ReplicaState | None:
        return fleet.ledger["s3"] if replica_id == "s3" else None

    assert fleet.choose("s1", prompt(), only_s3) == "s3"


def test_a_session_moves_when_waiting_for_other_prefills_costs_more_than_it_saves() -> None:
    # 76 of 1,100 tokens are left on s2, for one request more in its batch.
    for pending, chosen in ((473, "s2"), (474, "s1")):
        fleet = Fleet("s1", "s2")
        fleet.on_dispatch("s2")
        fleet.busy("s2", 1, prefill_tokens=pending)
        assert fleet.choose("s1", prompt()) == chosen
    fleet.busy("s1", 1, prefill_tokens=1)
    assert fleet.choose("s1", prompt()) == "s2"


@pytest.mark.parametrize(("on_s1", "on_s2"), [(0, 13), (1, 27)])
def test_a_session_moves_when_a_fuller_batch_costs_more_than_it_saves(on_s1: int, on_s2: int) -> None:
    fleet = Fleet("s1", "s2")
    fleet.on_dispatch("s2")
    fleet.busy("s1", on_s1)
    fleet.busy("s2", on_s2)
    assert fleet.choose("s1", prompt()) == "s2"
    fleet.busy("s2", 1)
    assert fleet.choose("s1", prompt()) == "s1"


def test_blocks_cached_on_the_least_loaded_replica_save_nothing() -> None:
    # 204 tokens are left on s1.
    for pending, chosen in ((25, "s2"), (26, "s1")):
        fleet = Fleet("s1", "s2")
        fleet.on_dispatch("s1", SESSION[:7])
        fleet.on_dispatch("s2")
        fleet.busy("s2", 1, prefill_tokens=pending)
        assert fleet.choose("s1", prompt()) == chosen


def test_a_replica_with_enough_of_the_prompt_cached_is_chosen_if_none_accepts_all() -> None:
    fleet = Fleet("s1", "s2")
    fleet.on_dispatch("s1", SESSION[:2])
    fleet.on_dispatch("s2")

    def admissible_up_to(limit: int) -> ReplicaFilter:
        return lambda replica_id, tokens: fleet.ledger[replica_id] if tokens <= limit else None

    assert fleet.choose(None, prompt(), admissible_up_to(1_100 - 1_024)) == "s2"
    assert fleet.choose(None, prompt(), admissible_up_to(1_100 - 1_025)) is None
    assert fleet.choose(None, prompt(()), admissible_up_to(1_100)) is None


def test_cached_blocks_are_counted_where_most_of_them_are() -> None:
    fleet = Fleet("s1", "s2")
    fleet.on_dispatch("s1", SESSION[:2])
    fleet.on_dispatch("s2")
    assert fleet.affinity.cached_tokens(prompt(), 1_100) == 1_024
    assert fleet.left_on("s1", prompt()) == 1_100 - 256


@pytest.mark.parametrize(("bytes_per_token", "cached"), [(4.0, 1_024), (2.0, 2_048)])
def test_text_that_is_cached_is_counted_in_tokens_of_its_kind(bytes_per_token: float, cached: int) -> None:
    affinity = PrefixAffinity(AffinitySettings(), lambda _category: bytes_per_token)
    affinity.join(spec("s1"))
    text = request(
        prompt_tokens=4_000, prefix=prompt().submission.prefix, shape=PromptShape(text_bytes=4_400)
    )
    affinity.on_dispatch("s1", text)
    assert affinity.cached_tokens(text, 2_200) == cached


def test_a_lost_replica_has_no_cached_prefixes() -> None:
    fleet = Fleet("s1", "s2")
    fleet.on_dispatch("s2")
    fleet.affinity.lose("s2")
    assert fleet.affinity.cached_tokens(prompt(), 1_100) == 0
    assert fleet.choose("s1", prompt()) == "s1"


@given(st.lists(st.integers(0, 8), min_size=3, max_size=3), st.integers(1, 3_000))
def test_at_least_one_prompt_token_is_always_computed(held: list[int], prompt_tokens: int) -> None:
    fleet = Fleet("s0", "s1", "s2")
    for number, blocks in enumerate(held):
        fleet.on_dispatch(f"s{number}", SESSION[:blocks])
    asked = prompt(prompt_tokens=prompt_tokens)
    least = min(fleet.left_on(f"s{number}", asked, prompt_tokens) for number in range(3))
    assert 1 <= least <= prompt_tokens
    assert fleet.affinity.cached_tokens(asked, prompt_tokens) == prompt_tokens - least


@given(st.lists(st.integers(0, 8), min_size=2, max_size=5))
def test_among_equally_busy_replicas_one_that_holds_most_is_chosen(held: list[int]) -> None:
    names = [f"s{number}" for number in range(len(held))]
    fleet = Fleet(*names)
    for name, blocks in zip(names, held, strict=True):
        fleet.on_dispatch(name, SESSION[:blocks])
    chosen = fleet.choose(names[0], prompt())
    assert chosen is not None
    assert held[names.index(chosen)] == max(held)
