"""What every ordering policy owes, whatever its order: each runs the same overloaded world."""

import pytest

from serve_app.errors import Outcome
from serve_app.routing.pools import RoutingSettings
from serve_app.scheduling import SchedulerSettings
from serve_app.scheduling.decision_log import Decision
from serve_app.scheduling.policies import learns_queues, make_policy
from serve_app.scheduling.policies.partition import LengthInterval, Partition
from serve_app.simulation.baselines import SIMULATED_POLICIES
from serve_app.simulation.simulation import Simulation
from tests.simulation.builders import mixed_requests, plan


def run(policy: str, *, rate_per_s: float = 12.0, seed: int = 1) -> tuple[Simulation, list[Decision]]:
    log: list[Decision] = []
    settings = SchedulerSettings(model="m", policy=policy, routing=RoutingSettings(b_short_tokens=500))
    plans = [
        plan("s1", "short", max_model_len=1_000, kv_tokens=3_000),
        plan("l1", "long", max_model_len=4_000, kv_tokens=6_000),
    ]
    world = Simulation(settings, plans, on_decision=log.append)
    world.run(mixed_requests(300, rate_per_s=rate_per_s, seed=seed))
    return world, log


@pytest.mark.parametrize("policy", sorted(SIMULATED_POLICIES))
def test_conserves_requests_and_concludes_each_once(policy: str) -> None:
    world, _ = run(policy)
    assert sorted(record.request_id for record in world.records) == sorted(f"r{n}" for n in range(300))
    assert {record.outcome for record in world.records} == {Outcome.COMPLETED}


@pytest.mark.parametrize("policy", sorted(SIMULATED_POLICIES))
def test_leaves_the_books_empty(policy: str) -> None:
    world, _ = run(policy)
    assert len(world.scheduler) == len(world.scheduler.queue) == world.scheduler.queue.waiting_tokens == 0
    assert all(state.held_tokens == state.in_flight == 0 for state in world.scheduler.ledger)


@pytest.mark.parametrize("policy", sorted(SIMULATED_POLICIES))
def test_the_same_events_give_the_same_decisions(policy: str) -> None:
    assert repr(run(policy)[1]) == repr(run(policy)[1])


@pytest.mark.parametrize("policy", sorted(SIMULATED_POLICIES))
def test_an_idle_fleet_dispatches_at_once(policy: str) -> None:
    world, _ = run(policy, rate_per_s=0.5)
    assert max(record.queue_wait_s or 0.0 for record in world.records) == 0.0


@pytest.mark.parametrize("policy", sorted(SIMULATED_POLICIES))
def test_whoever_learns_queues_takes_a_partition_over_and_nobody_else(policy: str) -> None:
    whole = Partition((LengthInterval(min_tokens=1, max_tokens=9_000, mean_tokens=300.0, count=1),))
    assert make_policy(policy, table=SIMULATED_POLICIES).replace_partition(whole) is learns_queues(
        policy, SIMULATED_POLICIES
    )


def test_fcfs_dispatches_in_the_order_of_arrival_within_a_lane() -> None:
    settings = SchedulerSettings(model="m", policy="fcfs", routing=RoutingSettings(pools=("only",)))
    world = Simulation(settings, [plan("s1", "only", max_model_len=4_000, kv_tokens=6_000)])
    records = world.run(mixed_requests(300, rate_per_s=12.0, seed=2))
    by_arrival = sorted(records, key=lambda record: record.arrived_at)
    dispatched = [record.dispatched_at for record in by_arrival]
    assert dispatched == sorted(time for time in dispatched if time is not None)


def test_an_unknown_policy_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown policy 'lifo': choose one of ewsjf, "):
        make_policy("lifo")
