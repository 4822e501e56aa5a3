"""Simultaneous requests on idle engines: immediate rejections, and their cost."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.engines.model.roofline import load_profile
from serve_app.errors import Outcome
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulatedRequest, Simulation
from tests.builders import request

TIMEOUT_S, AT_S = 2.0, 5.0
LAPTOP = load_profile("laptop")


def requests(count: int, max_tokens: int | None, mean_output: float) -> list[SimulatedRequest]:
    rng = random.Random(1)
    return [
        SimulatedRequest(
            request(
                f"r{number}",
                prompt_tokens=30,
                max_output_tokens=max_tokens,
                arrived_at=AT_S,
                expires_at=AT_S + TIMEOUT_S,
                model="m",
            ),
            output_tokens=round(min(rng.expovariate(1 / mean_output) + 1, max_tokens or 2_000)),
        )
        for number in range(count)
    ]


class UnstatedPlan(ReplicaPlan):
    """Engine that does not report its pace, so nothing is rejected before a wait was measured."""

    @property
    def spec(self) -> ReplicaSpec:
        return replace(super().spec, tpot_s=None, prefill_token_s=None)


def play(simulated: list[SimulatedRequest], plan: type[ReplicaPlan] = ReplicaPlan) -> list[RequestRecord]:
    """Return the records of a run on the two replicas of the default configuration."""
    plans = [
        plan(
            replica_id=f"{pool}-1",
            pool=pool,
            engine=LAPTOP.model_settings(max_model_len=max_model_len, long_prefill_token_threshold=192),
            step_time=LAPTOP.step_time,
        )
        for pool, max_model_len in (("short", 2_048), ("long", 8_192))
    ]
    settings = SchedulerSettings(model="m", routing=RoutingSettings(b_short_tokens=2_048))
    return Simulation(settings, plans).run(simulated)


def ends(records: list[RequestRecord]) -> Counter[Outcome]:
    return Counter(record.outcome for record in records)


@pytest.mark.parametrize(("max_tokens", "mean_output"), [(200, 10_000.0), (None, 120.0), (1_000, 120.0)])
def test_most_of_those_that_would_expire_are_rejected_at_once_and_as_many_are_served(
    max_tokens: int | None, mean_output: float
) -> None:
    before = ends(play(requests(300, max_tokens, mean_output), UnstatedPlan))
    records = play(requests(300, max_tokens, mean_output))
    after = ends(records)
    assert before[Outcome.EXPIRED] > 100
    assert before[Outcome.REJECTED_DEADLINE_UNMEETABLE] == 0
    assert after[Outcome.EXPIRED] < before[Outcome.EXPIRED] / 2, after
    assert after[Outcome.COMPLETED] > 0.95 * before[Outcome.COMPLETED], (before, after)
    rejected = [record for record in records if record.outcome is Outcome.REJECTED_DEADLINE_UNMEETABLE]
    assert {record.finished_at for record in rejected} == {AT_S}


def test_a_burst_that_can_be_served_is_not_rejected() -> None:
    records = play(requests(60, 100, 10_000.0))
    assert ends(records) == {Outcome.COMPLETED: 60}
