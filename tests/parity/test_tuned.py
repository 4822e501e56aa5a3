"""The tuner beside the live scheduler and the one beside the simulated scheduler do the same.

The live side is the real live scheduler with its tuning endpoint, and the real `ParameterTuner` that the
actor drives, on a loop whose clock jumps. The simulated side is `TunedSimulation`. The searches of both give
the same finding. What is compared is every decision of the schedulers with its time, and the tuners' audits.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from serve_app.scheduling.commands import ReportStale
from serve_app.scheduling.decision_log import Decision
from serve_app.serving.tuner.parameter_tuner import ParameterTuner
from serve_app.simulation.simulation import Rank, SimulatedRequest
from serve_app.tuning.objective.objective import ObjectiveSettings
from serve_app.tuning.online.parameter_search import ParameterTuningSettings, SearchResult, SearchTask
from serve_app.tuning.online.replay import ReplayResult, ReplayTask
from serve_app.tuning.online.rollout_settings import Act, Audit, RolloutSettings
from serve_app.tuning.online.tuned_simulation import (
    OBSERVATION_INTERVAL_S,
    TunedSimulation,
    counting_fit,
    counting_replay,
)
from serve_app.tuning.search.search_space import Values
from serve_app.tuning.twin.engine_fit import EngineFitResult, EngineFitTask
from tests.parity import test_live_and_simulated as untuned
from tests.parity.jumping_loop import run_jumping
from tests.simulation.builders import mixed_requests
from tests.tuning.rewards import search_result

# Neither ends at the very moment of an observation, when either may come first.
SEARCH_S = 2.3
PACE_REQUESTS_PER_S = 817.3
TUNING = ParameterTuningSettings(
    profile="laptop",
    every_s=5.0,
    min_requests=60,
    core_share=0.5,
    objective=ObjectiveSettings(min_requests=10),
    # Adopts whatever looks better: what matters here is that both sides do.
    rollout=RolloutSettings(
        mode="on",
        slice_s=5.0,
        settle_s=1.0,
        pairs=2,
        max_step=1.0,
        false_adoption=1.0,
        cool_down_s=4.0,
        failure_cool_down_s=4.0,
    ),
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


def found(values: Values, task: SearchTask) -> SearchResult:
    """A finding that was confident of these values, whatever the traffic."""
    return search_result({**task.plan.space.current, **values}, seconds=SEARCH_S)


def requests(rate_per_s: float) -> list[SimulatedRequest]:
    count = round(60 * rate_per_s)
    return mixed_requests(count, rate_per_s=rate_per_s, seed=5, timeout_s=untuned.TIMEOUT_S)


class TunedLiveSystem(untuned.LiveSystem):
    """The live system with the tuner that its actor would drive."""

    def __init__(self, rate_per_s: float, values: Values) -> None:
        super().__init__(requests(rate_per_s), "ewsjf")

        async def searcher(task: SearchTask) -> SearchResult:
            result = found(values, task)
            await asyncio.sleep(result.seconds / TUNING.core_share)
            return result

        async def replayer(task: ReplayTask) -> ReplayResult:
            result = counting_replay(PACE_REQUESTS_PER_S)(task)
            await asyncio.sleep(result.seconds / TUNING.core_share)
            return result

        async def fitter(task: EngineFitTask) -> EngineFitResult:
            result = counting_fit(PACE_REQUESTS_PER_S)(task)
            await asyncio.sleep(result.seconds / TUNING.core_share)
            return result

        self.tuner = ParameterTuner("m", TUNING, searcher=searcher, replayer=replayer, fitter=fitter)
        # Outcomes are collected from the first call on.
        self.live.tuner.observed(outcomes=True)
        self.timeline.at(OBSERVATION_INTERVAL_S, Rank.FEEDBACK, self.observe)

    def observe(self) -> None:
        for order in self.tuner.update(self.live.tuner.observed(outcomes=True)):
            self.live.tuner.retune(order)
        if self.timeline.now + OBSERVATION_INTERVAL_S <= self.last_arrival:
            self.timeline.at(self.timeline.now + OBSERVATION_INTERVAL_S, Rank.FEEDBACK, self.observe)


def simulated(rate_per_s: float, values: Values) -> tuple[untuned.Decisions, Sequence[Audit]]:
    log: list[Decision] = []
    simulation = TunedSimulation(
        untuned.scheduler_settings("ewsjf"),
        untuned.plans(),
        TUNING,
        partial(found, values),
        settings=untuned.SIMULATION,
        on_decision=log.append,
        replayer=counting_replay(PACE_REQUESTS_PER_S),
        fitter=counting_fit(PACE_REQUESTS_PER_S),
    )
    simulation.run(requests(rate_per_s))
    return [(step.now, step.commands) for step in log if step.commands], simulation.loop.rollout.audit


@pytest.mark.parametrize(
    ("rate_per_s", "values", "verdict"), [(11.0, SMALL, Act.ADOPTED), (13.0, AWFUL, Act.ROLLED_BACK)]
)
def test_the_tuner_of_a_simulated_production_does_what_the_live_one_does(
    rate_per_s: float, values: Values, verdict: Act
) -> None:
    expected, audit = simulated(rate_per_s, values)

    async def live() -> tuple[untuned.Decisions, Sequence[Audit]]:
        system = TunedLiveSystem(rate_per_s, values)
        decisions = await system.run()
        assert system.tuner._loop is not None
        return decisions, system.tuner._loop.rollout.audit

    decisions, live_audit = run_jumping(live)
    acts = [each.act for each in audit]
    assert verdict in acts, acts
    assert any("uncleared_difference" in each.figures for each in audit)
    assert live_audit == audit
    assert decisions == expected[: len(decisions)]
    # The simulation goes on until values on trial have expired, when replicas have not reported for a while.
    late = [command for _, commands in expected[len(decisions) :] for command in commands]
    assert all(isinstance(command, ReportStale) for command in late)


def test_values_on_trial_change_what_the_scheduler_decides() -> None:
    (small, _), (awful, _) = simulated(15.0, SMALL), simulated(15.0, AWFUL)
    assert small != awful
