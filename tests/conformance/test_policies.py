"""Guarantees of every ordering policy, in one overloaded simulation."""

import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.decision_log import Decision
from serve_app.core.policies import learns_queues, make_policy
from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.core.routing.pools import RoutingSettings
from serve_app.errors import Outcome
from serve_app.lab.simulation.baselines import SIMULATED_POLICIES
from serve_app.lab.simulation.simulation import Simulation
from tests.conformance.builders import simulated
from tests.lab.simulation.builders import mixed_requests, plan

every_policy = pytest.mark.parametrize("policy", sorted(SIMULATED_POLICIES))

Simulated = tuple[Simulation, list[Decision]]


@pytest.fixture(scope="module", params=sorted(SIMULATED_POLICIES))
def overloaded(request: pytest.FixtureRequest) -> Simulated:
    """Return a simulation and its decisions; one for all tests of a policy."""
    return simulated(request.param)


def test_conserves_requests_and_concludes_each_once(overloaded: Simulated) -> None:
    records = overloaded[0].records
    assert sorted(record.request_id for record in records) == sorted(f"r{n}" for n in range(150))
    assert {record.outcome for record in records} == {Outcome.COMPLETED}
    assert sum((record.queue_wait_s or 0.0) > 0.0 for record in records) > 20


def test_leaves_queue_and_ledger_empty(overloaded: Simulated) -> None:
    scheduler = overloaded[0].scheduler
    assert len(scheduler) == len(scheduler.queue) == scheduler.queue.waiting_tokens == 0
    assert all(state.held_tokens == state.in_flight == 0 for state in scheduler.ledger)


def test_the_same_events_give_the_same_decisions(overloaded: Simulated) -> None:
    simulation, decisions = overloaded
    assert repr(simulated(simulation.scheduler.settings.policy)[1]) == repr(decisions)


@every_policy
def test_an_idle_fleet_dispatches_at_once(policy: str) -> None:
    simulation, _ = simulated(policy, requests=60, rate_per_s=0.5)
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
    records = simulation.run(mixed_requests(150, rate_per_s=16.0, seed=2))
    by_arrival = sorted(records, key=lambda record: record.arrived_at)
    dispatched = [record.dispatched_at for record in by_arrival]
    assert dispatched == sorted(time for time in dispatched if time is not None)


def test_an_unknown_policy_is_rejected_with_the_names_of_all() -> None:
    with pytest.raises(ValueError, match="unknown policy 'lifo': choose one of ewsjf, "):
        make_policy("lifo")
