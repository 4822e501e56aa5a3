"""Guarantees of every ordering policy, in one overloaded simulation."""

import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.policies import learns_queues, make_policy
from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.core.routing.pools import RoutingSettings
from serve_app.errors import Outcome
from serve_app.lab.simulation.baselines import SIMULATED_POLICIES
from serve_app.lab.simulation.simulation import Simulation
from tests.conformance.builders import simulated
from tests.lab.simulation.builders import mixed_requests, plan

every_policy = pytest.mark.parametrize("policy", sorted(SIMULATED_POLICIES))


@every_policy
def test_conserves_requests_and_concludes_each_once(policy: str) -> None:
    simulation, _ = simulated(policy)
    assert sorted(record.request_id for record in simulation.records) == sorted(f"r{n}" for n in range(300))
    assert {record.outcome for record in simulation.records} == {Outcome.COMPLETED}


@every_policy
def test_leaves_queue_and_ledger_empty(policy: str) -> None:
    simulation, _ = simulated(policy)
    assert (
        len(simulation.scheduler)
        == len(simulation.scheduler.queue)
        == simulation.scheduler.queue.waiting_tokens
        == 0
    )
    assert all(state.held_tokens == state.in_flight == 0 for state in simulation.scheduler.ledger)


@every_policy
def test_the_same_events_give_the_same_decisions(policy: str) -> None:
    assert repr(simulated(policy)[1]) == repr(simulated(policy)[1])


@every_policy
def test_an_idle_fleet_dispatches_at_once(policy: str) -> None:
    simulation, _ = simulated(policy, rate_per_s=0.5)
    assert max(record.queue_wait_s or 0.0 for record in simulation.records) == 0.0


@every_policy
def test_exactly_the_policies_that_learn_queues_use_a_new_partition(policy: str) -> None:
    whole = Partition((LengthInterval(min_tokens=1, max_tokens=9_000, mean_tokens=300.0, count=1),))
    assert make_policy(policy, table=SIMULATED_POLICIES).replace_partition(whole) is learns_queues(
        policy, SIMULATED_POLICIES
    )


def test_fcfs_dispatches_in_the_order_of_arrival() -> None:
    settings = SchedulerSettings(model="m", policy="fcfs", routing=RoutingSettings(pools=("only",)))
    simulation = Simulation(settings, [plan("s1", "only", max_model_len=4_000, kv_tokens=6_000)])
    records = simulation.run(mixed_requests(300, rate_per_s=12.0, seed=2))
    by_arrival = sorted(records, key=lambda record: record.arrived_at)
    dispatched = [record.dispatched_at for record in by_arrival]
    assert dispatched == sorted(time for time in dispatched if time is not None)


def test_an_unknown_policy_is_rejected_with_the_names_of_all() -> None:
    with pytest.raises(ValueError, match="unknown policy 'lifo': choose one of ewsjf, "):
        make_policy("lifo")
