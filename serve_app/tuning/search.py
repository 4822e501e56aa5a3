"""Search in the twin: presets, and on request the candidates of an optimiser.

A preset is what an operator would try first. Each changes a few values and leaves the others as they are.
Together they cover each tunable mechanism in both directions from the defaults, so a short search also finds
what is far from the current values.
"""

from collections.abc import Mapping
from typing import Literal

from serve_app.core import SchedulerSettings
from serve_app.tuning.digital_twin import TwinPlan
from serve_app.tuning.optimiser import TpeOptimiser
from serve_app.tuning.search_space import SearchSpace, Tunable, Values
from serve_app.tuning.study import Budget, Finding, PlayWindow, StudySettings, run_study

SearchKind = Literal["presets", "tpe"]
"""Candidates of a search: presets, or presets and then those that TPE proposes."""

PRESETS: Mapping[str, Values] = {
    "shallow engine queues": {"target_waiting": 1},
    "deep engine queues": {"target_waiting": 8},
    "few long prefills": {"max_long_prefills": 1, "max_longest_prefills": 1},
    "more long prefills": {"max_long_prefills": 4, "max_longest_prefills": 2},
    "many long prefills": {"max_long_prefills": 8, "max_longest_prefills": 4},
    "fewer short prompts": {"short_work_share": 0.12, "longest_work_share": 0.4},
    "more short prompts": {"short_work_share": 0.45, "longest_work_share": 0.7},
    "tight delay bound": {"wait_ratio": 0.6},
    "loose delay bound": {"wait_ratio": 4.0},
    "shortest first": {"a_u": 0.0, "b_u": 0.01},
    "longest wait first": {"a_u": 1e-3, "b_u": 5.0},
}
"""Changed values by name of the preset."""


def preset_candidates(tunable: Tunable, space: SearchSpace) -> list[Values]:
    """Return the candidates of all presets, and the defaults, without the current values and repetitions.

    Values of parameters that are not in the space are left out.
    """
    scheduler = SchedulerSettings(
        model=tunable.scheduler.model, policy=tunable.scheduler.policy, routing=tunable.scheduler.routing
    )
    defaults = Tunable(scheduler=scheduler)
    changes = [{each.name: defaults.value(each) for each in space}, *PRESETS.values()]
    candidates: list[Values] = []
    for changed in changes:
        known = {name: value for name, value in changed.items() if name in space.names}
        values = space.clipped({**space.current, **known})
        if values != space.current and values not in candidates:
            candidates.append(values)
    return candidates


def search_twin(
    plan: TwinPlan, settings: StudySettings, play: PlayWindow, budget: Budget, kind: SearchKind
) -> Finding:
    """Compare the incumbent of a twin with the candidates of a search."""
    return run_study(
        [plan.space.current, *preset_candidates(plan.tunable, plan.space)],
        settings,
        play,
        budget,
        optimiser=TpeOptimiser(plan.space, seed=plan.settings.seed) if kind == "tpe" else None,
        independent_windows=plan.independent_windows,
    )
