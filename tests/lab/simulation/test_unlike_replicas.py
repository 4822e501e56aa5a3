"""Replicas of one pool that differ in speed, against a choice that knows the speeds."""

import random
from functools import cache
from statistics import mean

import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.routing.prefill_cost import Speeds
from serve_app.engines.model.model import EngineModelSettings
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulatedRequest, Simulation
from tests.lab.simulation.builders import simulated

ENGINE = EngineModelSettings(max_model_len=8_192, kv_tokens=427_000)
SETTINGS = SchedulerSettings(model="m", routing=RoutingSettings(pools=("all",)))
# How many times as long as on the fastest replica a request takes on each.
UNLIKE, LIKE = (1.0, 1.0, 2.0, 2.0), (1.0, 1.0, 1.0, 1.0)


class Blind(Speeds):
    """Takes all replicas for alike."""

    def compare(self, *_: object) -> None:
        return


class Knowing(Blind):
    """Knows the speeds from the start."""

    def are_unlike(self, pool: str) -> bool:
        return True


def steps(slowness: float) -> StepTimeModel:
    """Return the profile of a 70B model on four H100, slowed down."""
    return StepTimeModel(
        decode_base_s=0.0288 * slowness,
        decode_per_sequence_s=0.00034 * slowness,
        prefill_base_s=0.0288 * slowness,
        prefill_per_token_s=0.000107 * slowness,
    )


def requests(rate_per_s: float) -> list[SimulatedRequest]:
    rng, now, made = random.Random(7), 0.0, []
    for number in range(500):
        now += rng.expovariate(rate_per_s)
        prompt_tokens = int(min(6_000, max(16, rng.lognormvariate(5.5, 1.2))))
        output_tokens = int(min(800, max(4, rng.lognormvariate(4.6, 0.8))))
        made.append(simulated(f"r{number}", at=now, prompt_tokens=prompt_tokens, output_tokens=output_tokens))
    return made


@cache
def played(
    slowness: tuple[float, ...], rate_per_s: float, reports_load: bool, speeds: type[Speeds] = Speeds
) -> list[RequestRecord]:
    plans = [
        ReplicaPlan(
            replica_id=f"s{number}",
            pool="all",
            engine=ENGINE,
            step_time=steps(each),
            reports_load=reports_load,
        )
        for number, each in enumerate(slowness)
    ]
    made = Simulation(SETTINGS, plans)
    ledger = made.scheduler.ledger
    ledger.speeds = speeds()
    if speeds is Knowing:
        for state, each in zip(ledger, slowness, strict=True):
            state.speed.ratio = each
    return made.run(requests(rate_per_s))


def mean_e2e_s(records: list[RequestRecord]) -> float:
    measured = records[len(records) // 5 :]
    assert all(record.e2e_s is not None for record in measured)
    return mean(record.e2e_s or 0.0 for record in measured)


@pytest.mark.parametrize("reports_load", [True, False])
@pytest.mark.parametrize(("rate_per_s", "gain"), [(1.0, 0.8), (8.0, 0.9), (20.0, 1.0)])
def test_requests_end_about_as_soon_as_if_the_speeds_were_known(
    rate_per_s: float, gain: float, reports_load: bool
) -> None:
    """Low, middle and high load; `gain` is the largest share of the time without speeds."""
    learned = mean_e2e_s(played(UNLIKE, rate_per_s, reports_load))
    assert learned < 1.05 * mean_e2e_s(played(UNLIKE, rate_per_s, reports_load, Knowing))
    assert learned < gain * mean_e2e_s(played(UNLIKE, rate_per_s, reports_load, Blind))


@pytest.mark.parametrize("reports_load", [True, False])
def test_decisions_for_like_replicas_do_not_depend_on_their_speeds(reports_load: bool) -> None:
    learned, blind = played(LIKE, 20.0, reports_load), played(LIKE, 20.0, reports_load, Blind)
    assert [(record.request_id, record.replica, record.finished_at) for record in learned] == [
        (record.request_id, record.replica, record.finished_at) for record in blind
    ]
