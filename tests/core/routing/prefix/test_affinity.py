import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.prefix import (
    AffinitySettings,
    PrefixAffinity,
    PrefixQuery,
    ReplicaFilter,
)
from serve_app.core.routing.replica_state import Hold, ReplicaState
from serve_app.request import PromptShape
from tests.builders import report, request, spec

SESSION = tuple(range(1, 9))  # eight blocks, 1,024 tokens


def prompt(prefix: tuple[int, ...] = SESSION, *, prompt_tokens: int = 1_100) -> PrefixQuery:
    made = request(prompt_tokens=prompt_tokens, prefix=prefix)
    return PrefixQuery(made, prompt_tokens)


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
        self.affinity.on_dispatch(replica_id, prompt(prefix).request)

    def busy(self, replica_id: str, requests: int, *, prefill_tokens: int = 0) -> None:
        for _ in range(requests):
            self.ledger.hold(replica_id, Hold(10, prefill_tokens=prefill_tokens), 0.0)

    def admissible(self, replica_id: str, _prefill_tokens: int) -> ReplicaState | None:
        return self.ledger[replica_id]

    def choose(
        self, by_load: str | None, asked: PrefixQuery, admissible: ReplicaFilter | None = None
    ) -> str | None:
        state = None if by_load is None else self.ledger[by_load]
        placed = self.affinity.choose(state, asked, admissible or self.admissible)
        return None if placed is None else placed.replica.spec.replica_id

    def left_on(self, replica_id: str, asked: PrefixQuery) -> int:
        """Return the tokens to compute there if no other replica is available."""
        placed = self.affinity.choose(self.ledger[replica_id], asked, lambda _id, _tokens: None)
        assert placed is not None
        return placed.prefill_tokens


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
    assert fleet.affinity.cached_tokens(prompt().request, 1_100) == 1_024
    assert fleet.left_on("s1", prompt()) == 1_100 - 256


@pytest.mark.parametrize(("bytes_per_token", "cached"), [(4.0, 1_024), (2.0, 2_048)])
def test_text_that_is_cached_is_counted_in_tokens_of_its_kind(bytes_per_token: float, cached: int) -> None:
    affinity = PrefixAffinity(AffinitySettings(), lambda _category: bytes_per_token)
    affinity.join(spec("s1"))
    text = request(
        prompt_tokens=4_000, prefix=prompt().request.submission.prefix, shape=PromptShape(text_bytes=4_400)
    )
    affinity.on_dispatch("s1", text)
    assert affinity.cached_tokens(text, 2_200) == cached


def test_a_lost_replica_has_no_cached_prefixes() -> None:
    fleet = Fleet("s1", "s2")
    fleet.on_dispatch("s2")
    fleet.affinity.lose("s2")
    assert fleet.affinity.cached_tokens(prompt().request, 1_100) == 0
    assert fleet.choose("s1", prompt()) == "s1"


@given(st.lists(st.integers(0, 8), min_size=3, max_size=3), st.integers(1, 3_000))
def test_at_least_one_prompt_token_is_always_computed(held: list[int], prompt_tokens: int) -> None:
    fleet = Fleet("s0", "s1", "s2")
    for number, blocks in enumerate(held):
        fleet.on_dispatch(f"s{number}", SESSION[:blocks])
    asked = prompt(prompt_tokens=prompt_tokens)
    least = min(fleet.left_on(f"s{number}", asked) for number in range(3))
    assert 1 <= least <= prompt_tokens
    assert fleet.affinity.cached_tokens(asked.request, prompt_tokens) == prompt_tokens - least


@given(st.lists(st.integers(0, 8), min_size=2, max_size=5))
def test_among_equally_busy_replicas_one_that_holds_most_is_chosen(held: list[int]) -> None:
    names = [f"s{number}" for number in range(len(held))]
    fleet = Fleet(*names)
    for name, blocks in zip(names, held, strict=True):
        fleet.on_dispatch(name, SESSION[:blocks])
    chosen = fleet.choose(names[0], prompt())
    assert chosen is not None
    assert held[names.index(chosen)] == max(held)
