from dataclasses import replace

import pytest

from serve_app.lab.simulation.run import (
    EngineChanges,
    FleetSettings,
    PoolChanges,
    RunSettings,
    TraceChoice,
    at_load,
    run_all,
    saturated_rate_per_s,
    saturated_rates,
    simulate,
)

ONE = FleetSettings(profile="laptop", replicas={"all": 1})
PAPER_MIX = TraceChoice(name="paper-mix", requests=800)


def run(load: float | None = None, **changes: object) -> RunSettings:
    plain = RunSettings(policy="fcfs", fleet=ONE, trace=PAPER_MIX, load=load)
    return replace(plain, **changes)  # type: ignore[arg-type] # each test names what it changes


@pytest.mark.slow
def test_the_saturated_rate_is_the_same_whenever_it_is_measured() -> None:
    fresh = TraceChoice(name="paper-mix", requests=1_999)
    assert saturated_rate_per_s(ONE, fresh, 3) == saturated_rate_per_s(ONE, replace(fresh), 3)
    assert saturated_rate_per_s(ONE, fresh, 3) != saturated_rate_per_s(ONE, fresh, 4)


@pytest.mark.parametrize("profile", ["laptop", pytest.param("llama2-70b-h100-tp4", marks=pytest.mark.slow)])
def test_short_and_long_runs_find_the_same_rate(profile: str) -> None:
    fleet = FleetSettings(profile=profile, replicas={"all": 1})
    short, long = (
        saturated_rate_per_s(fleet, TraceChoice(name="paper-mix", requests=count), 0)
        for count in (500, 3_000)
    )
    assert short == pytest.approx(long, rel=0.05)


def test_replicas_carry_in_proportion_to_their_number() -> None:
    three = FleetSettings(profile="laptop", replicas={"all": 3})
    ratio = saturated_rate_per_s(three, PAPER_MIX, 0) / saturated_rate_per_s(ONE, PAPER_MIX, 0)
    assert ratio == pytest.approx(3.0, rel=0.05)


def test_requests_finish_as_they_arrive_below_the_saturated_rate_and_not_above() -> None:
    below, above = (simulate(one) for one in (at_load([run()], load, jobs=1)[0] for load in (0.8, 1.4)))
    last_arrival_s = below.records[-1].arrived_at
    assert below.whole.makespan_s < 1.1 * last_arrival_s
    assert above.whole.makespan_s > 1.2 * above.records[-1].arrived_at
    # The throughput in overload defines load 1.0.
    rate = saturated_rate_per_s(ONE, PAPER_MIX, 0)
    assert len(above.records) / above.whole.makespan_s == pytest.approx(rate, rel=0.1)


def test_the_chunk_limit_under_test_does_not_affect_load_1() -> None:
    chunked = replace(ONE, engine=EngineChanges(long_prefill_token_threshold=64))
    assert saturated_rate_per_s(chunked, PAPER_MIX, 0) == saturated_rate_per_s(ONE, PAPER_MIX, 0)
    smaller = replace(ONE, engine=EngineChanges(max_num_seqs=4))
    assert saturated_rate_per_s(smaller, PAPER_MIX, 0) < saturated_rate_per_s(ONE, PAPER_MIX, 0)


@pytest.mark.slow
def test_a_chunk_limit_of_one_pool_has_no_part_in_it_either() -> None:
    two = FleetSettings(profile="laptop", replicas={"short": 1, "long": 1}, b_short_tokens=1_024)
    limit = PoolChanges(engine=EngineChanges(long_prefill_token_threshold=64))
    chunked = replace(two, by_pool={"long": limit})
    rate = saturated_rate_per_s(two, PAPER_MIX, 0)
    assert saturated_rate_per_s(chunked, PAPER_MIX, 0) == rate
    assert saturated_rates([run(fleet=two), run(fleet=chunked)], jobs=1) == [rate, rate]
    # Other changes to the pool's engine have an effect.
    fewer = PoolChanges(engine=EngineChanges(long_prefill_token_threshold=64, max_num_seqs=2))
    assert saturated_rate_per_s(replace(two, by_pool={"long": fewer}), PAPER_MIX, 0) < rate


def test_policies_at_one_load_have_one_rate() -> None:
    runs = [run(), run(policy="direct"), run(seed=1)]
    fcfs, direct, other_seed = saturated_rates(runs, jobs=1)
    assert fcfs == direct != other_seed
    assert [one.rate_per_s for one in at_load(runs, 0.5, jobs=1)] == [
        fcfs / 2,
        direct / 2,
        other_seed / 2,
    ]


def test_processes_give_the_same_results_in_the_requested_order() -> None:
    runs = [run(rate_per_s=30.0, seed=seed, trace=replace(PAPER_MIX, requests=100)) for seed in range(3)]
    alone, together = (list(run_all(runs, jobs=jobs, keep_records=True)) for jobs in (1, 2))
    assert [one.settings.seed for one in together] == [0, 1, 2]
    assert [one.records for one in together] == [one.records for one in alone]
    assert [one.summary for one in together] == [one.summary for one in alone]


def test_records_stay_in_their_process_unless_requested() -> None:
    (result,) = run_all([run(rate_per_s=30.0, trace=replace(PAPER_MIX, requests=100))], jobs=1)
    assert result.records == result.measured == []
    assert result.whole.completed == 100
