"""What a wrong twin can do to requests, from the twin to a simulated production and back."""

import statistics
from dataclasses import replace

import pytest

from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.workload import TraceChoice, choose_trace
from serve_app.tuning.online.rollout import Rollout
from serve_app.tuning.online.rollout_settings import Act, RolloutSettings
from serve_app.tuning.search.optimiser import make_optimiser
from serve_app.tuning.search.search_space import Values
from serve_app.tuning.search.study import Study, StudySettings
from serve_app.tuning.search.tunable import Tunable, space_of
from serve_app.tuning.twin.digital_twin import DigitalTwin, TwinPlan, TwinSettings, with_speed
from serve_app.workloads.trace import scale_to_rate
from tests.tuning.production import Production

FLEET = FleetSettings(profile="laptop", replicas={"all": 1})
ROLLOUT = RolloutSettings(mode="on", max_step=0.5, slice_s=10.0, settle_s=0.0, pairs=4, cool_down_s=0.0)
STUDY = StudySettings(trials=9, rungs=(1, 3), confirm_windows=4)
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


def recommended(twin: DigitalTwin, around: TwinPlan) -> Values | None:
    study = Study(make_optimiser("tpe", around.space, seed=1), STUDY)
    while study.jobs():
        for job in study.jobs():
            study.tell(job, twin.play(job.values, job.window).reward.value)
    assert study.finding is not None
    best = study.finding.best
    return best.values if best is not None and study.finding.confident else None


def serve(production: Production, twin: DigitalTwin, slices: int) -> tuple[float, int]:
    """Serve so many slices of traffic; mean reward less that of the first incumbent, and slices on trial."""
    rollout, first = production.rollout, dict(production.rollout.incumbent)
    losses, tried = [], 0
    for number in range(slices):
        now = 10.0 * number
        reward = twin.play(production.values, 1_000 + number).reward
        usual = twin.play(first, 1_000 + number).reward
        assert reward.value is not None
        assert usual.value is not None
        losses.append(reward.value - usual.value)
        tried += production.values == rollout.target
        now += 10.0
        production.carry_out(rollout.tick(now), now)
        for part in rollout.to_judge(now, now):
            production.carry_out(rollout.judge(part, reward, now, now), now)
    return statistics.fmean(losses), tried


def test_a_candidate_that_a_wrong_twin_praises_is_taken_back_within_two_pairs() -> None:
    good = plan({})
    rollout = Rollout(good.space, good.space.current, replace(ROLLOUT, max_step=1.0))
    rollout.propose({**good.space.current, **AWFUL}, 0.0, "poisoned")
    production = Production(rollout)
    loss, tried = serve(production, DigitalTwin(good), 12)
    assert [each.act for each in rollout.audit][-1] is Act.ROLLED_BACK
    assert production.values == good.space.current
    assert tried <= 3
    assert loss > -ROLLOUT.margin


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
    candidate = recommended(DigitalTwin(wrong), wrong)
    if candidate is not None:
        rollout.propose(candidate, 0.0, "won in the twin")
    loss, _ = serve(Production(rollout), DigitalTwin(true), 10)
    assert loss > -ROLLOUT.margin
