"""Queueing formulas, and the pools and fleets sized by them."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.metrics.summary import Slo
from serve_app.engines.model.roofline import load_profile, profile_names, save_profile
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.errors import SettingsError
from serve_app.lab.planning.queueing import (
    CostTable,
    LengthMix,
    OperatingPoint,
    Performance,
    PoolModel,
    PoolPlan,
    erlang_b,
    erlang_c,
    p99_wait_s,
    paged_fleet,
    size,
    sized_pool,
    smallest_pool,
    split_fleet,
    worst_case_fleet,
    worst_case_slots,
)
from serve_app.lab.simulation.run import EngineChanges
from serve_app.lab.workloads import Trace, TraceRequest
from tests.lab.planning.builders import mix, pool_model
from tests.lab.simulation.builders import STEP_TIME

CHAT = mix(*[(200, 100)] * 3, (1_000, 50))


def point_of(model: PoolModel, rate_per_s: float) -> OperatingPoint:
    """Return the operating point at a rate below capacity."""
    point = model.at_rate(rate_per_s)
    assert point is not None
    return point


def test_an_idle_engine_takes_a_decode_step_for_each_token() -> None:
    point = point_of(pool_model(CHAT), 1e-6)
    assert point.iteration_s == pytest.approx(0.02, rel=1e-3)
    # One step for the prompt, and one for each further token.
    assert point.service_s == pytest.approx((0.75 * 100 + 0.25 * 50) * 0.02, rel=1e-3)
    assert point.tpot_s == pytest.approx(0.02, rel=0.02)


def test_the_operating_point_solves_its_equation() -> None:
    # With negligible prompts, t = base + n * per sequence with n = r * (o - 1 + 1) * t, in closed form.
    free = replace(STEP_TIME, prefill_per_token_s=0.0, prefill_base_s=0.004)
    model = pool_model(mix((10, 101)), step_time=free, max_num_seqs=256)
    rate = 20.0
    point = point_of(model, rate)
    expected_s = 0.02 / (1 - rate * 100 * 0.0004)
    assert point.iteration_s == pytest.approx(expected_s, rel=1e-4)
    assert point.sequences == pytest.approx(rate * 101 * expected_s, rel=1e-4)


@pytest.mark.parametrize("name", ["llama3-70b-h100-tp4", "qwen3-235b-a22b-mi300x-tp8"])
def test_steps_take_as_long_as_in_the_engine_model(name: str) -> None:
    step_time = load_profile(name).step_time
    model = pool_model(mix((1_000, 101)), step_time=step_time)
    # Each sequence decodes in 100 of its 101 iterations, at 1,050.5 tokens of context in the mean.
    decoding = 50
    for prompt_tokens in (0, 128, 2_048):
        expected = step_time.step_s(
            prefill_tokens=prompt_tokens,
            attended_pairs=round(prompt_tokens * 1_001 / 2),
            sequences=decoding,
            context_tokens=round(decoding * 1_050.5),
        )
        (computed,) = model._step_s(np.array([float(prompt_tokens)]), decoding * 101 / 100)
        assert computed == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["llama3-70b-a100-tp4", "qwen3-235b-a22b-mi300x-tp8"])
def test_every_rate_below_capacity_has_its_operating_point(name: str) -> None:
    lengths = mix(*[(200, 150)] * 18, (3_000, 300), (6_000, 100))
    model = pool_model(lengths, step_time=load_profile(name).step_time, max_num_seqs=256, chunk=128)
    points = [point_of(model, share / 20 * model.capacity_per_s) for share in range(1, 20)]
    iterations = [point.iteration_s for point in points]
    assert iterations == sorted(iterations)
    # Capacity is reached where the batch is full or prefill takes all time, not where a solver fails.
    assert points[-1].sequences > 0.5 * model.slots or iterations[-1] > 2 * iterations[0]


def test_an_engine_ends_where_its_slots_or_its_prefill_do() -> None:
    few = pool_model(CHAT, max_num_seqs=4)
    many = pool_model(CHAT, max_num_seqs=256)
    assert few.capacity_per_s < many.capacity_per_s
    point = point_of(few, 0.999 * few.capacity_per_s)
    assert point.sequences == pytest.approx(4, rel=0.01)
    # 400 prompt tokens of 0.1 ms each on average: no engine computes 25 of them per second.
    assert many.capacity_per_s < 25
    assert many.at_rate(26) is None


def test_the_kv_cache_limits_slots_by_what_sequences_hold() -> None:
    long = mix((8_000, 200))
    assert pool_model(long, kv_tokens=40_000).slots < 6
    assert pool_model(long, kv_tokens=400_000).slots > 40
    assert pool_model(CHAT, max_num_seqs=7).slots == 7


def test_contexts_lengthen_iterations_where_they_cost() -> None:
    by_context = replace(STEP_TIME, decode_per_context_token_s=1e-6)
    short, long = mix((100, 100)), mix((4_000, 100))
    plain, costly = (point_of(pool_model(long, step_time=one), 0.5) for one in (STEP_TIME, by_context))
    assert costly.iteration_s > plain.iteration_s
    light = point_of(pool_model(short, step_time=by_context), 0.5)
    assert light.iteration_s < costly.iteration_s


def test_more_replicas_never_make_it_worse() -> None:
    model = pool_model(CHAT)
    tails = [model.performance(40.0, count) for count in range(2, 12)]
    for name in ("utilisation", "p99_ttft_s", "p99_tpot_s"):
        values = [getattr(one, name) for one in tails]
        assert values == sorted(values, reverse=True), name
    assert tails[0].p99_ttft_s == math.inf or tails[0].utilisation > tails[-1].utilisation


def test_long_prompts_in_chunks_take_their_time_to_the_first_token() -> None:
    one_long = mix(*[(100, 50)] * 50, (8_000, 50))
    whole, chunked = (point_of(pool_model(one_long, chunk=chunk), 1.0) for chunk in (0, 128))
    assert chunked.first_token_s > 1.2 * whole.first_token_s
    assert chunked.tpot_s <= whole.tpot_s


def test_limits_count_where_they_are_set() -> None:
    fast = Performance(replicas=1, utilisation=0.5, p99_ttft_s=1.0, p99_tpot_s=0.05)
    assert fast.meets(Slo(ttft_s=1.0, tpot_s=0.05))
    assert not fast.meets(Slo(ttft_s=0.9, tpot_s=None))
    assert not fast.meets(Slo(ttft_s=None, tpot_s=0.04))
    assert not replace(fast, utilisation=0.9).meets(Slo(ttft_s=None, tpot_s=None))


def test_an_engine_without_prefill_cost_still_has_an_end() -> None:
    free = StepTimeModel(
        decode_base_s=0.01, decode_per_sequence_s=0.001, prefill_base_s=0.01, prefill_per_token_s=0.0
    )
    assert 0 < pool_model(CHAT, step_time=free).capacity_per_s < math.inf


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="without requests"):
        pool_model(CHAT.split(1)[0])


def erlang_b_by_definition(servers: int, offered: float) -> float:
    terms = [offered**count / math.factorial(count) for count in range(servers + 1)]
    return terms[-1] / math.fsum(terms)


@given(st.integers(1, 60), st.floats(0.01, 80))
def test_the_recursion_is_erlangs_formula(servers: int, offered: float) -> None:
    assert erlang_b(servers, offered) == pytest.approx(erlang_b_by_definition(servers, offered), rel=1e-9)


def test_one_server_waits_as_often_as_it_is_busy() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    # Any table of the formula: 10 servers, 8 Erlangs.
    assert erlang_c(10, 8.0) == pytest.approx(0.4092, abs=1e-4)


def test_thousands_of_servers_are_no_trouble() -> None:
    assert 0 < erlang_c(20_000, 19_900) < 1
    assert erlang_c(20_000, 10_000) == pytest.approx(0.0, abs=1e-12)
    assert erlang_c(5, 5.0) == 1.0


def test_the_wait_of_one_server_is_that_of_textbooks() -> None:
    # M/M/1: P(W > t) = u exp(-(1 - u) t / E[S]).
    wait_s = p99_wait_s(servers=1, rate_per_s=0.8, mean_service_s=1.0, service_cv2=1.0)
    assert 0.8 * math.exp(-0.2 * wait_s) == pytest.approx(0.01)


@given(st.integers(1, 50), st.floats(0.05, 0.95), st.floats(0, 5))
def test_steady_service_waits_half_as_long(servers: int, utilisation: float, cv2: float) -> None:
    def wait_s(variation: float) -> float:
        return p99_wait_s(
            servers=servers, rate_per_s=utilisation * servers, mean_service_s=1.0, service_cv2=variation
        )

    assert wait_s(0.0) == pytest.approx(wait_s(1.0) / 2)
    assert wait_s(cv2) == pytest.approx(wait_s(1.0) * (1 + cv2) / 2)


def test_saturated_servers_wait_for_ever_and_idle_ones_not_at_all() -> None:
    assert p99_wait_s(servers=2, rate_per_s=2.0, mean_service_s=1.0, service_cv2=1.0) == math.inf
    assert p99_wait_s(servers=50, rate_per_s=2.0, mean_service_s=1.0, service_cv2=1.0) == 0.0


def test_a_trace_becomes_its_lengths() -> None:
    requests = tuple(
        TraceRequest(arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)
        for prompt, output in ((100, 20), (5_000, 0))
    )
    lengths = LengthMix.of(Trace(name="t", source="test", requests=requests))
    assert lengths.totals.tolist() == [120, 5_001]


def test_a_border_splits_by_the_whole_budget() -> None:
    lengths = mix((100, 28), (100, 29), (10, 500))
    short, long = lengths.split(128)
    assert (len(short), len(long)) == (1, 2)
    assert len(lengths.split(1_000)[1]) == 0


def test_every_prompt_needs_its_output() -> None:
    with pytest.raises(ValueError, match="3 and 2 lengths"):
        LengthMix(np.array([1, 2, 3]), np.array([1, 2]))


def test_without_max_tokens_a_high_quantile_of_answers_counts_as_the_answer() -> None:
    requests = tuple(
        TraceRequest(arrival_s=0.0, prompt_tokens=100, output_tokens=output) for output in range(1, 101)
    )
    trace = Trace(name="t", source="test", requests=requests)
    with_outputs, without_outputs = (LengthMix.of(trace, output_known=known) for known in (True, False))
    assert len(with_outputs.split(150)[0]) == 50
    assert without_outputs.allowed_outputs == 100
    assert len(without_outputs.split(199)[0]) == 0
    short, long = without_outputs.split(200)
    assert (len(short), len(long)) == (100, 0)
    assert short.allowed_outputs == 100


# -- sizing of pools --------------------------------------------------------------------------------------
SLO = Slo(ttft_s=2.0, tpot_s=0.06)
LARGE_POOL = PoolPlan(profile="llama2-70b-h100-tp4")


@pytest.mark.parametrize("rate", [3.0, 40.0, 700.0])
def test_the_smallest_pool_meets_and_one_less_does_not(rate: float) -> None:
    model = pool_model(CHAT)
    found = smallest_pool(model, rate, SLO)
    assert found is not None
    assert found.meets(SLO)
    if found.replicas > 1:
        assert not model.performance(rate, found.replicas - 1).meets(SLO)


def test_limits_out_of_reach_are_known_and_the_cap_counts_alone() -> None:
    model = pool_model(CHAT)
    impossible = Slo(ttft_s=2.0, tpot_s=0.001)
    assert smallest_pool(model, 40.0, impossible) is None
    sized = sized_pool(model, 40.0, impossible)
    assert not sized.within_limits
    assert sized.performance.utilisation <= 0.85
    assert sized_pool(model, 40.0, SLO).within_limits


def test_pools_are_sized_for_their_own_share() -> None:
    lengths = mix(*[(200, 100)] * 9, (6_000, 100))
    pools = size(split_fleet(LARGE_POOL, LARGE_POOL, 4_096), lengths, 100.0, Slo(ttft_s=5.0, tpot_s=0.1))
    assert set(pools) == {"short", "long"}
    assert all(sized.replicas >= 1 for sized in pools.values())


# -- fleets and their costs -------------------------------------------------------------------------------

LARGE = "llama2-70b-h100-tp4"
SMALL = "llama31-8b-rtx4090-tp1"


def test_the_worst_case_gives_every_sequence_the_longest_context() -> None:
    assert worst_case_slots(LARGE) == 427_000 // 16_384
    # A context of 131,072 tokens counts as the papers' 64K.
    assert worst_case_slots("llama3-70b-h100-tp4") == 488_000 // 65_536
    (plan,) = worst_case_fleet(LARGE, 6).settings({"all": 1}).plans(isolated=True)
    assert plan.engine.max_num_seqs == 6
    assert plan.engine.long_prefill_token_threshold == load_profile(LARGE).step_time.chunk_tokens()


def test_a_paged_fleet_is_the_profile_with_the_policys_chunk_limit() -> None:
    (plan,) = paged_fleet(PoolPlan(profile=LARGE)).settings({"all": 1}).plans()
    assert plan.engine == load_profile(LARGE).model_settings()


def test_two_pools_have_their_own_engines_models_and_costs() -> None:
    fleet = split_fleet(
        PoolPlan(profile=SMALL, engine=EngineChanges(max_num_seqs=32)), PoolPlan(profile=LARGE), 4_096
    )
    counts = {"short": 3, "long": 2}
    settings = fleet.settings(counts)
    assert dict(settings.replicas) == counts
    assert fleet.gpus(counts) == settings.gpus == 3 + 8
    costs = CostTable.load()
    expected = 3 * costs.usd_per_hour(SMALL) + 2 * costs.usd_per_hour(LARGE)
    assert fleet.usd_per_hour(counts, costs) == pytest.approx(expected)
    models = fleet.models(mix((100, 50), (200, 50), (6_000, 50)))
    assert [len(models[pool].mix) for pool in counts] == [2, 1]
    assert models["short"].engine.max_model_len == 4_096
    assert models["short"].engine.max_num_seqs == 32
    assert models["long"].engine.max_model_len == 16_384


def test_an_undivided_fleet_has_one_model_of_everything() -> None:
    (model,) = paged_fleet(PoolPlan(profile=LARGE)).models(mix((100, 50), (9_000, 50))).values()
    assert len(model.mix) == 2


def test_every_packaged_profile_has_a_cost() -> None:
    table = CostTable.load()
    for name in profile_names():
        assert table.usd_per_hour(name) >= 0.1, name
    assert table.usd_per_hour("llama2-70b-h100-tp4") == pytest.approx(4 * table.costs["h100"].usd_per_hour)


def test_a_table_of_ones_own_and_a_profile_of_ones_own(tmp_path: Path) -> None:
    costs = tmp_path / "costs.yaml"
    costs.write_text("h100: {usd_per_hour: 1.5, source: contract, date: '2026-01'}\n")
    table = CostTable.load(costs)
    profile = tmp_path / "mine-7b-h100-tp4.yaml"
    save_profile(load_profile("llama2-70b-h100-tp4"), profile, source="a test")
    assert table.usd_per_hour(str(profile)) == 6.0


def test_a_gpu_without_cost_is_named_with_the_remedy(tmp_path: Path) -> None:
    costs = tmp_path / "costs.yaml"
    costs.write_text("h100: {usd_per_hour: 1.5, source: contract, date: '2026-01'}\n")
    with pytest.raises(SettingsError, match=r"'llama31-8b-rtx4090-tp1'.*--costs"):
        CostTable.load(costs).usd_per_hour("llama31-8b-rtx4090-tp1")


@pytest.mark.parametrize("text", ["h100: 3", "h100: {usd_per_hour: 0, source: x, date: y}", "- 1"])
def test_an_invalid_table_is_rejected(tmp_path: Path, text: str) -> None:
    costs = tmp_path / "costs.yaml"
    costs.write_text(text)
    with pytest.raises(SettingsError, match="not a table of GPU costs"):
        CostTable.load(costs)
