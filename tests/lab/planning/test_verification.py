from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.lab.planning.queueing import (
    CostTable,
    FleetPlan,
    PoolPlan,
    ReplicaCounts,
    paged_fleet,
    split_fleet,
)
from serve_app.lab.planning.verification import (
    PoolFigures,
    RunFigures,
    Verification,
    Verifier,
    at_full_size,
    scale_share,
    smallest_count,
    smallest_fleet,
)
from tests.lab.planning.builders import demand

ONE = paged_fleet(PoolPlan(profile="laptop"))
TWO = split_fleet(PoolPlan(profile="laptop"), PoolPlan(profile="laptop"), 1_024)


def test_a_fleet_is_measured_over_seeds() -> None:
    verifier = Verifier(demand(40.0))
    few, enough = (verifier.measure(ONE, {"all": count}, range(2)) for count in (1, 5))
    assert enough.meets
    assert not few.meets
    assert enough.ttft is not None
    assert few.ttft is not None
    assert enough.ttft.n == 2
    assert enough.ttft.mean < 1.0 < few.ttft.mean
    assert all(run.requests == 400 and not run.lost for run in enough.runs)
    assert enough.as_json()["replicas"] == {"all": 5}


def test_no_run_is_played_twice() -> None:
    verifier = Verifier(demand(40.0))
    first = verifier.measure(ONE, {"all": 4}, [0])
    assert verifier.played == 1
    again = verifier.measure(ONE, {"all": 4}, [0, 1])
    assert verifier.played == 2
    assert again.runs[0] == first.runs[0]


def test_each_pool_has_figures_of_its_own() -> None:
    verification = Verifier(demand(30.0)).measure(TWO, {"short": 3, "long": 3}, [0])
    short, long = (verification.pool_figures(pool) for pool in ("short", "long"))
    assert short["request_ratio"] is not None
    assert long["request_ratio"] is not None
    assert short["request_ratio"] > 0.5
    assert short["request_ratio"] + long["request_ratio"] == pytest.approx(1.0)
    assert short["p99_ttft_s"] is not None


def test_a_stand_in_has_its_share_of_the_rate_and_numbers_are_scaled_back() -> None:
    assert scale_share(200, 25) == 0.125
    assert scale_share(10, 25) == 1.0
    assert at_full_size(9, 0.125) == 72
    assert at_full_size(7, 0.3) == 24
    verifier = Verifier(demand(80.0), share=0.5)
    small = verifier.measure(ONE, {"all": 4}, [0])
    assert small.demand.rate_per_s == 40.0
    large = verifier.at_double_scale(ONE, {"all": 4}, [0])
    assert large.counts == {"all": 8}
    assert large.demand.rate_per_s == 80.0
    assert large.runs[0].requests == 2 * small.runs[0].requests


def test_a_workload_has_a_rate() -> None:
    with pytest.raises(ValueError, match="rate_per_s"):
        demand(0.0)


def test_headroom_is_the_part_of_a_replica_that_is_not_needed() -> None:
    verifier = Verifier(demand(30.0))
    roomy = verifier.headroom(ONE, {"all": 4}, [0])
    assert roomy == pytest.approx(1 + 0.75 / 4)
    assert verifier.headroom(ONE, {"all": 1}, [0]) == 1.0
    assert at_full_size(8, 0.1, headroom=1.05) == 77


def test_long_requests_have_figures_of_their_own() -> None:
    verification = Verifier(demand(30.0)).measure(ONE, {"all": 4}, [0])
    assert verification.long_ttft is not None
    assert verification.ttft is not None
    assert verification.long_ttft.mean >= verification.ttft.mean


class ScriptedVerifier(Verifier):
    """Verifier with given needs per seed; with spill, spare long replicas count as short ones."""

    def __init__(
        self, *, need: ReplicaCounts, second_seed: ReplicaCounts | None = None, spill: bool = False
    ) -> None:
        super().__init__(demand(10.0))
        self.need, self.second, self.spill = need, second_seed or need, spill
        self.calls: list[tuple[ReplicaCounts, int]] = []

    def measure(self, plan: FleetPlan, counts: ReplicaCounts, seeds: Sequence[int]) -> Verification:
        self.calls.append((dict(counts), len(seeds)))
        runs = tuple(self._run(counts, seed) for seed in seeds)
        return Verification(plan, dict(counts), self.demand, runs)

    def _run(self, counts: ReplicaCounts, seed: int) -> RunFigures:
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
    counts_tried: list[int] = []

    def meets(count: int) -> bool:
        counts_tried.append(count)
        return count >= need

    assert smallest_count(meets, guess, most=400) == need
    assert len(set(counts_tried)) <= 20


def test_limits_that_no_size_meets_end_the_search() -> None:
    assert smallest_count(lambda _: False, 3, most=20) is None
    impossible = ScriptedVerifier(need={"all": 1_000})
    assert smallest_fleet(impossible, ONE, {"all": 3}, costs=CostTable.load(), seeds=range(3)) is None


def test_a_good_guess_takes_few_simulations() -> None:
    verifier = ScriptedVerifier(need={"all": 20})
    found = smallest_fleet(verifier, ONE, {"all": 21}, costs=CostTable.load(), seeds=range(3))
    assert found is not None
    assert found.counts == {"all": 20}
    assert [run.seed for run in found.runs] == [0, 1, 2]
    assert len(verifier.calls) <= 6


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
        # Only sizes far above the first guess may end the search.
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


class SlowTail(ScriptedVerifier):
    """Verifier whose few long requests never meet the TTFT limit by themselves; TPOT needs short replicas."""

    def _run(self, counts: ReplicaCounts, seed: int) -> RunFigures:
        tpot_s = self.demand.slo.tpot_s or 0.0
        need = self.need if seed == 0 else self.second
        short_tpot_s = tpot_s * need["short"] / counts["short"]
        return RunFigures(
            seed=seed,
            requests=100,
            lost=0,
            preemptions=0,
            p99_ttft_s=0.5,
            p99_tpot_s=short_tpot_s,
            long_p99_ttft_s=30.0,
            by_pool={
                "short": PoolFigures(0.8, 0.3, 0.5, short_tpot_s),
                "long": PoolFigures(0.2, 0.7, 30.0 / counts["long"], 0.01),
            },
        )


@pytest.mark.parametrize("first", [7, 4])
def test_the_pool_that_makes_the_fleet_miss_its_limit_gets_the_replica(first: int) -> None:
    """With 4, the first seed meets the limits with the guess, and only the second one does not."""
    verifier = SlowTail(need={"short": first, "long": 1}, second_seed={"short": 7, "long": 1})
    verifier.demand = demand(10.0, tpot_s=0.05)
    found = smallest_fleet(verifier, TWO, {"short": 4, "long": 2}, costs=CostTable.load(), seeds=range(2))
    assert found is not None
    assert found.counts == {"short": 7, "long": 1}
    assert all(counts["long"] <= 2 for counts, _ in verifier.calls)
