import numpy as np
import pytest

from serve_app.errors import SettingsError
from serve_app.lab.planning.plan import FleetOptions, Planner
from serve_app.lab.planning.queueing import CostTable, LengthMix
from serve_app.lab.planning.verification import Verifier
from serve_app.lab.simulation.run import choose_trace
from tests.lab.planning.builders import demand, mix

LARGE, SMALL = "llama2-70b-h100-tp4", "llama31-8b-rtx4090-tp1"
MIXED = mix(*[(200, 100)] * 40, *[(3_000, 200)] * 10)


def planner(options: FleetOptions, *, rate: float = 60.0, lengths: LengthMix = MIXED) -> Planner:
    return Planner(options, demand(rate, ttft_s=2.0, tpot_s=0.1), lengths, CostTable.load())


def test_every_b_short_with_requests_on_both_sides_gets_its_best_pools() -> None:
    found = planner(FleetOptions(profile=LARGE, b_short_tokens=(64, 512, 1_024, 16_000))).split()
    assert [one.plan.b_short_tokens for one in found] == [512, 1_024]
    assert all(set(one.counts) == {"short", "long"} for one in found)


def test_a_cheaper_profile_for_short_requests_is_taken_where_it_serves_them() -> None:
    options = FleetOptions(profile=LARGE, short_profiles=(SMALL,), b_short_tokens=(1_024,))
    (one,) = planner(options).split()
    assert one.plan.pools["short"].profile == SMALL
    assert one.plan.pools["long"].profile == LARGE


def test_the_undivided_fleet_may_use_every_profile_of_a_pool() -> None:
    undivided = planner(FleetOptions(profile=LARGE, short_profiles=(SMALL,))).paged
    assert {one.plan.pools["all"].profile for one in undivided} == {LARGE, SMALL}
    costs = [one.usd_per_hour for one in undivided]
    assert costs == sorted(costs)
    # A fleet that cannot hold the longest request is excluded.
    longest = LengthMix(np.append(MIXED.prompts, 16_000), np.append(MIXED.outputs, 300))
    able = planner(FleetOptions(profile=LARGE, short_profiles=("laptop",)), lengths=longest).paged
    assert {one.plan.pools["all"].profile for one in able} == {LARGE}


def test_the_worst_case_takes_the_given_number_of_sequences() -> None:
    (pool,) = planner(FleetOptions(profile=LARGE, worst_case_slots=16)).worst_case().plan.pools.values()
    assert pool.engine.max_num_seqs == 16
    (derived,) = planner(FleetOptions(profile=LARGE)).worst_case().plan.pools.values()
    assert derived.engine.max_num_seqs == 26


def test_a_search_ends_in_simulated_fleets() -> None:
    wanted = demand(40.0, requests=120)
    lengths = LengthMix.of(choose_trace(wanted.trace, 0))
    options = FleetOptions(profile="laptop", b_short_tokens=(512, 1_024), variants=False, candidates=1)
    steps: list[str] = []
    result = Planner(options, wanted, lengths, CostTable.load(), steps.append).search(
        Verifier(wanted), range(2)
    )
    assert steps == ["worst-case-homogeneous", "paged-homogeneous", "pools"]
    assert result.paged is not None
    assert result.worst_case is not None
    assert result.pools is not None
    for one in result.simulated:
        assert one.verification.meets
        assert len(one.verification.runs) == 2
    assert result.paged.usd_per_hour <= result.worst_case.usd_per_hour


def test_a_search_needs_values_of_b_short_and_candidates() -> None:
    with pytest.raises(SettingsError, match="values of B_short"):
        FleetOptions(profile=LARGE, b_short_tokens=())
    with pytest.raises(SettingsError, match="candidate"):
        FleetOptions(profile=LARGE, candidates=0)
