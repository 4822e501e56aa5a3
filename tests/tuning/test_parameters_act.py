"""Searched parameters all change decisions: a search wastes candidates on an inert one."""

import pytest

from serve_app.lab.simulation.run import (
    ONE_POOL,
    FleetSettings,
    RunSettings,
    TraceChoice,
    fitted_trace,
    scheduler_settings,
)
from serve_app.tuning.digital_twin import DigitalTwin, TwinPlan, TwinSettings
from serve_app.tuning.search_space import Tunable, space_of

# Slightly more than one replica can serve, so that requests queue and are ordered.
RATE_PER_S = 10.0


@pytest.mark.application
def test_each_parameter_of_the_default_policy_acts_within_its_bounds() -> None:
    fleet = FleetSettings(profile="llama2-70b-h100-tp4", replicas={ONE_POOL: 1})
    tunable = Tunable(scheduler=scheduler_settings("ewsjf", fleet.routing, {}))
    trace = TraceChoice(name="paper-mix", requests=600)
    run = RunSettings(policy="ewsjf", fleet=fleet, trace=trace, rate_per_s=RATE_PER_S)
    plan = TwinPlan(
        tunable=tunable,
        space=space_of(tunable),
        engines=tuple(fleet.plans(isolated=True)),
        traffic=fitted_trace(run).trace,
        settings=TwinSettings(window_requests=300),
    )
    twin = DigitalTwin(plan)

    def dispatched(**changes: float) -> list[float | None]:
        return [one.dispatched_at for one in twin.records({**plan.space.current, **changes}, 0)]

    usual = dispatched()
    inert = [
        each.name
        for each in plan.space
        if all(dispatched(**{each.name: bound}) == usual for bound in (each.low, each.high))
    ]
    assert inert == []
