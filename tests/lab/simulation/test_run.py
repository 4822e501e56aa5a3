"""Simulated runs: their fleets, settings and workloads."""

import functools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from serve_app.core.decision_log import Decision
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.settings import ScoreWeights
from serve_app.engines.model.roofline import load_profile
from serve_app.errors import Outcome, SettingsError
from serve_app.lab.simulation.run import (
    DirectSimulation,
    Disclosure,
    EngineChanges,
    FleetSettings,
    PoolChanges,
    RunResult,
    RunSettings,
    SloByLength,
    at_load,
    choose_trace,
    policy_names,
    requests_of,
    run_all,
    saturated_rate_per_s,
    saturated_rates,
    scheduler_settings,
    simulate,
    with_arrivals,
)
from serve_app.lab.simulation.simulation import SimulatedRequest, SimulationSettings
from serve_app.lab.workloads import Trace, TraceChoice, TraceError, TraceRequest
from tests.core.metrics import builders
from tests.lab.simulation.builders import mixed_requests, plan, simulated

LAPTOP = FleetSettings(profile="laptop", replicas={"all": 2})
PAPER_MIX = TraceChoice(name="paper-mix", requests=300)


def settings(policy: str = "fcfs", /, **changes: object) -> RunSettings:
    plain = RunSettings(policy=policy, fleet=LAPTOP, trace=PAPER_MIX, rate_per_s=40.0)
    return replace(plain, **changes)  # type: ignore[arg-type] # each test names what it changes


def decisions_of(run: RunSettings) -> list[Decision]:
    log: list[Decision] = []
    simulate(run, log.append)
    return log


@functools.cache
def played(policy: str) -> RunResult:
    return simulate(settings(policy))


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_completes_every_request_once(policy: str) -> None:
    result = played(policy)
    assert sorted(record.request_id for record in result.records) == sorted(f"r{n}" for n in range(300))
    assert {record.outcome for record in result.records} == {Outcome.COMPLETED}
    for record in result.records:
        assert record.dispatched_at is not None
        assert record.first_token_at is not None
        assert record.arrived_at <= record.dispatched_at < record.first_token_at <= record.finished_at


def test_all_policies_meet_the_same_requests_at_the_same_times_and_do_the_same_work() -> None:
    work = [
        [
            (record.request_id, record.arrived_at, record.prompt_tokens, record.output_tokens)
            for record in played(policy).measured
        ]
        for policy in policy_names()
    ]
    assert all(one == work[0] for one in work)


def test_the_first_tenth_by_arrival_is_not_measured_and_the_last_is() -> None:
    result = simulate(settings())
    assert len(result.measured) == 270
    assert result.summary.completed == 270
    assert result.whole.completed == 300
    assert result.measured == result.records[30:]
    assert max(one.arrived_at for one in result.records[:30]) <= result.measured[0].arrived_at


def test_prompts_beyond_the_context_are_left_out_and_counted() -> None:
    short = FleetSettings(profile="laptop", replicas={"all": 2}, engine=EngineChanges(max_model_len=2_000))
    result = simulate(settings(fleet=short))
    everything = simulate(settings())
    longer = [one for one in everything.records if one.prompt_tokens >= 2_000]
    assert result.workload.dropped == len(longer) > 10
    assert len(result.records) == 300 - len(longer)
    assert all(one.prompt_tokens + one.output_tokens <= 2_000 for one in result.records)
    assert result.whole.completed == len(result.records)


def test_answers_end_at_the_context_limit_and_are_counted() -> None:
    tight = FleetSettings(profile="laptop", replicas={"all": 2}, engine=EngineChanges(max_model_len=300))
    result = simulate(settings(fleet=tight))
    clipped = [one for one in result.records if one.prompt_tokens + one.output_tokens == 300]
    assert result.workload.clipped > 0
    assert len(clipped) >= result.workload.clipped


def test_two_pools_keep_long_prompts_out_of_the_short_one() -> None:
    pools = FleetSettings(profile="laptop", replicas={"short": 1, "long": 1}, b_short_tokens=1_500)
    result = simulate(settings(fleet=pools))
    assert {record.pool for record in result.records} == {"short", "long"}
    assert all(record.pool == "long" for record in result.records if record.prompt_tokens > 1_500)
    assert result.whole.completed == 300


def test_known_output_lengths_are_disclosed_and_unknown_ones_are_not() -> None:
    disclosed = decisions_of(settings(disclosure=Disclosure(output_known=True)))
    undisclosed = decisions_of(settings())
    stated = [one.event.request.spec.max_output_tokens for one in disclosed if hasattr(one.event, "request")]
    silent = [
        one.event.request.spec.max_output_tokens for one in undisclosed if hasattr(one.event, "request")
    ]
    assert len(stated) == len(silent) == 300
    assert all(isinstance(limit, int) for limit in stated)
    assert set(silent) == {None}


def test_reports_and_control_latency_are_those_of_the_settings() -> None:
    near = simulate(settings())
    far = simulate(settings(simulation=SimulationSettings(control_latency_s=0.3, report_interval_s=1.0)))
    # Grants reach engines late, so no first token can be earlier.
    assert min(record.ttft_s or 0.0 for record in far.records) > 0.3
    assert min(record.ttft_s or 0.0 for record in near.records) < 0.3


def record(prompt_tokens: int, ttft_s: float) -> RequestRecord:
    return builders.record(
        arrived_at=0.0,
        first_token_at=ttft_s,
        finished_at=ttft_s + 0.5,
        prompt_tokens=prompt_tokens,
        output_tokens=10,
    )


def test_long_prompts_have_more_time_to_their_first_token() -> None:
    slo = SloByLength(short_at_tokens=256)
    assert slo.met_by(record(256, 1.0))
    assert not slo.met_by(record(256, 1.1))
    assert slo.met_by(record(257, 10.0))
    assert not slo.met_by(record(257, 10.1))
    slow = SloByLength(tpot_s=0.05)
    assert not slow.met_by(record(100, 0.5))
    assert not slow.met_by(record(1_000, 0.5))


# -- many runs, and their rates ---------------------------------------------------------------------------

ONE = FleetSettings(profile="laptop", replicas={"all": 1})
LONGER_MIX = TraceChoice(name="paper-mix", requests=800)


def run(load: float | None = None, **changes: object) -> RunSettings:
    plain = RunSettings(policy="fcfs", fleet=ONE, trace=LONGER_MIX, load=load)
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
    ratio = saturated_rate_per_s(three, LONGER_MIX, 0) / saturated_rate_per_s(ONE, LONGER_MIX, 0)
    assert ratio == pytest.approx(3.0, rel=0.05)


def test_requests_finish_as_they_arrive_below_the_saturated_rate_and_not_above() -> None:
    below, above = (simulate(one) for one in (at_load([run()], load, jobs=1)[0] for load in (0.8, 1.4)))
    last_arrival_s = below.records[-1].arrived_at
    assert below.whole.makespan_s < 1.1 * last_arrival_s
    assert above.whole.makespan_s > 1.2 * above.records[-1].arrived_at
    # The throughput in overload defines load 1.0.
    rate = saturated_rate_per_s(ONE, LONGER_MIX, 0)
    assert len(above.records) / above.whole.makespan_s == pytest.approx(rate, rel=0.1)


def test_the_chunk_limit_under_test_does_not_affect_load_1() -> None:
    chunked = replace(ONE, engine=EngineChanges(long_prefill_token_threshold=64))
    assert saturated_rate_per_s(chunked, LONGER_MIX, 0) == saturated_rate_per_s(ONE, LONGER_MIX, 0)
    smaller = replace(ONE, engine=EngineChanges(max_num_seqs=4))
    assert saturated_rate_per_s(smaller, LONGER_MIX, 0) < saturated_rate_per_s(ONE, LONGER_MIX, 0)


@pytest.mark.slow
def test_a_chunk_limit_of_one_pool_has_no_part_in_it_either() -> None:
    two = FleetSettings(profile="laptop", replicas={"short": 1, "long": 1}, b_short_tokens=1_024)
    limit = PoolChanges(engine=EngineChanges(long_prefill_token_threshold=64))
    chunked = replace(two, by_pool={"long": limit})
    rate = saturated_rate_per_s(two, LONGER_MIX, 0)
    assert saturated_rate_per_s(chunked, LONGER_MIX, 0) == rate
    assert saturated_rates([run(fleet=two), run(fleet=chunked)], jobs=1) == [rate, rate]
    # Other changes to the pool's engine have an effect.
    fewer = PoolChanges(engine=EngineChanges(long_prefill_token_threshold=64, max_num_seqs=2))
    assert saturated_rate_per_s(replace(two, by_pool={"long": fewer}), LONGER_MIX, 0) < rate


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
    runs = [run(rate_per_s=30.0, seed=seed, trace=replace(LONGER_MIX, requests=100)) for seed in range(3)]
    alone, together = (list(run_all(runs, jobs=jobs, keep_records=True)) for jobs in (1, 2))
    assert [one.settings.seed for one in together] == [0, 1, 2]
    assert [one.records for one in together] == [one.records for one in alone]
    assert [one.summary for one in together] == [one.summary for one in alone]


def test_records_stay_in_their_process_unless_requested() -> None:
    (result,) = run_all([run(rate_per_s=30.0, trace=replace(LONGER_MIX, requests=100))], jobs=1)
    assert result.records == result.measured == []
    assert result.whole.completed == 100


# -- direct dispatch without a scheduler ------------------------------------------------------------------


def test_least_outstanding_prefers_the_engine_that_has_less_to_do() -> None:
    quick, slow = (
        plan("quick", "all", max_model_len=8_000),
        plan("slow", "all", max_model_len=8_000, max_num_seqs=1),
    )
    records = DirectSimulation([quick, slow]).run(mixed_requests(200, rate_per_s=8.0, seed=2))
    served = Counter(record.replica for record in records)
    assert served["quick"] > 2 * served["slow"] > 0


def test_equally_idle_engines_take_turns() -> None:
    direct = DirectSimulation([plan(name, "all", max_model_len=8_000) for name in "ab"])
    records = direct.run(mixed_requests(40, rate_per_s=0.05, seed=3))
    assert Counter(record.replica for record in records) == {"a": 20, "b": 20}


def test_a_request_goes_only_where_it_fits() -> None:
    direct = DirectSimulation(
        [plan("short", "all", max_model_len=700), plan("long", "all", max_model_len=4_000)]
    )
    records = direct.run(mixed_requests(100, rate_per_s=5.0, seed=4))
    assert len(records) == 100
    assert all(record.replica == "long" for record in records if record.prompt_tokens >= 700)


def test_a_request_that_fits_nowhere_is_rejected_aloud() -> None:
    direct = DirectSimulation([plan("short", "all", max_model_len=300)])
    with pytest.raises(ValueError, match="exceeds the context of all engines"):
        direct.run(mixed_requests(50, rate_per_s=5.0, seed=5))


def test_a_bound_request_reaches_its_engine_only() -> None:
    requests = [simulated(f"r{number}", bound_to="b") for number in range(9)]
    direct = DirectSimulation([plan(name, "all", max_model_len=4_000) for name in "abc"])
    assert {record.replica for record in direct.run(requests)} == {"b"}


def test_each_end_is_reported_once_with_its_record() -> None:
    ended: list[tuple[SimulatedRequest, RequestRecord]] = []
    direct = DirectSimulation(
        [plan("a", "all", max_model_len=4_000)],
        on_end=lambda simulated, record: ended.append((simulated, record)),
    )
    requests = mixed_requests(40, rate_per_s=10.0, seed=6)
    records = direct.run(requests)
    assert [record for _, record in ended] == records
    assert [one.request.request_id for one, _ in ended] == [record.request_id for _, record in ended]
    assert sorted(map(id, (one for one, _ in ended))) == sorted(map(id, requests))


def test_requests_may_be_submitted_at_the_end_of_another() -> None:
    arrived: list[float] = []

    def follow(ended: SimulatedRequest, record: RequestRecord) -> None:
        arrived.append(record.finished_at)
        if len(arrived) == 1:
            direct.submit(simulated("later", at=record.finished_at + 2.0))
            # Its arrival has passed: it reaches an engine now, and has waited since.
            direct.submit(simulated("late", at=record.arrived_at))

    direct = DirectSimulation([plan("a", "all")], on_end=follow)
    records = {record.request_id: record for record in direct.run([simulated("first", at=1.0)])}
    assert records["later"].arrived_at == records["later"].dispatched_at == arrived[0] + 2.0
    assert (records["late"].arrived_at, records["late"].dispatched_at) == (1.0, arrived[0])
    assert records["late"].queue_wait_s == arrived[0] - 1.0


# -- fleets -----------------------------------------------------------------------------------------------

LARGE = "llama2-70b-h100-tp4"
POOLS = {"short": 2, "long": 1}


def test_a_fleet_without_changes_is_the_profile() -> None:
    (plan,) = FleetSettings(profile=LARGE).plans()
    profile = load_profile(LARGE)
    assert plan.engine == profile.model_settings()
    assert plan.step_time == profile.step_time


def test_pools_may_differ_in_profile_and_engine() -> None:
    fleet = FleetSettings(
        profile=LARGE,
        replicas=POOLS,
        b_short_tokens=4_096,
        engine=EngineChanges(max_num_seqs=64),
        by_pool={
            "short": PoolChanges(profile="laptop", engine=EngineChanges(max_num_seqs=32, kv_tokens=50_000)),
            "long": PoolChanges(engine=EngineChanges(max_num_batched_tokens=4_096)),
        },
    )
    short, _, long = fleet.plans()
    assert (short.pool, short.engine.max_num_seqs, short.engine.kv_tokens) == ("short", 32, 50_000)
    assert short.engine.max_model_len == 4_096
    assert short.step_time == load_profile("laptop").step_time
    assert (long.pool, long.engine.max_num_seqs, long.engine.max_num_batched_tokens) == ("long", 64, 4_096)
    assert long.engine.max_model_len == load_profile(LARGE).max_model_len
    assert fleet.gpus == 2 * 1 + 4
    assert [fleet.profile_of(pool) for pool in POOLS] == ["laptop", LARGE]


def test_the_short_pool_has_its_own_context() -> None:
    own = {"short": PoolChanges(engine=EngineChanges(max_model_len=6_000))}
    fleet = FleetSettings(profile=LARGE, replicas=POOLS, b_short_tokens=4_096, by_pool=own)
    assert fleet.plans()[0].engine.max_model_len == 6_000
    assert fleet.routing.b_short_tokens == 4_096


def test_each_pool_gets_the_chunk_limit_of_its_own_profile() -> None:
    fleet = FleetSettings(profile=LARGE, replicas=POOLS, by_pool={"short": PoolChanges(profile="laptop")})
    limits = [plan.engine.long_prefill_token_threshold for plan in fleet.plans(isolated=True)]
    small, large = (load_profile(name).step_time.chunk_tokens() for name in ("laptop", LARGE))
    assert limits == [small, small, large]
    given = FleetSettings(profile=LARGE, engine=EngineChanges(long_prefill_token_threshold=0))
    assert given.plans(isolated=True)[0].engine.long_prefill_token_threshold == 0


def test_a_fleet_may_have_any_number_of_pools() -> None:
    contexts = {"small": 2_048, "middle": 4_096}
    by_pool = {
        name: PoolChanges(engine=EngineChanges(max_model_len=context)) for name, context in contexts.items()
    }
    by_pool["middle"] = replace(by_pool["middle"], cost=2.0, boundary_tokens=3_000)
    fleet = FleetSettings(
        profile=LARGE,
        replicas={"small": 2, "middle": 1, "large": 1},
        b_short_tokens=2_048,
        by_pool=by_pool,
    )
    assert [(plan.pool, plan.engine.max_model_len) for plan in fleet.plans()] == [
        ("small", 2_048),
        ("small", 2_048),
        ("middle", 4_096),
        ("large", load_profile(LARGE).max_model_len),
    ]
    routing = fleet.routing
    assert (routing.pools, routing.b_short_tokens) == (("small", "middle", "large"), 2_048)
    assert (routing.boundaries_tokens, routing.costs) == ((3_000,), (1.0, 2.0, 1.0))


def test_pools_that_are_not_in_the_order_of_their_contexts_are_rejected() -> None:
    own = {"a": PoolChanges(engine=EngineChanges(max_model_len=4_096))}
    own["b"] = PoolChanges(engine=EngineChanges(max_model_len=2_048))
    fleet = FleetSettings(profile=LARGE, replicas={"a": 1, "b": 1}, by_pool=own)
    with pytest.raises(SettingsError, match="4,096 in a before 2,048 in b"):
        fleet.plans()
    with pytest.raises(SettingsError, match="at least one pool"):
        FleetSettings(profile=LARGE, replicas={})


def test_changes_of_a_pool_that_there_is_not_are_rejected() -> None:
    with pytest.raises(SettingsError, match="no pool 'short' to change"):
        FleetSettings(profile=LARGE, by_pool={"short": PoolChanges()})


# -- scheduler settings -----------------------------------------------------------------------------------

ROUTING = RoutingSettings(b_short_tokens=2_048)


def test_one_weight_that_is_set_leaves_the_others() -> None:
    settings = scheduler_settings("ewsjf", ROUTING, {"ewsjf.weights.a_u": 0.5})
    assert settings.ewsjf.weights == replace(ScoreWeights(), a_u=0.5)


def test_an_unknown_weight_or_an_impossible_one_is_rejected() -> None:
    with pytest.raises(SettingsError, match="floor must be positive, got 0"):
        scheduler_settings("ewsjf", ROUTING, {"ewsjf.weights.floor": 0.0})
    with pytest.raises(SettingsError, match="c_u"):
        scheduler_settings("ewsjf", ROUTING, {"ewsjf.weights.c_u": 0.5})
    with pytest.raises(SettingsError, match="'weights', which has a value itself"):
        scheduler_settings("ewsjf", ROUTING, {"ewsjf.weights": 3, "ewsjf.weights.a_u": 0.5})


def test_the_fleet_defines_the_pools_and_the_changes_define_their_use() -> None:
    settings = scheduler_settings(
        "ewsjf", ROUTING, {"routing.spill": False, "backpressure.target_waiting": 5}
    )
    assert settings.routing == replace(ROUTING, spill=False)
    assert settings.backpressure.target_waiting == 5
    assert settings.backpressure.tpot_gate_s is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("routing.b_short_tokens", "b_short_tokens cannot be set"),
        ("policy", "policy cannot be set"),
        ("model.name", "cannot be set below 'model'"),
    ],
)
def test_what_the_run_decides_cannot_be_set(path: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        scheduler_settings("ewsjf", ROUTING, {path: "x"})


# -- workloads --------------------------------------------------------------------------------------------


def requests(*prompts: tuple[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
    made = tuple(
        TraceRequest(arrival_s=0.0, prompt_tokens=tokens, output_tokens=1, prefix=prefix)
        for tokens, prefix in prompts
    )
    trace = Trace(name="t", source="s", requests=made)
    return [simulated.request.submission.prefix for simulated in requests_of(trace, Disclosure(), 16)]


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def test_prefixes_are_sent_to_the_scheduler_in_the_gateways_blocks() -> None:
    one, other, shorter = requests((1_300, (7, 8, 9)), (1_300, (7, 8, 3)), (1_000, (7, 8)))
    assert len(one) == 1_300 // 128
    assert common(one, other) == 1_024 // 128
    assert shorter == one[: 1_000 // 128]
    assert len(set(one) | set(other)) == 10 + 2


def test_a_trace_without_prefixes_has_no_blocks() -> None:
    assert requests((1_300, ()), (1_300, (7,))) == [(), requests((512, (7,)))[0]]


TRACE = choose_trace(TraceChoice(name="paper-mix", requests=4_000), 0)


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


@pytest.mark.parametrize("pattern", ["poisson", "gamma:2", "on-off:40,30"])
def test_arrivals_change_and_requests_and_rate_stay(pattern: str) -> None:
    changed = with_arrivals(TRACE, pattern, rng())
    assert [one.prompt_tokens for one in changed.requests] == [one.prompt_tokens for one in TRACE.requests]
    assert changed.rate_per_s == pytest.approx(TRACE.rate_per_s, rel=0.25)
    times = [one.arrival_s for one in changed.requests]
    assert times == sorted(times)
    assert times != [one.arrival_s for one in TRACE.requests]
    assert pattern in changed.source


def test_gamma_arrivals_are_as_bursty_as_requested() -> None:
    gaps = np.diff([one.arrival_s for one in with_arrivals(TRACE, "gamma:3", rng()).requests])
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.15)


@pytest.mark.parametrize("pattern", ["tides", "gamma", "gamma:0", "on-off:3", "on-off:a,b", "poisson:2"])
def test_a_pattern_that_cannot_be_read_is_named(pattern: str) -> None:
    with pytest.raises(TraceError, match=pattern.partition(":")[0]):
        with_arrivals(TRACE, pattern, rng())
