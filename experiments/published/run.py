"""Does EWSJF as published do what its paper reports, in the set-up of its paper?

The policy `ewsjf-paper` runs with the published partition (Refine-and-Prune on raw lengths, Eq 3). It runs
again with the values that the paper's meta-optimiser finds for each seed: theta, the reward of Eq 5, one
candidate after another, each on the traffic of different minutes. Other policies run on the same arrivals.

The model is Llama-2-13B on one A100 of 80 GB, and on four, as in the paper.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.rows import Key
from experiments.common.tuned_simulation import CountingPlayer
from experiments.policies.grid import GridCell, PolicyGrid, cells_of, measurement_of, planned, play_grid
from serve_app.core.settings_base import settings
from serve_app.lab.simulation.run import RunSettings, fitted_trace, parallel, run_all, scheduler_settings
from serve_app.tuning import LearnedPartitions, StrategicSettings
from serve_app.tuning.digital_twin import TwinPlan, TwinSettings
from serve_app.tuning.objective import ObjectiveSettings, finite
from serve_app.tuning.search_space import TpeOptimiser, Tunable, Values, space_of
from serve_app.tuning.strategic_loop import PAPER

POLICY, TUNED = "ewsjf-paper", "ewsjf-paper, tuned"
_THETA = ("a_u", "b_u", "a_f", "b_f", "alpha")
# Traffic of the trials: no measured run uses these seeds.
_TRIALS_SEED = 50_000


@settings
class LiveSearch:
    """The paper's loop: one candidate after another on consecutive minutes of traffic, without a comparison.

    Attributes:
        trial_s: seconds of traffic for each candidate.
    """

    trials: int = 6
    trial_s: float = 600.0


@settings
class PublishedExperiment:
    """Settings of the experiment.

    Attributes:
        grid: the policies without a search, including `ewsjf-paper`.
        tuned_loads: loads at which `ewsjf-paper` also runs with its meta-optimiser.
        live: the paper's loop.
    """

    grid: PolicyGrid
    tuned_loads: tuple[float, ...]
    live: LiveSearch


def play(experiment: PublishedExperiment, context: Context) -> Iterator[Measurement]:
    """Measure the grid, and then the tuned policy."""
    yield from play_grid(experiment.grid, context)
    grid = experiment.grid
    cells = [
        cell
        for cell in cells_of(grid)
        if cell.variant == POLICY and cell.load in experiment.tuned_loads and not context.has(_key(cell))
    ]
    for cell, runs in zip(cells, planned(grid, cells, jobs=context.jobs), strict=True):
        found = list(parallel(partial(_searched, experiment.live), runs, context.jobs))
        tuned = [_with_theta(run, theta) for run, theta in zip(runs, found, strict=True)]
        results = list(run_all(tuned, jobs=context.jobs))
        measured = measurement_of(_key(cell), cell.case.trace, results)
        theta = {name: [values[name] for values in found] for name in _THETA}
        yield replace(measured, figures={**measured.figures, **theta})


def _key(cell: GridCell) -> Key:
    return {**cell.key, "policy": TUNED}


def _searched(live: LiveSearch, run: RunSettings) -> Values:
    """Return the best theta after the last trial."""
    tunable = Tunable(
        scheduler=scheduler_settings(run.policy, run.fleet.routing, run.scheduler), refine_and_prune=PAPER
    )
    plan = TwinPlan(
        tunable=tunable,
        space=space_of(tunable, only=_THETA),
        engines=tuple(run.fleet.plans()),
        traffic=fitted_trace(replace(run, seed=_TRIALS_SEED + run.seed)).trace,
        objective=ObjectiveSettings(kind="paper"),
        settings=TwinSettings(seed=_TRIALS_SEED + run.seed),
    )
    return _best_of(live, plan, run.seed)


def _best_of(live: LiveSearch, plan: TwinPlan, seed: int) -> Values:
    """Return the values of the trial with the highest reward; the first trial runs the current values."""
    assert plan.traffic.rate_per_s is not None
    window = max(1, round(live.trial_s * plan.traffic.rate_per_s))
    player = CountingPlayer(
        replace(plan, settings=replace(plan.settings, window_requests=window, warm_up_ratio=0.0))
    )
    optimiser = TpeOptimiser(plan.space, seed=seed)
    optimiser.add(plan.space.current)
    values: Values = plan.space.current
    best = values
    highest = -math.inf
    for trial in range(live.trials):
        if trial:
            values = optimiser.propose()
        reward = finite(player.play(values, trial).reward.value)
        optimiser.tell({trial: reward})
        if reward is not None and reward > highest:
            best, highest = values, reward
    return best


def _with_theta(run: RunSettings, theta: Values) -> RunSettings:
    weights: Mapping[str, object] = {
        f"ewsjf.weights.{name}": value for name, value in theta.items() if name != "alpha"
    }
    partition = replace(PAPER, alpha=theta["alpha"])
    return replace(
        run,
        label=TUNED,
        scheduler={**run.scheduler, **weights},
        partition=LearnedPartitions(StrategicSettings(refine_and_prune=partition)),
    )


EXPERIMENT = Experiment(settings=PublishedExperiment, play=play)
