"""The pace of engines, measured in simulated productions whose engines are known."""

from dataclasses import replace
from functools import lru_cache

import pytest

from serve_app.engine_model.profiles import load_profile
from serve_app.metrics.record import RequestRecord
from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import Simulation
from serve_app.simulation.workload import Disclosure, TraceChoice, choose_trace, requests_of
from serve_app.tuning.twin.digital_twin import with_speed
from serve_app.tuning.twin.engine_pace import engine_pace
from serve_app.workloads.transform import scale_to_rate
from tests.metrics.builders import record

FLEET = FleetSettings(profile="laptop", replicas={"all": 2})
PLANS = tuple(FLEET.plans(isolated=True))


@lru_cache(maxsize=8)
def served(rate_per_s: float, factor: float) -> tuple[RequestRecord, ...]:
    """A production whose engines take so much longer than the profile says."""
    trace = scale_to_rate(choose_trace(TraceChoice(name="paper-mix", requests=700), 3), rate_per_s)
    simulation = Simulation(scheduler_settings("ewsjf", FLEET.routing, {}), with_speed(PLANS, factor))
    return tuple(simulation.run(list(requests_of(trace, Disclosure(), 16))))


@pytest.mark.parametrize("rate_per_s", [30.0, 300.0])
@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_the_pace_of_engines_is_found_whatever_waits_for_them(rate_per_s: float, factor: float) -> None:
    assert engine_pace(served(rate_per_s, factor), PLANS) == pytest.approx(factor, rel=0.06)


def test_engines_beyond_all_measure_are_at_the_bound() -> None:
    assert engine_pace(served(30.0, 10.0), PLANS) == 4.0


def test_requests_that_are_still_open_do_not_distort_the_pace() -> None:
    whole = served(30.0, 2.0)
    now = sorted(one.arrived_at for one in whole)[500]
    known = [one for one in whole if one.finished_at <= now]
    settled = min(one.arrived_at for one in whole if one.finished_at > now)
    arrived = [one for one in known if one.arrived_at < settled]
    assert engine_pace(arrived, PLANS, settled) == pytest.approx(2.0, rel=0.06)


def test_requests_of_other_replicas_tell_nothing() -> None:
    foreign = [replace(one, replica="gone") for one in served(30.0, 1.0)]
    assert engine_pace(foreign, PLANS) is None
    halved = [one for one in served(30.0, 2.0) if one.replica == PLANS[0].replica_id]
    assert engine_pace(halved + foreign, PLANS) == pytest.approx(2.0, rel=0.06)


def test_answers_of_one_token_have_no_pace() -> None:
    assert engine_pace([record(output_tokens=1, replica=PLANS[0].replica_id)], PLANS) is None
    assert engine_pace([], PLANS) is None


def test_a_request_that_the_profile_could_not_hold_is_left_out() -> None:
    beyond = load_profile("laptop").max_model_len + 1
    long = replace(served(30.0, 1.0)[0], request_id="long", prompt_tokens=beyond)
    assert engine_pace([long], PLANS) is None
