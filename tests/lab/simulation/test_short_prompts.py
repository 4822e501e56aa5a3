"""Traffic without long prompts: nothing needs protection, so no request waits for isolation."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from serve_app.core.isolation import IsolationSettings
from serve_app.core.metrics.summary import percentile
from serve_app.lab.simulation.fleet import ONE_POOL, FleetSettings
from serve_app.lab.simulation.scheduler_settings import scheduler_settings
from serve_app.lab.simulation.simulation import Simulation
from serve_app.lab.simulation.workload import Disclosure, requests_of
from serve_app.lab.workloads.trace import Trace, TraceRequest

FLEET = FleetSettings(profile="llama31-8b-rtx4090-tp1", replicas={ONE_POOL: 1})


def trace(rate_per_s: float, prompt: Callable[[random.Random], int]) -> Trace:
    rng, at, requests = random.Random(0), 0.0, []
    for _ in range(1_000):
        at += rng.expovariate(rate_per_s)
        requests.append(TraceRequest(arrival_s=at, prompt_tokens=prompt(rng), output_tokens=3, tenant="t"))
    return Trace(name="short", source="short", requests=tuple(requests))


def p99_ttft_s(short: Trace, isolation: IsolationSettings) -> float:
    settings = replace(scheduler_settings("ewsjf", FLEET.routing, {}), isolation=isolation)
    plans = FLEET.plans(isolated=True)
    requests = list(requests_of(short, Disclosure(), plans[0].engine.block_size))
    records = Simulation(settings, plans).run(requests)
    return percentile(sorted(record.ttft_s for record in records if record.ttft_s is not None), 99)


@pytest.mark.parametrize(
    ("rate_per_s", "prompt"),
    [
        (300.0, lambda rng: 20),
        (180.0, lambda rng: rng.randint(10, 60)),
        (65.0, lambda rng: rng.randint(20, 200)),
    ],
    ids=["20 tokens", "10 to 60", "20 to 200"],
)
def test_they_start_as_early_as_without_isolation(
    rate_per_s: float, prompt: Callable[[random.Random], int]
) -> None:
    short = trace(rate_per_s, prompt)
    without_s = p99_ttft_s(short, IsolationSettings(max_long_prefills=0))
    assert without_s < 1.0
    assert p99_ttft_s(short, IsolationSettings()) <= 1.05 * without_s
