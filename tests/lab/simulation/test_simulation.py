import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.commands import Conclude
from serve_app.core.decision_log import Decision
from serve_app.core.routing.pools import RoutingSettings
from serve_app.errors import Outcome
from serve_app.lab.simulation.simulation import Simulation, SimulationSettings
from tests.lab.simulation.builders import mixed_requests, plan

SCHEDULER = SchedulerSettings(model="m", routing=RoutingSettings(b_short_tokens=500))


def simulation(log: list[Decision] | None = None, **changes: float) -> Simulation:
    plans = [
        plan("s1", "short", max_model_len=1_000, kv_tokens=4_000),
        plan("l1", "long", max_model_len=4_000, kv_tokens=8_000),
    ]
    on_decision = None if log is None else log.append
    return Simulation(SCHEDULER, plans, settings=SimulationSettings(**changes), on_decision=on_decision)


def test_every_request_concludes_exactly_once_and_everything_ends_empty() -> None:
    made = simulation()
    records = made.run(mixed_requests(400, rate_per_s=8.0, seed=1))
    assert sorted(record.request_id for record in records) == sorted(f"r{n}" for n in range(400))
    assert {record.outcome for record in records} == {Outcome.COMPLETED}
    assert len(made.scheduler) == 0
    assert all(state.held_tokens == state.in_flight == state.unseen == 0 for state in made.scheduler.ledger)
    assert all(not replica.model.has_work for replica in made.replicas.values())


def test_timestamps_are_in_the_order_of_life() -> None:
    for record in simulation().run(mixed_requests(200, rate_per_s=6.0, seed=2)):
        assert record.dispatched_at is not None
        assert record.first_token_at is not None
        assert record.arrived_at <= record.dispatched_at < record.first_token_at <= record.finished_at
        assert record.pool in ("short", "long")


def test_dispatches_and_feedback_take_the_control_latency() -> None:
    log: list[Decision] = []
    (record,) = simulation(log, control_latency_s=0.5).run(mixed_requests(1, rate_per_s=1.0, seed=5))
    assert record.dispatched_at == record.arrived_at
    # The grant travels to the engine before the first step can begin.
    assert record.ttft_s is not None
    assert record.ttft_s > 0.5
    (end,) = (step for step in log if any(isinstance(command, Conclude) for command in step.commands))
    assert end.now == pytest.approx(record.finished_at + 0.5)


def test_overload_expires_or_rejects_requests_instead_of_losing_them() -> None:
    requests = mixed_requests(200, rate_per_s=200.0, seed=6, timeout_s=2.0)
    records = simulation().run(requests)
    outcomes = [record.outcome for record in records]
    assert len(outcomes) == 200
    # Requests of the first two seconds expire; then the scheduler predicts that others would, too.
    assert set(outcomes) == {Outcome.COMPLETED, Outcome.EXPIRED, Outcome.REJECTED_DEADLINE_UNMEETABLE}
    for record in records:
        if record.outcome is Outcome.EXPIRED:
            assert record.e2e_s == pytest.approx(2.0, abs=1e-6)
        if record.outcome is Outcome.REJECTED_DEADLINE_UNMEETABLE:
            assert record.e2e_s == 0.0
