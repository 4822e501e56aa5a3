"""Prefix index: invariants after every step of random histories, and examples."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serve_app.core.routing.prefix import BLOCK_ENDS, BLOCK_TOKENS, PrefixIndex, PrefixMatch

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
    return {one.replica_id: one.blocks for one in found}


def test_replicas_that_hold_more_are_listed_longest_match_first() -> None:
    index = prefix_index("s1", "s2", "s3")
    index.add("s1", chain("abbb"))
    index.add("s2", chain("ab"))
    index.add("s3", chain("a"))
    assert index.better_than("s3", chain("abbb"), 8) == (1, [PrefixMatch("s1", 4), PrefixMatch("s2", 2)])
    assert index.better_than("s3", chain("abbb"), 1) == (1, [PrefixMatch("s1", 4)])
    assert index.better_than("s1", chain("abbb"), 8) == (4, [])
    assert index.better_than("nobody", chain("abbb"), 1) == (0, [PrefixMatch("s1", 4)])


def test_prompts_that_share_their_beginning_are_offered_different_replicas() -> None:
    index = prefix_index(*REPLICAS)
    for replica_id in REPLICAS:
        index.add(replica_id, chain("aaaa"))
    index.join("new", 10_000)
    prompts = [(*chain("aaaa"), number) for number in range(100, 130)]
    first = {index.better_than("new", prompt, 1)[1][0].replica_id for prompt in prompts}
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
                assert {one.replica_id: one.blocks for one in more} == {
                    other: blocks for other, blocks in match.items() if blocks > held
                }


TestHistories = Histories.TestCase
