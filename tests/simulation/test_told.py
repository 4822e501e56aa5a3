"""Clients that are told where they stand, in simulated overload."""

from collections import Counter, defaultdict

import pytest

from serve_app.scheduling.outlook.watched import Honesty, Outlook
from serve_app.scheduling.queueing.fairness import FairnessMode, FairnessSettings
from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.run import RunSettings
from serve_app.simulation.simulation import SimulatedRequest, Simulation
from serve_app.simulation.told import ToldClients, simulate_told
from serve_app.simulation.workload import TraceChoice
from tests.builders import ONE_POOL, request, settings

from .builders import mixed_requests, plan

CLASSES = "interactive=2,default=6,batch=2"
TENANTS = "a=5,b=3,c=1,d=1"


def alike(count: int, *, every_s: float) -> list[SimulatedRequest]:
    """Requests of one tenant, one class and one size."""
    return [
        SimulatedRequest(
            request(f"r{number}", prompt_tokens=200, max_output_tokens=40, arrived_at=number * every_s), 40
        )
        for number in range(count)
    ]


def test_under_fcfs_those_who_are_alike_start_in_the_order_of_their_places() -> None:
    simulation = Simulation(
        settings(routing=ONE_POOL, fairness=FairnessSettings(mode=FairnessMode.OFF)),
        [plan("s1", "only", max_num_seqs=4)],
    )
    told: dict[str, list[Outlook]] = defaultdict(list)
    looks: dict[float, list[Outlook]] = defaultdict(list)

    def note(outlook: Outlook, now: float) -> None:
        told[outlook.request_id].append(outlook)
        looks[now].append(outlook)

    ToldClients(simulation, on_told=note)
    records = simulation.run(alike(200, every_s=0.05))
    assert len(told) > 100
    for outlooks in told.values():
        positions = [outlook.position for outlook in outlooks]
        assert positions == sorted(positions, reverse=True)
    started = {record.request_id: record.dispatched_at or 0.0 for record in records}
    for outlooks in looks.values():
        by_place = [outlook.request_id for outlook in sorted(outlooks, key=lambda one: one.position)]
        assert by_place == sorted(by_place, key=started.__getitem__)
        assert len({outlook.position for outlook in outlooks}) == len(outlooks)


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "ewsjf"])
def test_being_told_changes_no_decision(policy: str) -> None:
    def played(*, asks: bool) -> list[tuple[str, float | None, str]]:
        simulation = Simulation(settings(policy=policy), [plan("s1", "short"), plan("l1", "long")])
        clients = ToldClients(simulation, asks=lambda _: asks)
        records = simulation.run(mixed_requests(200, rate_per_s=60.0, seed=3))
        assert bool(clients.honesty) is asks
        return [(record.request_id, record.dispatched_at, record.replica) for record in records]

    assert played(asks=True) == played(asks=False)


def coverage(honesty: list[Honesty], told: str) -> float:
    verdicts = Counter(one.verdict for one in honesty if one.told == told)
    return verdicts["inside"] / verdicts.total()


@pytest.mark.parametrize(
    ("trace", "rate_per_s", "pools", "tenants", "priorities"),
    [
        pytest.param("paper-mix", 24.0, {"all": 2}, None, None, marks=pytest.mark.slow),
        ("paper-mix", 24.0, {"all": 2}, TENANTS, CLASSES),
        pytest.param("lmsys", 28.0, {"all": 2}, TENANTS, None, marks=pytest.mark.slow),
        ("azure-code+azure-conv", 8.0, {"short": 1, "long": 1}, TENANTS, CLASSES),
    ],
    ids=["paper-mix", "classes", "lmsys", "two-pools"],
)
def test_intervals_hold_about_as_often_as_they_say_in_bursts_of_overload(
    trace: str, rate_per_s: float, pools: dict[str, int], tenants: str | None, priorities: str | None
) -> None:
    choice = TraceChoice(
        name=trace, requests=2_500, arrivals="on-off:500,300", tenants=tenants, priorities=priorities
    )
    run = RunSettings(
        policy="ewsjf",
        fleet=FleetSettings(profile="llama2-70b-h100-tp4", replicas=pools),
        trace=choice,
        rate_per_s=rate_per_s,
    )
    honesty = simulate_told(run)
    assert len(honesty) > 600
    # Said: 80 %. A burst is unlike the one before, and all who wait in it are wrong together.
    assert 0.65 <= coverage(honesty, "first") <= 0.95
