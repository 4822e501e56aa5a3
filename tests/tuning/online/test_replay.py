"""Slices of a simulated production, played again in the twin."""

import math
from dataclasses import replace

import pytest

from serve_app.metrics.record import RequestRecord
from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import Simulation
from serve_app.simulation.workload import Disclosure, TraceChoice, choose_trace, requests_of
from serve_app.tuning.objective.objective import ObjectiveSettings
from serve_app.tuning.online.control_variate import control_of
from serve_app.tuning.online.replay import LEAD_SLICES, ReplayTask, replay
from serve_app.tuning.online.rollout_settings import RolloutSettings
from serve_app.tuning.online.slice_noise import (
    Measured,
    neighbours_in,
    rewards_in,
    slice_noise_of,
    steady_slices,
)
from serve_app.tuning.search.tunable import Tunable, space_of
from serve_app.tuning.twin.digital_twin import TwinPlan, with_speed
from serve_app.tuning.twin.traffic import TrafficLog
from serve_app.workloads.trace import Trace, scale_to_rate

FLEET = FleetSettings(profile="laptop", replicas={"all": 1})
OBJECTIVE = ObjectiveSettings(min_requests=20)
SETTINGS = RolloutSettings(slice_s=8.0, settle_s=1.0)


def tidal(trace: Trace) -> Trace:
    """The same requests, faster and slower than they came in turn, with a period of 32 s."""
    angular = 2 * math.pi / 32.0
    return replace(
        trace,
        requests=tuple(
            replace(one, arrival_s=one.arrival_s + 0.8 / angular * (1 - math.cos(angular * one.arrival_s)))
            for one in trace.requests
        ),
    )


@pytest.fixture(scope="module")
def production() -> list[RequestRecord]:
    """What one replica made of a minute and a half in which it was idle and overrun in turn."""
    trace = scale_to_rate(choose_trace(TraceChoice(name="paper-mix", requests=2_700), 3), 30.0)
    simulation = Simulation(scheduler_settings("ewsjf", FLEET.routing, {}), FLEET.plans(isolated=True))
    return simulation.run(list(requests_of(tidal(trace), Disclosure(), 16)))


def task(production: list[RequestRecord], speed_factor: float = 1.0) -> ReplayTask:
    """The last slices, each with the two before it."""
    log = TrafficLog()
    for record in production:
        log.add(record)
    end = max(record.arrived_at for record in production)
    lead_s = SETTINGS.settle_s + LEAD_SLICES * SETTINGS.slice_s
    tunable = Tunable(scheduler=scheduler_settings("ewsjf", FLEET.routing, {}))
    traffic = log.trace(end)
    slices = [log.trace_between(each.start - lead_s, each.end) for each in steady_slices(15.0, end, SETTINGS)]
    assert traffic is not None
    return ReplayTask(
        plan=TwinPlan(
            tunable=tunable,
            space=space_of(tunable),
            engines=with_speed(FLEET.plans(isolated=True), speed_factor),
            traffic=traffic,
            objective=OBJECTIVE,
        ),
        slices=tuple(each for each in slices if each is not None),
        lead_s=lead_s,
    )


def test_the_twin_explains_most_of_what_the_traffic_does_by_itself(production: list[RequestRecord]) -> None:
    asked = task(production)
    result = replay(asked)
    end = max(record.arrived_at for record in production)
    seen = rewards_in(steady_slices(15.0, end, SETTINGS), production, OBJECTIVE)
    assert len(seen) == len(result.expected) >= 5
    assert result.requests == asked.requests
    assert [one.requests for one in result.expected] == [one.requests for one in seen]
    known = neighbours_in(map(Measured, seen, result.expected))
    control, noise = control_of(known), slice_noise_of(known).reward
    assert noise > 0.1
    assert control.reward > 0.7
    assert control.residual.reward < noise / 3


def test_a_replay_is_the_same_each_time_and_knows_the_pace_of_the_engines(
    production: list[RequestRecord],
) -> None:
    asked = task(production)
    first, second = replay(asked), replay(asked)
    assert first == second
    slower = replay(task(production, 2.0))
    assert [one.value for one in slower.expected] < [one.value for one in first.expected]


def test_a_replay_rests_now_and_then(production: list[RequestRecord]) -> None:
    asked = task(production)
    rests = 0

    def rest() -> None:
        nonlocal rests
        rests += 1

    assert replay(asked, rest) == replay(asked)
    # One after each slice, and one for every two thousand events: each request has several.
    assert rests > len(asked.slices)


def test_requests_that_do_not_fit_the_engines_are_left_out(production: list[RequestRecord]) -> None:
    asked = task(production)
    first = asked.slices[0].requests[0]
    larger = (replace(first, prompt_tokens=10_000_000), *asked.slices[0].requests[1:])
    slices = (replace(asked.slices[0], requests=larger), *asked.slices[1:])
    assert replay(replace(asked, slices=slices)).requests == asked.requests - 1
