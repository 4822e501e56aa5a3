from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.planning.sizing.costs import CostTable
from serve_app.planning.sizing.fleets import Counts, FleetPlan, PoolPlan, paged_fleet, split_fleet
from serve_app.planning.sizing.smallest import smallest_count, smallest_fleet
from serve_app.planning.sizing.verification import PoolFigures, RunFigures, Verification, Verifier
from tests.planning.builders import demand

ONE = paged_fleet(PoolPlan(profile="laptop"))
TWO = split_fleet(PoolPlan(profile="laptop"), PoolPlan(profile="laptop"), 1_024)


class ScriptedVerifier(Verifier):
    """A verifier with given needs per seed; with spill, spare long replicas count as short ones."""

    def __init__(self, *, need: Counts, second_seed: Counts | None = None, spill: bool = False) -> None:
        super().__init__(demand(10.0))
        self.need, self.second, self.spill = need, second_seed or need, spill
        self.asked: list[tuple[Counts, int]] = []

    def measure(self, plan: FleetPlan, counts: Counts, seeds: Sequence[int]) -> Verification:
        self.asked.append((dict(counts), len(seeds)))
        runs = tuple(self._run(counts, seed) for seed in seeds)
        return Verification(plan, dict(counts), self.demand, runs)

    def _run(self, counts: Counts, seed: int) -> RunFigures:
        need = self.need if seed == 0 else self.second
        have = {pool: float(count) for pool, count in counts.items()}
        if self.spill:
            have["short"] += max(0.0, counts["long"] - need["long"])
        late = {pool: need[pool] / have[pool] for pool in counts}
        return RunFigures(
            seed=seed,
            requests=100,
            lost=0,
            preemptions=0,
            p99_ttft_s=max(late.values()),
            p99_tpot_s=None,
            long_p99_ttft_s=None,
            by_pool={pool: PoolFigures(0.5, 0.5, late[pool], None) for pool in counts},
        )


@given(st.integers(1, 300), st.integers(1, 300))
def test_the_smallest_number_is_found_from_any_guess(need: int, guess: int) -> None:
    asked: list[int] = []

    def meets(count: int) -> bool:
        asked.append(count)
        return count >= need

    assert smallest_count(meets, guess, most=400) == need
    assert len(set(asked)) <= 20


def test_limits_that_no_size_meets_end_the_search() -> None:
    assert smallest_count(lambda _: False, 3, most=20) is None
    impossible = ScriptedVerifier(need={"all": 1_000})
    assert smallest_fleet(impossible, ONE, {"all": 3}, costs=CostTable.load(), seeds=range(3)) is None


def test_a_good_guess_takes_few_simulations() -> None:
    verifier = ScriptedVerifier(need={"all": 20})
    found = smallest_fleet(verifier, ONE, {"all": 21}, costs=CostTable.load(), seeds=range(3))
    assert found is not None
    assert found.counts == {"all": 20}
    assert len(found.runs) == 3
    assert len(verifier.asked) <= 6


@pytest.mark.parametrize(("first", "second"), [(20, 22), (2, 3), (10, 13)])
def test_the_size_must_meet_the_limits_with_every_seed(first: int, second: int) -> None:
    verifier = ScriptedVerifier(need={"all": first}, second_seed={"all": second})
    found = smallest_fleet(verifier, ONE, {"all": first}, costs=CostTable.load(), seeds=range(2))
    assert found is not None
    assert found.counts == {"all": second}


@given(st.tuples(*[st.integers(1, 40)] * 4))
def test_two_pools_are_found_under_all_seeds_whatever_their_sizes(needs: tuple[int, int, int, int]) -> None:
    first, second = ({"short": needs[at], "long": needs[at + 1]} for at in (0, 2))
    verifier = ScriptedVerifier(need=first, second_seed=second)
    found = smallest_fleet(verifier, TWO, first, costs=CostTable.load(), seeds=range(2))
    if found is None:
        # Only sizes far beyond the guess may end the search.
        assert any(second[pool] > 4 * first[pool] for pool in first)
    else:
        assert all(found.counts[pool] >= max(first[pool], second[pool]) for pool in first)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_both_pools_shrink_as_far_as_they_can(
    short: int, long: int, guess_short: int, guess_long: int
) -> None:
    verifier = ScriptedVerifier(need={"short": short, "long": long})
    guess = {"short": max(guess_short, short // 3 + 1), "long": max(guess_long, long // 3 + 1)}
    found = smallest_fleet(verifier, TWO, guess, costs=CostTable.load(), seeds=range(2))
    assert found is not None
    assert found.counts == {"short": short, "long": long}


def test_with_spill_no_further_replica_can_be_removed() -> None:
    verifier = ScriptedVerifier(need={"short": 6, "long": 2}, spill=True)
    found = smallest_fleet(verifier, TWO, {"short": 4, "long": 5}, costs=CostTable.load(), seeds=range(2))
    assert found is not None
    for pool, count in found.counts.items():
        if count > 1:
            fewer = {**found.counts, pool: count - 1}
            assert not verifier.measure(TWO, fewer, range(2)).meets


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_result_was_measured_with_all_seeds(seeds: int) -> None:
    found = smallest_fleet(
        ScriptedVerifier(need={"all": 4}), ONE, {"all": 2}, costs=CostTable.load(), seeds=range(seeds)
    )
    assert found is not None
    assert [run.seed for run in found.runs] == list(range(seeds))
