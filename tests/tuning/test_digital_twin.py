"""The digital twin: its searches, its traffic, and the calibration of its engines."""

import json
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.routing.pools import RoutingSettings
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.errors import Outcome
from serve_app.lab.calibration import FittedEngine
from serve_app.lab.simulation.run import (
    ONE_POOL,
    FleetSettings,
    RunSettings,
    choose_trace,
    fitted_trace,
    scheduler_settings,
)
from serve_app.lab.workloads import Trace, TraceChoice, TraceRequest, scale_to_rate
from serve_app.request import PriorityClass
from serve_app.tuning.digital_twin import (
    PRESETS,
    CalibrationSettings,
    DigitalTwin,
    TrafficLog,
    TwinCalibration,
    TwinPlan,
    TwinSettings,
    preset_candidates,
    resampled,
)
from serve_app.tuning.engine_fit import EngineFitResult, TwinError
from serve_app.tuning.search_space import Tunable, space_of
from tests.builders import spec
from tests.core.metrics.builders import record

FLEET = FleetSettings(profile="laptop", replicas={"all": 2})


def plan(
    *, rate_per_s: float = 8.0, policy: str = "ewsjf", window: int = 120, **settings: object
) -> TwinPlan:
    tunable = Tunable(
        scheduler=SchedulerSettings(model="m", policy=policy, routing=FLEET.routing, **settings)  # type: ignore[arg-type]
    )
    traffic = choose_trace(TraceChoice(name="paper-mix", requests=400, tenants="3"), 0)
    return TwinPlan(
        tunable=tunable,
        space=space_of(tunable),
        engines=tuple(FLEET.plans(isolated=True)),
        traffic=scale_to_rate(traffic, rate_per_s),
        settings=TwinSettings(window_requests=window, block_requests=30),
    )


def test_the_same_values_and_window_give_the_same_records() -> None:
    first, second = DigitalTwin(plan()), DigitalTwin(plan())
    values = plan().space.current
    assert first.records(values, 3) == second.records(values, 3)
    # No state carries over from one window to the next.
    assert first.play(values, 4) == second.play(values, 4)
    assert first.records(values, 3) == second.records(values, 3)


def test_candidates_meet_the_same_requests_at_the_same_times() -> None:
    twin = DigitalTwin(plan(rate_per_s=60.0))
    values = twin.records(plan(rate_per_s=60.0).space.current, 0)
    others = twin.records(
        {**plan(rate_per_s=60.0).space.current, "b_u": 5.0, "target_waiting": 16, "alpha": 1.0}, 0
    )
    assert [(one.arrived_at, one.prompt_tokens, one.output_tokens, one.tenant) for one in values] == [
        (one.arrived_at, one.prompt_tokens, one.output_tokens, one.tenant) for one in others
    ]
    assert [one.first_token_at for one in values] != [one.first_token_at for one in others]


def test_a_candidate_has_its_own_queues() -> None:
    twin = DigitalTwin(plan())
    queues = {
        wanted: len({one.length_queue for one in twin.records({**plan().space.current, "alpha": wanted}, 0)})
        for wanted in (1.0, 8.0)
    }
    assert queues[1.0] > 2 * queues[8.0]


def test_the_first_part_of_a_window_is_not_measured() -> None:
    played = DigitalTwin(plan()).play(plan().space.current, 0)
    assert (played.requests, played.reward.requests) == (120, 102)
    assert played.reward.value is not None
    assert played.reward.terms["attainment"] > 0


def test_the_scheduler_of_the_twin_has_learned_already() -> None:
    twin = DigitalTwin(plan(window=40))
    records = twin.records(plan(window=40).space.current, 0)
    # Without learning, the first requests would have the prior's expected length.
    known = [one.estimated_tokens for one in records]
    assert all(estimate is not None and estimate < 2_000 for estimate in known[:5])


def test_a_policy_without_queues_has_a_twin_as_well() -> None:
    fcfs = plan(policy="fcfs")
    assert fcfs.space.names == ("target_waiting",)
    assert DigitalTwin(fcfs).play(fcfs.space.current, 0).reward.value is not None


def test_requests_wait_no_longer_than_their_class_may() -> None:
    overloaded = plan(rate_per_s=500.0)
    timeouts = replace(overloaded.tunable.scheduler.queue_timeout_s, default=0.5)
    scheduler = replace(overloaded.tunable.scheduler, queue_timeout_s=timeouts)
    short = replace(overloaded, tunable=Tunable(scheduler=scheduler))
    outcomes = {one.outcome.value for one in DigitalTwin(short).records(short.space.current, 0)}
    assert "expired" in outcomes


def test_more_traffic_is_more_independent_windows() -> None:
    assert plan(window=100).independent_windows == 4.0
    assert plan(window=900).independent_windows == 1.0


def test_a_failure_has_no_reward_but_a_reason() -> None:
    failed = DigitalTwin(plan()).play({**plan().space.current, "target_waiting": 0}, 0).reward
    assert failed.value is None
    assert "target_waiting" in failed.reason


# -- preset candidates ------------------------------------------------------------------------------------

DEFAULTS = Tunable(scheduler=SchedulerSettings(model="m", routing=RoutingSettings(pools=("only",))))


def test_presets_name_parameters_within_their_bounds() -> None:
    bounds = {each.name: (each.low, each.high) for each in space_of(DEFAULTS)}
    for values in PRESETS.values():
        for name, value in values.items():
            low, high = bounds[name]
            assert low <= value <= high, name


def test_every_preset_is_a_candidate_with_the_other_values_as_they_are() -> None:
    space = space_of(DEFAULTS)
    candidates = preset_candidates(DEFAULTS, space)
    assert candidates == [{**space.current, **values} for values in PRESETS.values()]


def test_from_other_values_the_defaults_are_a_candidate_too() -> None:
    space = space_of(DEFAULTS)
    changed = DEFAULTS.with_values({**space.current, "target_waiting": 8, "wait_ratio": 0.6}, space)
    candidates = preset_candidates(changed, space_of(changed))
    assert candidates[0] == space.current
    assert {**space.current, "target_waiting": 8, "wait_ratio": 4.0} in candidates


@pytest.mark.parametrize(("only", "count"), [(("target_waiting",), 2), (("b_u",), 2), (("alpha",), 0)])
def test_presets_keep_to_a_part_of_the_space_without_repetitions(only: tuple[str, ...], count: int) -> None:
    space = space_of(DEFAULTS, only=only)
    candidates = preset_candidates(DEFAULTS, space)
    assert len(candidates) == count
    assert all(set(values) == set(only) and values != space.current for values in candidates)


# -- searched parameters all change decisions: a search wastes candidates on an inert one -----------------

# Slightly more than one replica can serve, so that requests queue and are ordered.
RATE_PER_S = 10.0


@pytest.mark.application
def test_each_parameter_of_the_default_policy_acts_within_its_bounds() -> None:
    fleet = FleetSettings(profile="llama2-70b-h100-tp4", replicas={ONE_POOL: 1})
    tunable = Tunable(scheduler=scheduler_settings("ewsjf", fleet.routing, {}))
    trace = TraceChoice(name="paper-mix", requests=600)
    run = RunSettings(policy="ewsjf", fleet=fleet, trace=trace, rate_per_s=RATE_PER_S)
    plan = TwinPlan(
        tunable=tunable,
        space=space_of(tunable),
        engines=tuple(fleet.plans(isolated=True)),
        traffic=fitted_trace(run).trace,
        settings=TwinSettings(window_requests=300),
    )
    twin = DigitalTwin(plan)

    def dispatched(**changes: float) -> list[float | None]:
        return [one.dispatched_at for one in twin.records({**plan.space.current, **changes}, 0)]

    usual = dispatched()
    inert = [
        each.name
        for each in plan.space
        if all(dispatched(**{each.name: bound}) == usual for bound in (each.low, each.high))
    ]
    assert inert == []


# -- recorded traffic -------------------------------------------------------------------------------------


def trace(count: int, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(0.1, count))
    return Trace(
        name="t",
        source="drawn",
        requests=tuple(
            TraceRequest(arrival_s=float(at), prompt_tokens=number + 1, output_tokens=5)
            for number, at in enumerate(times)
        ),
    )


def test_a_window_is_made_of_blocks_of_consecutive_requests_with_their_gaps() -> None:
    source = trace(500)
    window = resampled(source, 210, 50, seed=1, number=3)
    assert len(window.requests) == 210
    assert window.requests[0].arrival_s == 0.0
    breaks = 0
    for before, after in zip(window.requests, window.requests[1:], strict=False):
        if after.prompt_tokens != before.prompt_tokens % 500 + 1:
            breaks += 1
        elif after.prompt_tokens > 1:
            place = after.prompt_tokens - 1
            gap = source.requests[place].arrival_s - source.requests[place - 1].arrival_s
            assert after.arrival_s - before.arrival_s == pytest.approx(gap)
    assert breaks <= 4


def test_windows_differ_by_number_and_seed_and_by_nothing_else() -> None:
    source = trace(500)
    windows = [
        resampled(source, 100, 20, seed=seed, number=number) for seed, number in ((1, 1), (1, 2), (2, 1))
    ]
    assert len({window.requests for window in windows}) == 3
    assert resampled(source, 100, 20, seed=1, number=1) == windows[0]


def test_windows_have_the_rate_of_the_traffic_on_average() -> None:
    source = trace(400)
    rates = [resampled(source, 300, 30, seed=0, number=number).rate_per_s for number in range(60)]
    assert source.rate_per_s is not None
    assert statistics.fmean(rate or 0.0 for rate in rates) == pytest.approx(source.rate_per_s, rel=0.05)


def test_every_request_is_drawn_about_as_often() -> None:
    source = trace(40)
    counts = np.zeros(40)
    for number in range(300):
        for one in resampled(source, 40, 10, seed=0, number=number).requests:
            counts[one.prompt_tokens - 1] += 1
    assert counts.min() > 0.7 * counts.mean()


def test_a_window_may_be_longer_than_the_traffic() -> None:
    assert len(resampled(trace(7), 30, 100, seed=0, number=0).requests) == 30


def test_the_log_records_what_a_twin_needs_by_arrival() -> None:
    log = TrafficLog()
    log.add(
        record(request_id="b", arrived_at=12.0, prompt_tokens=7, tenant="t2", priority=PriorityClass.BATCH)
    )
    log.add(record(request_id="a", arrived_at=10.0, prompt_tokens=5, output_tokens=3))
    found = log.trace(until=100.0)
    assert found is not None
    assert [(one.arrival_s, one.prompt_tokens, one.tenant) for one in found.requests] == [
        (0.0, 5, "default"),
        (2.0, 7, "t2"),
    ]
    assert found.requests[1].priority is PriorityClass.BATCH


def test_requests_after_the_oldest_open_one_are_left_out() -> None:
    log = TrafficLog()
    for at in (1.0, 2.0, 3.0):
        log.add(record(request_id=f"r{at}", arrived_at=at))
    found = log.trace(until=3.0)
    assert found is not None
    assert len(found.requests) == 2
    assert log.trace(until=1.0) is None


def test_old_requests_are_dropped() -> None:
    log = TrafficLog()
    for at in (0.0, 150.0, 160.0, 755.0):
        log.add(record(request_id=f"r{at}", arrived_at=at))
    found = log.trace(until=1e9)
    assert found is not None
    assert [one.arrival_s for one in found.requests] == [0.0, 595.0]


def test_an_answer_that_never_ended_is_as_long_as_one_to_a_prompt_of_its_length() -> None:
    log = TrafficLog()
    log.add(record(request_id="a", arrived_at=1.0, prompt_tokens=10, output_tokens=4))
    log.add(record(request_id="b", arrived_at=2.0, prompt_tokens=1_000, output_tokens=200))
    log.add(
        record(request_id="c", arrived_at=3.0, prompt_tokens=900, output_tokens=0, outcome=Outcome.EXPIRED)
    )
    log.add(record(request_id="d", arrived_at=4.0, outcome=Outcome.REJECTED_INVALID))
    found = log.trace(until=9.0)
    assert found is not None
    assert [one.output_tokens for one in found.requests] == [4, 200, 200]


# -- calibration of the twin's engines, and reasons that block a search -----------------------------------

SETTINGS = CalibrationSettings(first_requests=20, check_requests=10, every_s=30.0)
REPLICAS = [spec("r1", "only", max_model_len=8_192, kv_tokens=32_768, max_num_seqs=16)]
MODEL = FittedEngine(
    step_time=StepTimeModel(
        decode_base_s=0.01, decode_per_sequence_s=0.001, prefill_base_s=0.01, prefill_per_token_s=0.0001
    ),
    latency_s=0.004,
)


def answers(count: int, start: float = 0.0, **changes: Any) -> list[RequestRecord]:
    return [
        record(
            request_id=f"{start}-{number}",
            arrived_at=start,
            dispatched_at=start,
            first_token_at=start + 0.1,
            finished_at=start + 1.0,
            replica="r1",
            **changes,
        )
        for number in range(count)
    ]


def result(error: float | None, engines: bool = True) -> EngineFitResult:
    twin_error = None if error is None else TwinError(ttft_ratio=error, tpot_ratio=0.0, requests=10)
    return EngineFitResult(
        engines={"only": MODEL} if engines else None, error=twin_error, until=5.0, requests=0
    )


def fed(calibration: TwinCalibration, count: int, traffic: TrafficLog, **changes: Any) -> None:
    new = answers(count, **changes)
    for each in new:
        traffic.add(each)
    calibration.note(new)


def test_without_a_profile_it_fits_first_and_waits_for_the_error() -> None:
    made, traffic = TwinCalibration(SETTINGS, None), TrafficLog()
    assert made.engines(REPLICAS) is None
    fed(made, 19, traffic)
    assert made.due(traffic, REPLICAS, 10.0, 10.0) is None
    assert "fitted after 20 streamed responses (19 so far)" in made.obstacle
    fed(made, 1, traffic)
    task = made.due(traffic, REPLICAS, 10.0, 10.0)
    assert task is not None
    assert (len(task.records), task.current, task.is_fitted) == (20, {}, False)
    fed(made, 20, traffic)
    made.finish(result(None), 12.0)
    assert "measured after 10 more streamed responses" in made.obstacle
    assert made.due(traffic, REPLICAS, 10.0, 41.0) is None
    check = made.due(traffic, REPLICAS, 10.0, 42.0)
    assert check is not None
    assert (check.current, check.fitted_until, check.is_fitted) == ({"only": MODEL}, 5.0, True)
    made.finish(result(0.04, engines=False), 43.0)
    assert made.obstacle == ""
    (plan,) = made.engines(REPLICAS) or ()
    assert plan.step_time == MODEL.step_time
    assert made.latency_s == MODEL.latency_s / 2


def test_a_replica_of_another_speed_has_its_own_step_times() -> None:
    made, traffic = TwinCalibration(SETTINGS, None), TrafficLog()
    slow = replace(MODEL, step_time=MODEL.step_time.scaled(3.0))
    known = {"only": MODEL, "r2": slow}
    made.finish(replace(result(None), engines={**known, "gone": slow}), 1.0)
    replicas = [*REPLICAS, replace(REPLICAS[0], replica_id="r2")]
    assert [plan.step_time for plan in made.engines(replicas) or ()] == [MODEL.step_time, slow.step_time]
    fed(made, 20, traffic)
    task = made.due(traffic, replicas, 100.0, 100.0)
    assert task is not None
    assert task.current == known


def test_a_large_error_is_an_obstacle_until_a_small_one_is_measured() -> None:
    made, traffic = TwinCalibration(SETTINGS, "laptop"), TrafficLog()
    # A profile is trusted until a check fails.
    assert made.obstacle == ""
    fed(made, 10, traffic)
    assert made.due(traffic, REPLICAS, 10.0, 0.0) is not None
    made.finish(result(-0.4), 1.0)
    assert "the error of the twin exceeds 15%: mean TTFT -40%, TPOT +0% against 10 requests" in made.obstacle
    fed(made, 10, traffic)
    assert made.due(traffic, REPLICAS, 10.0, 100.0) is not None
    made.finish(result(0.14, engines=False), 101.0)
    assert made.obstacle == ""
    assert made.source() == "fitted to the engines (once)"


def test_engines_that_no_fit_describes_are_fitted_less_and_less_often() -> None:
    made, traffic = TwinCalibration(SETTINGS, None), TrafficLog()
    at, waits = 10.0, []
    for error in (None, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.01, 0.5):
        fed(made, 20, traffic)
        assert made.due(traffic, REPLICAS, at, at) is not None
        made.finish(result(error), at)
        fed(made, 20, traffic)
        ended_at = at
        while made.due(traffic, REPLICAS, at, at) is None:
            at += 30.0
        waits.append(at - ended_at)
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 480.0, 480.0, 30.0, 60.0]


def test_answers_that_show_no_pace_do_not_count() -> None:
    made, traffic = TwinCalibration(SETTINGS, None), TrafficLog()
    fed(made, 30, traffic, output_tokens=1)
    assert made.due(traffic, REPLICAS, 10.0, 10.0) is None


def test_the_limits_are_those_that_the_replica_states() -> None:
    made = TwinCalibration(SETTINGS, "laptop")
    (plan,) = made.engines(REPLICAS) or ()
    assert (plan.engine.kv_tokens, plan.engine.max_num_seqs) == (32_768, 16)
    # The profile applies where the replica reports nothing.
    assert plan.engine.max_num_batched_tokens == 1_024
    assert plan.engine.long_prefill_token_threshold == plan.step_time.chunk_tokens()
    stated = replace(REPLICAS[0], kv_tokens=4_096, max_num_batched_tokens=512, long_prefill_token_threshold=0)
    (plan,) = made.engines([stated]) or ()
    assert (plan.engine.max_num_batched_tokens, plan.engine.long_prefill_token_threshold) == (512, 0)
    # A context that exceeds the cache is cut.
    assert plan.engine.max_model_len == 4_096


def test_a_restart_preserves_the_step_times_and_measures_their_error_again() -> None:
    made, traffic = TwinCalibration(SETTINGS, None), TrafficLog()
    fed(made, 20, traffic)
    made.due(traffic, REPLICAS, 10.0, 10.0)
    made.finish(result(None), 12.0)
    again = TwinCalibration(SETTINGS, None)
    again.restore(json.loads(json.dumps(made.state())))
    assert again.engines(REPLICAS) == made.engines(REPLICAS)
    assert again.source() == "fitted to the engines (before a restart)"
    assert "is measured after 10 more" in again.obstacle
    with pytest.raises(ValueError, match="missing required field `decode_base_s`"):
        again.restore({"only": {"latency_s": 0.1}})
    assert again.engines(REPLICAS) == made.engines(REPLICAS)
