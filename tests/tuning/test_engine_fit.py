"""Step times fitted to simulated engines whose true step times are hidden from the fit."""

import functools
import math
from dataclasses import replace

import msgspec
import pytest

from serve_app.core.metrics.record import RequestRecord
from serve_app.lab.simulation.run import (
    Disclosure,
    FleetSettings,
    choose_trace,
    requests_of,
    scheduler_settings,
)
from serve_app.lab.simulation.simulation import ReplicaPlan, Simulation
from serve_app.lab.workloads import TraceChoice, scale_to_rate
from serve_app.tuning import engine_fit
from serve_app.tuning.engine_fit import EngineFitResult, EngineFitTask, fit_engines, measured_of
from tests.core.metrics.builders import record
from tests.tuning.builders import with_speed

FLEET = FleetSettings(profile="laptop", replicas={"short": 1, "long": 1})
PLANS = tuple(FLEET.plans(isolated=True))


@functools.cache
def served(rate_per_s: float, seed: int, factor: float = 1.0, count: int = 260) -> tuple[RequestRecord, ...]:
    trace = scale_to_rate(choose_trace(TraceChoice(name="paper-mix", requests=count), seed), rate_per_s)
    simulation = Simulation(scheduler_settings("ewsjf", FLEET.routing, {}), with_speed(PLANS, factor))
    return tuple(simulation.run(list(requests_of(trace, Disclosure(), 16))))


def unlike(plans: tuple[ReplicaPlan, ...]) -> tuple[ReplicaPlan, ...]:
    """Return the same engines with very different step times, which must have no influence."""
    return with_speed(plans, 50.0)


@functools.cache
def fitted(factor: float) -> EngineFitResult:
    task = EngineFitTask(records=served(8.0 / factor, 1, factor), plans=unlike(PLANS), until=math.inf)
    return fit_engines(task)


# A fit takes some ten seconds of CPU time. Other tests share the fit of unchanged engines.
@pytest.mark.parametrize("factor", [1.0, pytest.param(6.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rate_per_s", [3.0, 9.0])
def test_a_fit_without_a_profile_predicts_other_requests(
    factor: float, rate_per_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_fit, "_MAX_ERROR_RATIO", math.inf)
    result = fitted(factor)
    assert result.error is None
    assert result.engines is not None
    others = served(rate_per_s / factor, 2, factor)
    task = EngineFitTask(records=others, plans=unlike(PLANS), until=math.inf, current=result.engines)
    error = fit_engines(task).error
    assert error is not None
    assert error.requests > 200
    assert error.max_abs < 0.05


@pytest.mark.slow
def test_a_model_that_fits_stays_and_a_wrong_one_is_reported_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_fit, "_MAX_ERROR_RATIO", 0.06)
    known = fitted(1.0).engines
    assert known is not None
    others = EngineFitTask(records=served(8.0, 3), plans=PLANS, until=math.inf, current=known, is_fitted=True)
    assert fit_engines(others).engines is None
    # Three times as many as elsewhere: the TTFT error of other seeds is 2 %, and up to 10 % with 520.
    slowed = replace(others, records=served(4.0, 3, 2.0, 780))
    result = fit_engines(slowed)
    assert result.error is not None
    assert result.error.tpot_ratio == pytest.approx(-0.5, abs=0.05)
    assert result.engines is not None
    again = fit_engines(replace(slowed, current=result.engines, records=served(4.0, 4, 2.0, 520)))
    assert again.error is not None
    assert again.error.max_abs < 0.06


def test_only_requests_after_the_last_fit_count_for_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_fit, "_MAX_ERROR_RATIO", math.inf)
    known = fitted(1.0).engines
    assert known is not None
    records = served(8.0, 3)
    middle = sorted(each.dispatched_at or 0.0 for each in records)[200]
    task = EngineFitTask(records=records, plans=PLANS, until=math.inf, current=known, fitted_until=middle)
    error = fit_engines(task).error
    assert error is not None
    assert error.requests == sum((each.dispatched_at or 0.0) >= middle for each in records)


def test_requests_of_other_replicas_and_answers_without_a_pace_are_not_measured() -> None:
    foreign = tuple(msgspec.structs.replace(each, replica="gone") for each in served(8.0, 1))
    assert fit_engines(EngineFitTask(records=foreign, plans=PLANS, until=math.inf)).engines is None
    whole = tuple(msgspec.structs.replace(each, first_token_at=None) for each in served(8.0, 1))
    assert fit_engines(EngineFitTask(records=whole, plans=PLANS, until=math.inf)).engines is None


def test_a_request_that_was_never_dispatched_is_no_measurement() -> None:
    assert measured_of(record(dispatched_at=None)) is None
