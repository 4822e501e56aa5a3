"""Engine priority mode: changes no other decision, and orders engine queues by class and tenant."""

from dataclasses import replace

import msgspec
import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.commands import Dispatch
from serve_app.core.decision_log import Decision
from serve_app.core.dispatch.promotion import EnginePrioritySettings
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.policies import POLICIES
from serve_app.core.routing.pools import RoutingSettings
from serve_app.engines.model import SchedulingPolicy
from serve_app.lab.simulation.simulation import SimulatedRequest, Simulation
from serve_app.request import PriorityClass
from tests.builders import request
from tests.conformance.builders import simulated
from tests.lab.simulation.builders import mixed_requests, plan

OFF = EnginePrioritySettings(target_waiting=99)
# Backpressure as without the mode.
ON = EnginePrioritySettings(enabled=True, target_waiting=3, max_prefill_backlog_s=4.0)


REQUESTS = 100


@pytest.fixture(scope="module", params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def off(policy: str) -> list[Decision]:
    """Return the decisions without the mode; one run for all tests of a policy."""
    return decisions(policy, OFF)


def decisions(policy: str, mode: EnginePrioritySettings) -> list[Decision]:
    return simulated(policy, requests=REQUESTS, engine_priority=mode)[1]


def without_priorities(log: list[Decision]) -> list[Decision]:
    return [
        replace(
            step,
            commands=tuple(
                msgspec.structs.replace(one, engine_priority=None) if isinstance(one, Dispatch) else one
                for one in step.commands
            ),
        )
        for step in log
    ]


def test_without_the_mode_its_settings_change_no_decision(policy: str, off: list[Decision]) -> None:
    assert repr(off) == repr(decisions(policy, EnginePrioritySettings()))
    assert off == without_priorities(off)


def test_with_the_mode_only_the_priorities_are_added(policy: str, off: list[Decision]) -> None:
    log = decisions(policy, ON)
    assert repr(without_priorities(log)) == repr(off)
    sent = [one for step in log for one in step.commands if isinstance(one, Dispatch)]
    assert len(sent) == REQUESTS
    assert all(one.engine_priority is not None for one in sent)


def simulated_records(requests: list[SimulatedRequest], *, enabled: bool) -> dict[str, RequestRecord]:
    """Return the records of one engine with four sequences; its queue may be long in both modes."""
    engine = plan("s1", "only", max_num_seqs=4, kv_tokens=100_000)
    if enabled:
        limits = replace(engine.engine, scheduling_policy=SchedulingPolicy.PRIORITY)
        engine = replace(engine, engine=limits)
    usual, wide = SchedulerSettings(model="m", policy="fcfs"), {"target_waiting": 100}
    settings = replace(
        usual,
        routing=RoutingSettings(pools=("only",)),
        backpressure=replace(usual.backpressure, max_prefill_backlog_s=30.0, **wide),
        engine_priority=EnginePrioritySettings(enabled=enabled, **wide),
    )
    return {record.request_id: record for record in Simulation(settings, [engine]).run(requests)}


def burst_then_singles(*last: tuple[str, PriorityClass]) -> list[SimulatedRequest]:
    """Tenant A sends sixty requests at once; a second later each other tenant sends one."""
    requests = mixed_requests(60 + len(last), rate_per_s=1.0, seed=3)
    for number, one in enumerate(requests):
        tenant, priority = ("A", PriorityClass.DEFAULT) if number < 60 else last[number - 60]
        arrived_at = 1e-6 * number if number < 60 else 1.0 + 1e-6 * number
        one.output_tokens = 50
        one.request = request(
            f"r{number}",
            text_bytes=0,
            prompt_tokens=100,
            max_output_tokens=100,
            tenant=tenant,
            priority=priority,
            arrived_at=arrived_at,
            expires_at=one.request.expires_at,
        )
    return requests


def started_before(records: dict[str, RequestRecord], request_id: str) -> int:
    """Return how many of A's requests began between this request's arrival and its first token."""
    first_at = records[request_id].first_token_at
    assert first_at is not None
    begun = [records[f"r{number}"].first_token_at or 0.0 for number in range(60)]
    return sum(1.0 < at < first_at for at in begun)


def test_the_first_request_of_a_new_tenant_passes_a_crowd_that_is_in_the_engine() -> None:
    requests = [("B", PriorityClass.DEFAULT), ("C", PriorityClass.DEFAULT)]
    records = simulated_records(burst_then_singles(*requests), enabled=True)
    waits = [records[f"r{number}"].queue_wait_s for number in (60, 61)]
    # They did not queue in the scheduler, so they passed in the engine; running requests end first.
    assert waits == [0.0, 0.0]
    assert [started_before(records, name) <= 4 for name in ("r60", "r61")] == [True, True]
    usual = simulated_records(burst_then_singles(*requests), enabled=False)
    assert started_before(usual, "r60") == started_before(usual, "r61") > 40


def test_in_the_engine_a_class_passes_all_of_the_next() -> None:
    classes = [PriorityClass.BATCH, PriorityClass.INTERACTIVE]
    records = simulated_records(burst_then_singles(("A", classes[0]), ("A", classes[1])), enabled=True)
    assert started_before(records, "r61") <= 4
    assert started_before(records, "r60") > 40
    assert max(records.values(), key=lambda record: record.first_token_at or 0.0).request_id == "r60"
