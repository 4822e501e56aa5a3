import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.request import PromptShape
from serve_app.routing.ledger import Hold, ReplicaLedger, ReplicaState
from serve_app.routing.prefill_cost import PrefillCost, PrefillCostSettings
from serve_app.routing.prefix_affinity import AffinitySettings, PrefixAffinity, Wanted
from tests.builders import report, request, spec

SESSION = tuple(range(1, 9))  # eight blocks of 128 tokens


def wanted(
    prefix: tuple[int, ...] = SESSION, *, prompt_tokens: int = 1_100, output_tokens: int = 100
) -> Wanted:
    made = dataclasses.replace(request(prompt_tokens=prompt_tokens), prefix=prefix)
    return Wanted(made, prompt_tokens, output_tokens)


class Fleet:
    """Replicas with an affinity beside their ledger, and a prefill time of 0.1 ms a token."""

    def __init__(self, *replica_ids: str, **changes: float | bool) -> None:
        cost = PrefillCost(PrefillCostSettings(prior_base_s=0.03, prior_per_token_s=1e-4))
        self.affinity = PrefixAffinity(AffinitySettings(**changes), cost, lambda _category: 4.0)  # type: ignore[arg-type]
        self.ledger = ReplicaLedger(admits=lambda _replica, _now: True, report_limit_s=10, kv_fill_ratio=1.0)
        for replica_id in replica_ids:
            joined = spec(replica_id)
            self.ledger.join(joined, 0.0)
            self.ledger.report(replica_id, report(), 0.0)
            self.affinity.join(joined)

    def busy(self, replica_id: str, requests: int, *, started: bool) -> None:
        for _ in range(requests):
            self.ledger.hold(replica_id, Hold(10), 0.0, started=started)

    def choose(
        self, by_load: str, request: Wanted, able: Callable[[str], ReplicaState | None] | None = None
    ) -> str:
        chosen = self.affinity.choose(self.ledger[by_load], request, able or self.ledger.__getitem__)
        return chosen.spec.replica_id


def test_a_session_stays_where_its_history_is() -> None:
    fleet = Fleet("s1", "s2")
    fleet.affinity.sent("s2", wanted())
    assert fleet.choose("s1", wanted((*SESSION, 99))) == "s2"


def test_without_a_match_the_load_decides() -> None:
    fleet = Fleet("s1", "s2")
    fleet.affinity.sent("s2", wanted())
    assert fleet.choose("s1", wanted((50, 51))) == "s1"
    assert fleet.choose("s1", wanted(())) == "s1"


def test_a_replica_that_may_not_take_the_request_is_left_out() -> None:
    fleet = Fleet("s1", "s2", "s3")
    fleet.affinity.sent("s2", wanted())
    fleet.affinity.sent("s3", wanted(SESSION[:4]))
    able = {"s3": fleet.ledger["s3"]}.get
    assert fleet.choose("s1", wanted(), able) == "s3"


def test_a_session_moves_when_waiting_for_other_prefills_costs_more_than_it_saves() -> None:
    fleet = Fleet("s1", "s2")
    fleet.affinity.sent("s2", wanted(prompt_tokens=500))
    # It saves 1,024 tokens, 0.10 s; each prefill ahead is expected to take what a mean one does, 0.08 s.
    fleet.busy("s2", 1, started=False)
    assert fleet.choose("s1", wanted(output_tokens=10)) == "s2"
    fleet.busy("s2", 1, started=False)
    assert fleet.choose("s1", wanted(output_tokens=10)) == "s1"
    fleet.busy("s1", 2, started=False)
    assert fleet.choose("s1", wanted(output_tokens=10)) == "s2"


def test_a_session_moves_when_a_fuller_batch_costs_more_than_it_saves() -> None:
    fleet = Fleet("s1", "s2", step_cost_tokens=2.0)
    fleet.affinity.sent("s2", wanted())
    fleet.busy("s2", 5, started=True)  # each costs 100 tokens of output 2 prefill tokens a step
    assert fleet.choose("s1", wanted()) == "s2"
    fleet.busy("s2", 1, started=True)
    assert fleet.choose("s1", wanted()) == "s1"
    assert fleet.choose("s1", wanted(output_tokens=10)) == "s2"


def test_what_the_replica_chosen_by_load_holds_itself_is_nothing_saved() -> None:
    fleet = Fleet("s1", "s2")
    fleet.affinity.sent("s1", wanted(SESSION[:7]))
    fleet.affinity.sent("s2", wanted())
    fleet.busy("s2", 1, started=False)  # 0.03 s against 128 tokens: 0.013 s
    assert fleet.choose("s1", wanted()) == "s1"


def test_remaining_prefill_is_what_the_best_match_has_not() -> None:
    fleet = Fleet("s1", "s2")
    fleet.affinity.sent("s1", wanted(SESSION[:2]))
    fleet.affinity.sent("s2", wanted())
    asked = wanted(prompt_tokens=1_100)
    assert fleet.affinity.remaining(asked.request, 1_100) == 1_100 - 1_024
    assert fleet.affinity.remaining_on("s1", asked) == 1_100 - 256
    assert fleet.affinity.remaining_on("unknown", asked) == 1_100


def test_text_that_is_cached_is_counted_in_tokens_of_its_kind() -> None:
    fleet = Fleet("s1")
    text = dataclasses.replace(wanted().request, shape=PromptShape(text_bytes=4_400))
    fleet.affinity.sent("s1", Wanted(text, 1_100, 100))
    assert fleet.affinity.remaining(text, 1_100) == 1_100 - 4_096 // 4


def test_a_lost_replica_is_no_longer_known_to_hold_anything() -> None:
    fleet = Fleet("s1", "s2")
    fleet.affinity.sent("s2", wanted())
    fleet.affinity.lose("s2")
    assert fleet.affinity.remaining(wanted().request, 1_100) == 1_100
    assert fleet.choose("s1", wanted()) == "s1"


def test_switched_off_the_load_decides_and_nothing_is_kept() -> None:
    fleet = Fleet("s1", "s2", enabled=False)
    fleet.affinity.sent("s2", wanted())
    assert fleet.choose("s1", wanted()) == "s1"
    assert len(fleet.affinity.index) == 0
    assert fleet.affinity.remaining(wanted().request, 1_100) == 1_100


@given(st.lists(st.integers(0, 8), min_size=3, max_size=3), st.integers(1, 3_000))
def test_some_of_a_prompt_is_always_left_to_compute(held: list[int], prompt_tokens: int) -> None:
    fleet = Fleet("s0", "s1", "s2")
    for number, blocks in enumerate(held):
        fleet.affinity.sent(f"s{number}", wanted(SESSION[:blocks]))
    asked = wanted(prompt_tokens=prompt_tokens)
    least = min(fleet.affinity.remaining_on(f"s{number}", asked) for number in range(3))
    assert 1 <= fleet.affinity.remaining(asked.request, prompt_tokens) == least <= prompt_tokens


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6)), min_size=2, max_size=5))
def test_among_equally_busy_replicas_one_that_holds_most_is_chosen(held: list[tuple[int, int]]) -> None:
    names = [f"s{number}" for number in range(len(held))]
    fleet = Fleet(*names)
    for name, (blocks, _) in zip(names, held, strict=True):
        fleet.affinity.sent(name, wanted(SESSION[:blocks]))
    chosen = fleet.choose(names[0], wanted())
    match = fleet.affinity.index.match(SESSION)
    assert match.get(chosen, 0) == max(match.values(), default=0)


@pytest.mark.parametrize(
    ("change", "value"),
    [("capacity_ratio", 0.0), ("capacity_ratio", 1.5), ("max_blocks", 0), ("step_cost_tokens", -1.0)],
)
def test_settings_that_cannot_work_are_refused(change: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"affinity.{change} must .*{value}"):
        AffinitySettings(**{change: value})  # type: ignore[arg-type]
