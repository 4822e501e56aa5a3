"""Pools that scale during a simulation, by the rule used in production."""

import math

import pytest

from experiments.scaling.rules import ScaledFleet, ScaledSimulation, work_rule
from serve_app.core.scaling import AutoscalingSettings
from serve_app.errors import Outcome
from serve_app.lab.simulation.run import Disclosure, FleetSettings, requests_of, scheduler_settings
from serve_app.lab.simulation.simulation import SimulatedRequest, Simulation
from serve_app.lab.workloads import Trace, TraceRequest

FLEET = FleetSettings(profile="laptop", replicas={"short": 1, "long": 1}, b_short_tokens=1_000)
KINDS = {plan.pool: plan for plan in FLEET.plans(isolated=True)}


def requests(*phases: tuple[float, float, int]) -> list[SimulatedRequest]:
    """Return evenly spaced requests: phases of (seconds, requests/s, prompt tokens)."""
    arrivals: list[TraceRequest] = []
    begins_at = 0.0
    for seconds, rate, prompt_tokens in phases:
        arrivals += [
            TraceRequest(arrival_s=begins_at + number / rate, prompt_tokens=prompt_tokens, output_tokens=100)
            for number in range(math.floor(seconds * rate))
        ]
        begins_at += seconds
    trace = Trace(name="phases", source="made here", requests=tuple(arrivals))
    return list(requests_of(trace, Disclosure(output_known=True), 16))


def play(asked: list[SimulatedRequest], *, least: int = 1, start_s: float = 20.0) -> ScaledSimulation:
    bounds = AutoscalingSettings(min_replicas=least, max_replicas=6, downscale_delay_s=30.0)
    rule = work_rule(KINDS, bounds)
    settings = scheduler_settings("ewsjf", FLEET.routing, {} if least else {"on_demand_pools": list(KINDS)})
    simulation = Simulation(settings, [])
    first = dict.fromkeys(KINDS, least)
    scaled = ScaledSimulation(simulation, ScaledFleet(kinds=KINDS, first=first, rule=rule, start_s=start_s))
    scaled.run(asked)
    return scaled


def most(scaled: ScaledSimulation, pool: str) -> int:
    return max(size.paid for size in scaled.sizes if size.pool == pool)


def test_only_the_pool_whose_traffic_grows_is_scaled_and_nothing_is_cut() -> None:
    asked = requests((20, 2, 50), (50, 60, 50), (90, 2, 50))
    scaled = play(asked)
    assert most(scaled, "short") > 1
    assert most(scaled, "long") == 1
    records = scaled.simulation.records
    assert len(records) == len(asked)
    assert {record.outcome for record in records} == {Outcome.COMPLETED}
    assert [size.ready for size in scaled.sizes if size.pool == "short"][-1] < most(scaled, "short")


@pytest.mark.slow
def test_a_replica_costs_from_its_order_to_its_last_answer() -> None:
    scaled = play(requests((200, 60, 50)))
    sizes = [size for size in scaled.sizes if size.pool == "short"]
    spans = zip(sizes, [*sizes[1:], None], strict=True)
    end = scaled.simulation.timeline.now
    paid_s = sum(size.paid * ((after.at if after else end) - size.at) for size, after in spans)
    assert scaled.replica_seconds()["short"] == paid_s
    ordered = next(size.at for size in sizes if size.paid == 2)
    came = next(size.at for size in sizes if size.ready == 2)
    assert came - ordered == 20.0


@pytest.mark.slow
def test_the_same_requests_give_the_same_fleet() -> None:
    assert play(requests((100, 60, 50))).sizes == play(requests((100, 60, 50))).sizes


def test_a_pool_without_replicas_holds_its_requests_until_the_first_has_started() -> None:
    asked = requests((20, 0.5, 50), (200, 0.005, 50))
    scaled = play(asked, least=0)
    records = sorted(scaled.simulation.records, key=lambda record: record.arrived_at)
    assert {record.outcome for record in records} == {Outcome.COMPLETED}
    first = records[0].ttft_s
    assert first is not None
    assert 19.0 < first < 30.0
    ready = [size.ready for size in scaled.sizes if size.pool == "short"]
    assert (min(ready), max(ready)) == (0, 1)
    assert all(size.ready == 0 for size in scaled.sizes if size.pool == "long")
