"""Traffic for which a rule of the scheduler must cost nothing, on one simulated engine."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.isolation import IsolationSettings
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import percentile
from serve_app.lab.simulation.run import (
    ONE_POOL,
    Disclosure,
    EngineChanges,
    FleetSettings,
    RunSettings,
    requests_of,
    scheduler_settings,
    simulate,
)
from serve_app.lab.simulation.simulation import Simulation
from serve_app.lab.workloads import Trace, TraceChoice, TraceRequest
from serve_app.request import PriorityClass

FLEET = FleetSettings(profile="llama31-8b-rtx4090-tp1", replicas={ONE_POOL: 1})


def play(requests: Iterable[TraceRequest], **changes: Any) -> list[RequestRecord]:
    plans = FLEET.plans(isolated=True)
    trace = Trace(name="made", source="for the test", requests=tuple(requests))
    settings = replace(scheduler_settings("ewsjf", FLEET.routing, {}), **changes)
    return Simulation(settings, plans).run(list(requests_of(trace, Disclosure(), plans[0].engine.block_size)))


def test_a_backlog_of_short_batch_requests_takes_no_longer_than_of_any_others() -> None:
    def seconds_for_a_backlog(priority: PriorityClass) -> float:
        rng = random.Random(0)
        backlog = (
            TraceRequest(
                arrival_s=0.0,
                prompt_tokens=rng.randint(50, 250),
                output_tokens=rng.randint(20, 80),
                tenant="t",
                priority=priority,
            )
            for _ in range(600)
        )
        return max(record.finished_at for record in play(backlog))

    others_s = seconds_for_a_backlog(PriorityClass.DEFAULT)
    assert seconds_for_a_backlog(PriorityClass.BATCH) < 1.05 * others_s


@pytest.mark.parametrize(
    ("rate_per_s", "prompt"),
    [
        (300.0, lambda rng: 20),
        (180.0, lambda rng: rng.randint(10, 60)),
        (65.0, lambda rng: rng.randint(20, 200)),
    ],
    ids=["20 tokens", "10 to 60", "20 to 200"],
)
def test_short_prompts_alone_start_as_early_as_without_isolation(
    rate_per_s: float, prompt: Callable[[random.Random], int]
) -> None:
    def p99_ttft_s(isolation: IsolationSettings) -> float:
        rng, at, requests = random.Random(0), 0.0, []
        for _ in range(1_000):
            at += rng.expovariate(rate_per_s)
            requests.append(
                TraceRequest(arrival_s=at, prompt_tokens=prompt(rng), output_tokens=3, tenant="t")
            )
        records = play(requests, isolation=isolation)
        return percentile(sorted(record.ttft_s for record in records if record.ttft_s is not None), 99)

    without_s = p99_ttft_s(IsolationSettings(max_long_prefills=0))
    assert without_s < 1.0
    assert p99_ttft_s(IsolationSettings()) <= 1.05 * without_s


def test_an_engine_of_unknown_load_serves_nearly_as_well() -> None:
    def goodput_per_s(*, reports_load: bool) -> float:
        """Return the goodput of an engine with a batch of 16 near saturation."""
        fleet = replace(FLEET, engine=EngineChanges(max_num_seqs=16), reports_load=reports_load)
        trace = TraceChoice(name="paper-mix", requests=400)
        result = simulate(RunSettings(policy="ewsjf", fleet=fleet, trace=trace, rate_per_s=5.0))
        assert result.summary.completed == len(result.measured)
        return result.summary.goodput_per_s

    assert goodput_per_s(reports_load=False) > 0.9 * goodput_per_s(reports_load=True)
