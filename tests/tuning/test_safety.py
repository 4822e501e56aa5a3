"""Harm that a wrong twin can do to requests, from the twin to a simulated production and back."""

import statistics
from dataclasses import replace

import pytest

from serve_app.lab.simulation.run import FleetSettings, choose_trace, scheduler_settings
from serve_app.lab.workloads import TraceChoice, scale_to_rate
from serve_app.tuning.digital_twin import DigitalTwin, TwinPlan, TwinSettings, search_twin
from serve_app.tuning.objective import Reward
from serve_app.tuning.rollout import DecisionKind, Rollout
from serve_app.tuning.search_space import Tunable, Values, space_of
from serve_app.tuning.study import Budget, RolloutSettings, StudySettings
from tests.tuning.builders import with_speed
from tests.tuning.production import Production

FLEET = FleetSettings(profile="laptop", replicas={"all": 1})
ROLLOUT = RolloutSettings(mode="on", slice_s=10.0, settle_s=0.0, pairs=6, cool_down_s=0.0)
# In reward, over all slices, half of which run the candidate.
MARGIN = 0.05
STUDY = StudySettings(search_windows=3, confirm_windows=4)
AWFUL = {"target_waiting": 16, "max_long_prefills": 8, "short_work_share": 0.6}


def plan(start: Values) -> TwinPlan:
    scheduler = scheduler_settings("ewsjf", FLEET.routing, {})
    tunable = Tunable(scheduler=scheduler)
    names = ("b_u", "max_long_prefills", "short_work_share", "target_waiting")
    space = space_of(tunable, only=names)
    tunable = tunable.with_values({**space.current, **start}, space)
    traffic = choose_trace(TraceChoice(name="paper-mix", requests=400), 0)
    return TwinPlan(
        tunable=tunable,
        space=space_of(tunable, only=names),
        engines=tuple(FLEET.plans(isolated=True)),
        traffic=scale_to_rate(traffic, 45.0),
        settings=TwinSettings(window_requests=80, block_requests=40),
    )


def recommended(around: TwinPlan) -> Values | None:
    twin = DigitalTwin(around)
    finding = search_twin(around, STUDY, twin.play, Budget(clock=lambda: 0.0), "presets")
    return finding.best if finding.confident else None


def serve(production: Production, twin: DigitalTwin, slices: int) -> tuple[float, int]:
    """Serve this many slices; return the mean reward gain over the first incumbent, and slices on trial."""
    rollout, first = production.rollout, dict(production.rollout.incumbent)
    losses, tried, served = [], 0, list[Reward]()
    for number in range(slices):
        now = 10.0 * number
        production.execute(rollout.tick(now, now, lambda start, _: served[round(start / 10.0)]), now)
        reward, usual = (twin.play(values, 1_000 + number).reward for values in (production.values, first))
        served.append(reward)
        assert reward.value is not None
        assert usual.value is not None
        losses.append(reward.value - usual.value)
        tried += production.values == rollout.target
    return statistics.fmean(losses), tried


def test_a_candidate_that_a_wrong_twin_praises_is_taken_back() -> None:
    good = plan({})
    rollout = Rollout(good.space, good.space.current, ROLLOUT)
    rollout.propose({**good.space.current, **AWFUL}, 0.0, "poisoned")
    production = Production(rollout)
    loss, tried = serve(production, DigitalTwin(good), 16)
    assert [each.kind for each in rollout.audit][-1] is DecisionKind.ROLLED_BACK
    assert production.values == good.space.current
    assert tried <= ROLLOUT.pairs
    assert loss > -MARGIN


@pytest.mark.parametrize(
    ("start", "factor"),
    [
        (AWFUL, 2.0),
        pytest.param(AWFUL, 0.5, marks=pytest.mark.slow),
        pytest.param({}, 0.5, marks=pytest.mark.slow),
        pytest.param({}, 2.0, marks=pytest.mark.slow),
    ],
)
def test_a_twin_that_is_wrong_by_two_in_speed_leaves_production_within_the_margin(
    start: Values, factor: float
) -> None:
    true = plan(start)
    wrong = replace(true, engines=with_speed(true.engines, factor))
    rollout = Rollout(true.space, true.space.current, ROLLOUT)
    candidate = recommended(wrong)
    if candidate is not None:
        rollout.propose(candidate, 0.0, "won in the twin")
    loss, _ = serve(Production(rollout), DigitalTwin(true), 10)
    assert loss > -MARGIN
