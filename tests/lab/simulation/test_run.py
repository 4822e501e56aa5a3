import functools
from dataclasses import replace

import pytest

from serve_app.core.decision_log import Decision
from serve_app.core.metrics.record import RequestRecord
from serve_app.errors import Outcome
from serve_app.lab.simulation.run import (
    Disclosure,
    EngineChanges,
    FleetSettings,
    RunResult,
    RunSettings,
    SloByLength,
    TraceChoice,
    policy_names,
    simulate,
)
from serve_app.lab.simulation.simulation import SimulationSettings
from tests.core.metrics import builders

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
