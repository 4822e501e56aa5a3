import itertools
from typing import Any

import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.commands import Conclude
from serve_app.core.decision_log import Decision
from serve_app.core.events import Finished
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.routing.pools import RoutingSettings
from serve_app.errors import Outcome
from serve_app.lab.simulation.simulation import SimulatedRequest, Simulation, SimulationSettings
from serve_app.request import TurnEnd
from tests.lab.simulation.builders import mixed_requests, plan, simulated

SCHEDULER = SchedulerSettings(model="m", routing=RoutingSettings(b_short_tokens=500))


def simulation(log: list[Decision] | None = None, **changes: Any) -> Simulation:
    plans = [
        plan("s1", "short", max_model_len=1_000, kv_tokens=4_000),
        plan("l1", "long", max_model_len=4_000, kv_tokens=8_000),
    ]
    on_decision = None if log is None else log.append
    return Simulation(SCHEDULER, plans, settings=SimulationSettings(**changes), on_decision=on_decision)


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


def test_each_end_is_reported_once_with_its_record() -> None:
    ended: list[tuple[SimulatedRequest, RequestRecord]] = []
    made = simulation()
    made.on_end = lambda simulated, record: ended.append((simulated, record))
    # Some of them expire in the queue.
    records = made.run(mixed_requests(150, rate_per_s=100.0, seed=6, timeout_s=2.0))
    assert [record for _, record in ended] == records
    assert [one.request.request_id for one, _ in ended] == [record.request_id for record in records]
    assert len({record.outcome for record in records}) > 1


def test_a_request_submitted_at_the_end_of_another_is_served() -> None:
    made = simulation()

    def follow(ended: SimulatedRequest, record: RequestRecord) -> None:
        if len(made.records) < 5:
            number = len(made.records)
            made.submit(simulated(f"r{number}", at=made.timeline.now + 20.0))

    made.on_end = follow
    records = made.run([simulated("r0")])
    assert [record.request_id for record in records] == [f"r{number}" for number in range(5)]
    for before, record in itertools.pairwise(records):
        assert record.arrived_at == pytest.approx(before.finished_at + 0.001 + 20.0)
        assert record.dispatched_at == record.arrived_at
    assert made.is_over
    assert len(made.timeline) <= len(made.replicas)


def test_the_scheduler_is_informed_of_the_ending_of_an_answer() -> None:
    log: list[Decision] = []
    endings = [TurnEnd.TOOLS, TurnEnd.DONE, None]
    simulation(log).run(
        [simulated(f"r{number}", at=5.0 * number, ending=ending) for number, ending in enumerate(endings)]
    )
    finished = [step.event for step in log if isinstance(step.event, Finished)]
    assert [event.usage.ending for event in finished if event.usage is not None] == endings


def test_prefilled_tokens_count_what_the_prefix_cache_lacks() -> None:
    made = simulation()
    blocks = tuple(range(20))
    made.run(
        [
            simulated("first", prompt_tokens=165, output_tokens=20, blocks=blocks[:11]),
            simulated("next", prompt_tokens=250, blocks=blocks[:15], at=5.0),
            simulated("large", prompt_tokens=900, at=10.0),
        ]
    )
    # 184 tokens of the first were computed: its prompt, and its answer except for the last token.
    prefilled = {name: replica.prefilled_tokens for name, replica in made.replicas.items()}
    assert prefilled == {"s1": 165 + 250 - 11 * 16, "l1": 900}


def test_prefilled_tokens_count_those_of_preempted_sequences_again() -> None:
    made = Simulation(SCHEDULER, [plan("s1", "short", kv_tokens=2_000), plan("l1", "long", kv_tokens=2_000)])
    (s1, l1) = made.replicas.values()
    requests = [
        simulated(f"r{number}", prompt_tokens=400, output_tokens=900, bound_to="s1") for number in range(3)
    ]
    records = made.run(requests)
    assert sum(record.preemptions for record in records) > 0
    assert s1.prefilled_tokens > 3 * 400
    assert l1.prefilled_tokens == 0
