"""Simulated production with its tuner; `tests/parity` compares it with the live one."""

import pytest

from experiments.common.tuned_simulation import TunedSimulation, counting_worker
from serve_app.core.decision_log import Decision
from serve_app.core.events import Retuned
from serve_app.lab.simulation.run import (
    Disclosure,
    FleetSettings,
    TraceChoice,
    choose_trace,
    requests_of,
    scheduler_settings,
)
from serve_app.lab.simulation.simulation import SimulatedRequest
from serve_app.lab.workloads import scale_to_rate
from serve_app.tuning.digital_twin import TwinSettings
from serve_app.tuning.objective import ObjectiveSettings
from serve_app.tuning.parameter_loop import Result, SearchTask, Work
from serve_app.tuning.rollout import DecisionKind, RolloutSettings
from serve_app.tuning.search_space import Values
from serve_app.tuning.settings import ParameterTuningSettings
from serve_app.tuning.study import StudySettings
from tests.tuning.rewards import found

FLEET = FleetSettings(profile="laptop", replicas={"all": 1})
RATE_PER_S = 20.0
TUNING = ParameterTuningSettings(
    profile="laptop",
    every_s=5.0,
    min_requests=100,
    search_cpu_s=1.0,
    core_share=0.5,
    objective=ObjectiveSettings(min_requests=10),
    twin=TwinSettings(window_requests=40, block_requests=20, learned_requests=20),
    study=StudySettings(search_windows=1, confirm_windows=4),
    rollout=RolloutSettings(mode="on", slice_s=8.0, settle_s=2.0, pairs=2, cool_down_s=0.0),
)


def requests(seconds: float) -> list[SimulatedRequest]:
    count = round(seconds * RATE_PER_S)
    trace = scale_to_rate(choose_trace(TraceChoice(name="paper-mix", requests=count), 0), RATE_PER_S)
    return list(requests_of(trace, Disclosure(), 16))


def production(
    tuning: ParameterTuningSettings = TUNING,
    *,
    certain: Values | None = None,
    seen: list[Decision] | None = None,
) -> TunedSimulation:
    """Return a production whose searches find these values, if any are given."""
    usual = counting_worker(1_000.0)

    def worker(work: Work) -> tuple[Result, float]:
        if certain is not None and isinstance(work, SearchTask):
            return found({**work.plan.space.current, **certain}), 1.0
        return usual(work)

    scheduler = scheduler_settings("ewsjf", FLEET.routing, {})
    return TunedSimulation(
        scheduler,
        FLEET.plans(isolated=True),
        tuning,
        worker,
        on_decision=None if seen is None else seen.append,
    )


@pytest.mark.application
def test_the_same_run_has_the_same_result() -> None:
    first, second = production(), production()
    assert first.run(requests(40)) == second.run(requests(40))
    assert first.loop.rollout.audit == second.loop.rollout.audit
    assert len(first.loop.document()["studies"]) >= 2
    # The engines match the profile, so it stays.
    error = first.loop.calibration.error
    assert error is not None
    assert error.max_abs < 0.03


def test_values_on_trial_expire_when_no_order_follows() -> None:
    seen: list[Decision] = []
    made = production(certain={"target_waiting": 5}, seen=seen)
    # The tuner ends with the last arrival, in the middle of the candidate's first slice.
    made.run(requests(19))
    retuned = [
        (each.now, each.event.settings.backpressure.target_waiting)
        for each in seen
        if isinstance(each.event, Retuned)
    ]
    assert made.loop.rollout.audit[0].kind is DecisionKind.STARTED
    (begun, tried), (ended, back) = retuned
    assert (tried, back) == (5, 3)
    assert ended - begun == pytest.approx(1.5 * 8.0)
