"""A search for better values beside a running scheduler, on the twin of its engines, at a share of a core."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from serve_app.engine_model.profiles import load_profile
from serve_app.settings_base import ADVANCED, FINITE_POSITIVE, POSITIVE_SHARE, at_least, settings
from serve_app.tuning.objective.objective import ObjectiveSettings
from serve_app.tuning.online.replay import ReplayResult, ReplayTask, replay
from serve_app.tuning.online.rollout_settings import RolloutSettings
from serve_app.tuning.online.twin_calibration import CalibrationSettings
from serve_app.tuning.search.optimiser import make_optimiser
from serve_app.tuning.search.study import Finding, Study, StudySettings
from serve_app.tuning.search.study_run import Budget, WindowPlayer, run_study
from serve_app.tuning.twin.digital_twin import TwinPlan, TwinSettings
from serve_app.tuning.twin.engine_fit import EngineFitResult, EngineFitTask, fit_engines
from serve_app.tuning.twin.forecast import ForecastResult, ForecastTask, forecast
from serve_app.tuning.twin.processes import TwinProcesses


@settings(block="parameters")
class ParameterTuningSettings:
    """How one model's settings are tuned while it runs.

    Attributes:
        profile: the engine profile that the twin begins with, by name or path; None: it is fitted to what the
            engines do, and nothing is searched for before. A profile that is wrong is fitted likewise.
        rollout: its `mode` says whether a winner is tried (`on`), recorded (`advise`) or ignored (`off`).
    """

    profile: str | None = None
    # Seconds between the end of a search and the next one.
    every_s: Annotated[float, FINITE_POSITIVE, ADVANCED] = 300.0
    # Requests seen before a search: fewer are no sample of the traffic. For another, half as many are new.
    min_requests: Annotated[int, at_least(1), ADVANCED] = 600
    # CPU seconds of a search, and the share of a core that it uses meanwhile.
    search_cpu_s: Annotated[float, FINITE_POSITIVE, ADVANCED] = 40.0
    # See `search_cpu_s`.
    core_share: Annotated[float, POSITIVE_SHARE, ADVANCED] = 0.25
    # `tpe` proposes by what earlier candidates achieved, `random` draws them independently.
    search: Annotated[Literal["tpe", "random"], ADVANCED] = "tpe"
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    twin: Annotated[TwinSettings, ADVANCED] = field(default_factory=TwinSettings)
    calibration: Annotated[CalibrationSettings, ADVANCED] = field(default_factory=CalibrationSettings)
    study: Annotated[StudySettings, ADVANCED] = field(default_factory=StudySettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)

    def __post_init__(self) -> None:
        # Raises for a profile that does not exist: better at the start than after ten minutes.
        if self.profile is not None:
            load_profile(self.profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTask:
    """A search to carry out.

    Attributes:
        plan: the twin.
    """

    plan: TwinPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Attributes:
        seconds: duration of the study, on the clock of its budget.
    """

    finding: Finding
    seconds: float


class StoppedError(Exception):
    """The tuner was stopped, and its search with it."""


def search(
    task: SearchTask,
    settings: ParameterTuningSettings,
    budget: Budget,
    wrap: Callable[[WindowPlayer], WindowPlayer] = lambda player: player,
) -> SearchResult:
    """Carry out a whole study in this thread.

    Args:
        wrap: puts an observer around the twin.
    """
    plan = task.plan
    optimiser = make_optimiser(settings.search, plan.space, seed=plan.settings.seed)
    study = Study(optimiser, settings.study, independent_windows=plan.independent_windows)
    with TwinProcesses(plan) as twin:
        course = run_study(study, settings.study, wrap(twin), budget)
    assert study.finding is not None
    return SearchResult(finding=study.finding, seconds=course.seconds)


def throttled_search(
    task: SearchTask, settings: ParameterTuningSettings, stop: threading.Event
) -> SearchResult:
    """Carry out a search in this thread, at its share of a core.

    Raises:
        StoppedError: `stop` was set meanwhile.
    """
    rest = _throttle(settings.core_share, stop)
    return search(task, settings, Budget(clock=time.thread_time, seconds=settings.search_cpu_s, rest=rest))


def throttled_replay(
    task: ReplayTask, settings: ParameterTuningSettings, stop: threading.Event
) -> ReplayResult:
    """Carry out a replay in this thread, at its share of a core.

    Raises:
        StoppedError: `stop` was set meanwhile.
    """
    return replay(task, _throttle(settings.core_share, stop))


def throttled_fit(
    task: EngineFitTask, settings: ParameterTuningSettings, stop: threading.Event
) -> EngineFitResult:
    """Carry out a check or a fit of the twin's engines in this thread, at its share of a core.

    Raises:
        StoppedError: `stop` was set meanwhile.
    """
    return fit_engines(task, _throttle(settings.core_share, stop))


def throttled_forecast(
    task: ForecastTask, settings: ParameterTuningSettings, stop: threading.Event
) -> ForecastResult:
    """Make a forecast in this thread, at its share of a core.

    Raises:
        StoppedError: `stop` was set meanwhile.
    """
    return forecast(task, _throttle(settings.core_share, stop))


def _throttle(core_share: float, stop: threading.Event) -> Callable[[], None]:
    """A function to call now and then: it waits so that this thread uses no more than its share of a core."""
    worked_s = time.thread_time()

    def rest() -> None:
        nonlocal worked_s
        if stop.wait((time.thread_time() - worked_s) * (1 / core_share - 1)):
            raise StoppedError
        worked_s = time.thread_time()

    return rest
