"""The settings of a tuner, as a file has them, and as its parts take them.

`TunerSettings` is what users set. `ParameterTuningSettings` puts it together with everything that only
experiments and tests change.
"""

from dataclasses import field
from typing import Annotated, Literal

from serve_app.core.metrics.targets import ClassTargets
from serve_app.core.settings_base import (
    ADVANCED,
    FINITE_NOT_NEGATIVE,
    FINITE_POSITIVE,
    INTERNAL,
    POSITIVE_SHARE,
    at_least,
    settings,
)
from serve_app.engines.model.profiles import load_profile
from serve_app.tuning.digital_twin import TwinSettings
from serve_app.tuning.objective import ObjectiveKind, ObjectiveSettings
from serve_app.tuning.refine_and_prune import RefineAndPruneSettings
from serve_app.tuning.rollout import RolloutSettings
from serve_app.tuning.strategic_loop import StrategicSettings
from serve_app.tuning.study import StudySettings
from serve_app.tuning.twin_calibration import CalibrationSettings


@settings
class ParameterTuningSettings:
    """How one model's settings are tuned while it runs.

    Attributes:
        profile: the engine profile that the twin begins with, by name or path; None: it is fitted to what the
            engines do, and nothing is searched for before.
        every_s: seconds between the end of a search and the next one.
        min_requests: seen before a search. For another, half as many are new.
        search_cpu_s: CPU seconds of a search.
        core_share: share of a core that the tuner's work uses.
    """

    profile: str | None = None
    every_s: Annotated[float, FINITE_POSITIVE] = 300.0
    min_requests: Annotated[int, at_least(1)] = 600
    search_cpu_s: Annotated[float, FINITE_POSITIVE] = 40.0
    core_share: Annotated[float, POSITIVE_SHARE] = 0.25
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    twin: TwinSettings = field(default_factory=TwinSettings)
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    study: StudySettings = field(default_factory=StudySettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)


@settings(block="tuner")
class TunerSettings:
    """How one model's scheduler is tuned while it runs.

    Attributes:
        mode: on: length queues are learned, and better values of settings are searched for and tried; advise:
            such values are recorded and not tried; queues: only length queues are learned; off; or auto: on
            when the scheduler's policy learns its queues, off otherwise. A change of the policy in a running
            application does not start a tuner.
        profile: the engine profile that the digital twin begins with, by name or path; null: it is fitted to
            what the engines do, and nothing is searched for before. A wrong profile is fitted as well.
        targets: latency limits by class, of the reward that is tuned for.
    """

    mode: bool | Literal["auto", "advise", "queues"] = "auto"
    profile: str | None = None
    targets: ClassTargets = field(default_factory=ClassTargets)
    # The reward: `slo` counts requests within the targets, `paper` is that of EWSJF, which knows no targets.
    objective: Annotated[ObjectiveKind, ADVANCED] = "slo"
    # Seconds between the end of a search and the next one.
    every_s: Annotated[float, FINITE_POSITIVE, ADVANCED] = 300.0
    # Requests seen before a search: fewer are no sample of the traffic. For another, half as many are new.
    min_requests: Annotated[int, at_least(1), ADVANCED] = 600
    # CPU seconds of a search.
    search_cpu_s: Annotated[float, FINITE_POSITIVE, ADVANCED] = 40.0
    # Share of a core that the tuner's work may use.
    core_share: Annotated[float, POSITIVE_SHARE, ADVANCED] = 0.25
    # Seconds that either side of a trial is in force in turn; the first ten are not judged. Shorter slices
    # meet more similar traffic and lose more of it.
    slice_s: Annotated[float, FINITE_POSITIVE, ADVANCED] = 60.0
    # Pairs of slices in a trial at most; a clear result is decided sooner.
    pairs: Annotated[int, at_least(2).hint("one pair is chance"), ADVANCED] = 12
    # Seconds without trials after one; three times as long after harm.
    cool_down_s: Annotated[float, FINITE_NOT_NEGATIVE, ADVANCED] = 600.0
    # A gap between lengths separates queues when it is wider than so many mean gaps. Lower makes more queues:
    # about 25 at 1, and 3 to 12 at 5.5. Long requests then wait longer and others gain next to nothing.
    alpha: Annotated[float, FINITE_POSITIVE, ADVANCED] = 5.5
    # Prompts from which queues are first learned, and of which a drift of their lengths is noticed.
    learn_from: Annotated[int, at_least(2).hint("500 is usual"), ADVANCED] = 500
    # Seconds between two full runs of Refine-and-Prune while lengths do not drift; ten minutes in the paper.
    learn_every_s: Annotated[float, FINITE_POSITIVE, INTERNAL] = 600.0

    def __post_init__(self) -> None:
        # Raises for a profile that does not exist: better at the start than after ten minutes.
        if self.profile is not None:
            load_profile(self.profile)
        # Raises for settings that contradict each other.
        _ = self.parameters

    @property
    def strategic(self) -> StrategicSettings:
        """How length queues are learned."""
        return StrategicSettings(
            window=self.learn_from,
            interval_s=self.learn_every_s,
            refine_and_prune=RefineAndPruneSettings(alpha=self.alpha),
        )

    @property
    def parameters(self) -> ParameterTuningSettings | None:
        """How values of settings are tuned; None leaves them as they are."""
        if self.mode in ("queues", False):
            return None
        return ParameterTuningSettings(
            profile=self.profile,
            every_s=self.every_s,
            min_requests=self.min_requests,
            search_cpu_s=self.search_cpu_s,
            core_share=self.core_share,
            objective=ObjectiveSettings(kind=self.objective, targets=self.targets),
            rollout=RolloutSettings(
                mode="advise" if self.mode == "advise" else "on",
                slice_s=self.slice_s,
                pairs=self.pairs,
                cool_down_s=self.cool_down_s,
            ),
        )
