"""Parity of the tuner beside the live and beside the simulated scheduler.

The live side is the real live scheduler with its tuning endpoint, and the `ParameterTuner` of the actor, on a
loop whose clock jumps. The simulated side is `TunedSimulation`. The searches of both return the same result.
Every scheduling decision is compared with its time, and so are the tuners' audits.
"""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from experiments.common.tuned_simulation import OBSERVATION_INTERVAL_S, TunedSimulation, counting_worker
from serve_app.core.commands import ReportStale
from serve_app.core.decision_log import Decision
from serve_app.lab.simulation.simulation import Phase, SimulatedRequest
from serve_app.serving.tuner import ParameterTuner
from serve_app.tuning.digital_twin import CalibrationSettings
from serve_app.tuning.objective import ObjectiveSettings
from serve_app.tuning.parameter_loop import Result, SearchTask, Work
from serve_app.tuning.rollout import Audit, DecisionKind
from serve_app.tuning.search_space import Values
from serve_app.tuning.settings import ParameterTuningSettings
from serve_app.tuning.study import RolloutSettings
from tests.lab.simulation.builders import mixed_requests
from tests.parity import test_live_and_simulated as untuned
from tests.parity.jumping_loop import run_jumping
from tests.tuning.rewards import found

# Neither ends exactly at an observation, when the order would be undefined.
SEARCH_S = 2.3
PACE_REQUESTS_PER_S = 817.3
TUNING = ParameterTuningSettings(
    profile="laptop",
    every_s=5.0,
    min_requests=60,
    core_share=0.5,
    objective=ObjectiveSettings(min_requests=10),
    # A fit would take longer than the simulated minute.
    calibration=CalibrationSettings(check_requests=1_000_000),
    rollout=RolloutSettings(mode="on", slice_s=5.0, settle_s=1.0, pairs=4, cool_down_s=2.0),
)
SMALL: Values = {"target_waiting": 1, "max_long_prefills": 1}
AWFUL: Values = {
    "a_u": 0.01,
    "b_u": 5.0,
    "max_long_prefills": 8,
    "max_longest_prefills": 8,
    "short_work_share": 0.05,
    "target_waiting": 16,
}


def worker_of(values: Values) -> Callable[[Work], tuple[Result, float]]:
    """Return a worker whose searches find these values; it executes all other work."""
    usual = counting_worker(PACE_REQUESTS_PER_S)

    def worker(work: Work) -> tuple[Result, float]:
        if isinstance(work, SearchTask):
            return found({**work.plan.space.current, **values}), SEARCH_S
        return usual(work)

    return worker


def requests(rate_per_s: float) -> list[SimulatedRequest]:
    count = round(60 * rate_per_s)
    return mixed_requests(count, rate_per_s=rate_per_s, seed=5, timeout_s=untuned.TIMEOUT_S)


class TunedLiveSystem(untuned.LiveSystem):
    """The live system with the tuner that its actor would drive."""

    def __init__(self, rate_per_s: float, values: Values) -> None:
        super().__init__(requests(rate_per_s), "ewsjf")

        carry_out = worker_of(values)

        async def worker(work: Work) -> Result:
            result, seconds = carry_out(work)
            await asyncio.sleep(seconds / TUNING.core_share)
            return result

        self.tuner = ParameterTuner("m", TUNING, worker=worker)
        # Outcomes are collected from the first call on.
        self.live.tuner.observed(outcomes=True)
        self.timeline.schedule(OBSERVATION_INTERVAL_S, Phase.FEEDBACK, self.observe)

    def observe(self) -> None:
        for order in self.tuner.update(self.live.tuner.observed(outcomes=True)):
            self.live.tuner.retune(order)
        if self.timeline.now + OBSERVATION_INTERVAL_S <= self.last_arrival:
            self.timeline.schedule(self.timeline.now + OBSERVATION_INTERVAL_S, Phase.FEEDBACK, self.observe)


def simulated(rate_per_s: float, values: Values) -> tuple[untuned.Decisions, Sequence[Audit]]:
    log: list[Decision] = []
    simulation = TunedSimulation(
        untuned.scheduler_settings("ewsjf"),
        untuned.plans(),
        TUNING,
        worker_of(values),
        settings=untuned.SIMULATION,
        on_decision=log.append,
    )
    simulation.run(requests(rate_per_s))
    return [(step.now, step.commands) for step in log if step.commands], simulation.loop.rollout.audit


@pytest.mark.parametrize(("rate_per_s", "values"), [(11.0, SMALL), (13.0, AWFUL)])
def test_the_tuner_of_a_simulated_production_acts_as_the_live_one(rate_per_s: float, values: Values) -> None:
    expected, audit = simulated(rate_per_s, values)

    async def live() -> tuple[untuned.Decisions, Sequence[Audit]]:
        system = TunedLiveSystem(rate_per_s, values)
        decisions = await system.run()
        assert system.tuner.loop is not None
        return decisions, system.tuner.loop.rollout.audit

    decisions, live_audit = run_jumping(live)
    acts = [each.kind for each in audit]
    assert acts[0] is DecisionKind.STARTED
    assert {DecisionKind.JUDGED, DecisionKind.ROLLED_BACK} < set(acts)
    assert live_audit == audit
    assert decisions == expected[: len(decisions)]
    # The simulation continues until trial values have expired after the last report.
    late = [command for _, commands in expected[len(decisions) :] for command in commands]
    assert all(isinstance(command, ReportStale) for command in late)


def test_values_on_trial_change_what_the_scheduler_decides() -> None:
    (small, _), (awful, _) = simulated(15.0, SMALL), simulated(15.0, AWFUL)
    assert small != awful
