"""Settings of a tuner: as users write them, and as its parts receive them.

`TunerSettings` is what users set. `ParameterTuningSettings` combines it with settings that only experiments
and tests change.
"""

from dataclasses import field, fields
from typing import Annotated, Literal

from serve_app.core.metrics.summary import ClassTargets
from serve_app.core.settings_base import (
    ADVANCED,
    FINITE_NOT_NEGATIVE,
    FINITE_POSITIVE,
    INTERNAL,
    POSITIVE_SHARE,
    at_least,
    settings,
)
from serve_app.engines.model.roofline import load_profile
from serve_app.tuning.digital_twin import CalibrationSettings, SearchKind, TwinSettings
from serve_app.tuning.objective import ObjectiveKind, ObjectiveSettings
from serve_app.tuning.strategic_loop import RefineAndPruneSettings, StrategicSettings
from serve_app.tuning.study import RolloutSettings, StudySettings

_BURST_SHARE = 0.25
"""Share of a core that work uses while it runs. A search is then done in a minute, on current traffic."""


@settings(block="tuner")
class _SearchSettings:
    """Settings of both classes, for searches in the twin."""

    # Seconds between the end of a search and the next one.
    every_s: Annotated[float, FINITE_POSITIVE, ADVANCED] = 300.0
    # Requests before the first search, because fewer do not represent the traffic; half as many new ones
    # before each further search.
    min_requests: Annotated[int, at_least(1), ADVANCED] = 600
    # Candidates of a search: a dozen presets, or these and then candidates that TPE proposes until the search
    # has used its CPU time.
    search: Annotated[SearchKind, ADVANCED] = "presets"
    # Maximum CPU seconds per search. Presets need about ten.
    search_cpu_s: Annotated[float, FINITE_POSITIVE, ADVANCED] = 40.0
    # Maximum share of a core that the tuner's work uses in the mean. Work is done at a quarter of a core, and
    # followed by a pause. So a search of ten CPU seconds is at most every 17 minutes.
    core_share: Annotated[float, POSITIVE_SHARE, ADVANCED] = 0.01


@settings
class ParameterTuningSettings(_SearchSettings):
    """Settings for tuning one model's parameters at runtime.

    Attributes:
        profile: initial engine profile of the twin, by name or path; None to fit it to the engines, without
            searches before.
    """

    profile: str | None = None
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    twin: TwinSettings = field(default_factory=TwinSettings)
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    study: StudySettings = field(default_factory=StudySettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)

    @property
    def burst_share(self) -> float:
        """Share of a core that work uses while it runs; afterwards the tuner rests."""
        share: float = max(_BURST_SHARE, self.core_share)
        return share


@settings(block="tuner")
class TunerSettings(_SearchSettings):
    """Settings for tuning one model's scheduler at runtime.

    Attributes:
        mode: on: learn length queues, and search and try better values of settings; advise: record such
            values without trying them; queues: only learn length queues; off; or auto: on if the scheduler's
            policy learns its queues, otherwise off. Changing the policy of a running application does not
            start a tuner.
        profile: initial engine profile of the digital twin, by name or path; null to fit it to the engines,
            without searches before. A wrong profile is fitted as well.
        targets: latency limits by class, for the reward that is optimised.
    """

    mode: bool | Literal["auto", "advise", "queues"] = "auto"
    profile: str | None = None
    targets: ClassTargets = field(default_factory=ClassTargets)
    # Reward: `slo` counts requests within the targets, `paper` is that of EWSJF, which ignores the targets.
    objective: Annotated[ObjectiveKind, ADVANCED] = "slo"
    # Seconds per slice of a trial, in which one side is active; the first ten are not judged. Shorter
    # slices have more similar traffic but exclude a larger share of it.
    slice_s: Annotated[float, FINITE_POSITIVE, ADVANCED] = 60.0
    # Maximum number of slice pairs per trial. A clear result ends the trial earlier.
    pairs: Annotated[int, at_least(2).hint("one pair gives no evidence"), ADVANCED] = 12
    # Seconds without trials after one; three times as long after harm.
    cool_down_s: Annotated[float, FINITE_NOT_NEGATIVE, ADVANCED] = 600.0
    # Width of a gap between lengths that separates queues, in mean gaps. Lower values make more queues: about
    # 25 at 1, and 3 to 12 at 5.5. Long requests then wait longer and others gain next to nothing.
    alpha: Annotated[float, FINITE_POSITIVE, ADVANCED] = 5.5
    # Number of prompts from which queues are first learned. Later the latest four times as many are used.
    learn_from: Annotated[int, at_least(2).hint("typically 500"), ADVANCED] = 500
    # Minimum seconds between two runs of Refine-and-Prune. A run takes 25 ms of CPU time.
    learn_every_s: Annotated[float, FINITE_POSITIVE, INTERNAL] = 60.0

    def __post_init__(self) -> None:
        # Raises for a missing profile at the start instead of after ten minutes.
        if self.profile is not None:
            load_profile(self.profile)
        # Raises for settings that contradict each other.
        _ = self.parameters

    @property
    def first_requests(self) -> int:
        """Number of requests before there is anything to tune."""
        return self.learn_from if self.parameters is None else min(self.learn_from, self.min_requests)

    @property
    def strategic(self) -> StrategicSettings:
        """Settings for learning length queues."""
        return StrategicSettings(
            window=self.learn_from,
            interval_s=self.learn_every_s,
            refine_and_prune=RefineAndPruneSettings(alpha=self.alpha),
        )

    @property
    def parameters(self) -> ParameterTuningSettings | None:
        """Settings for tuning parameters; None if they are not tuned."""
        if self.mode in ("queues", False):
            return None
        return ParameterTuningSettings(
            profile=self.profile,
            **{each.name: getattr(self, each.name) for each in fields(_SearchSettings)},
            objective=ObjectiveSettings(kind=self.objective, targets=self.targets),
            rollout=RolloutSettings(
                mode="advise" if self.mode == "advise" else "on",
                slice_s=self.slice_s,
                pairs=self.pairs,
                cool_down_s=self.cool_down_s,
            ),
        )
