"""What is played: variants of a production, its traffic, and how its tuner is set."""

from collections.abc import Mapping
from dataclasses import replace

from experiments.common.tuning_starts import BAD_START, DEFAULTS, begun_from
from experiments.tuned_drift.traffic import Halves
from serve_app.core import SchedulerSettings
from serve_app.core.settings_base import settings
from serve_app.lab.simulation.fleet import ONE_POOL, FleetSettings
from serve_app.lab.simulation.scheduler_settings import scheduler_settings
from serve_app.tuning.settings import ParameterTuningSettings


@settings
class Variant:
    """A production.

    Attributes:
        bad_start: whether it begins with the values of `tuning_starts.BAD_START`, not with the defaults.
        tuned: whether the tuner changes them.
    """

    bad_start: bool = False
    tuned: bool = False

    @property
    def start(self) -> Mapping[str, object]:
        """The values that it begins with."""
        return BAD_START if self.bad_start else DEFAULTS


@settings
class DriftExperiment:
    """What is played.

    Attributes:
        variants: by the name that they have in the table.
        long_shares: share of long requests, in each half of the time.
        load: 1.0 is the rate at which the same replicas finish a backlog of the mix under FCFS.
        minutes: simulated.
        phases: shares of the time between which requests are judged, by name.
        tuning: how the tuner is set; its `profile` is the twin's, another one than that of production when
            the twin is to be wrong.
        pace_requests_per_s: that the twin plays in a CPU second.
    """

    variants: Mapping[str, Variant]
    long_shares: Halves
    load: float
    minutes: float
    phases: Mapping[str, tuple[float, float]]
    profile: str
    tuning: ParameterTuningSettings
    seeds: int
    replicas: int = 1
    pace_requests_per_s: float = 2_000.0
    policy: str = "ewsjf"

    @property
    def duration_s(self) -> float:
        """Of a run, simulated."""
        return 60.0 * self.minutes

    @property
    def fleet(self) -> FleetSettings:
        """All replicas in one pool."""
        return FleetSettings(profile=self.profile, replicas={ONE_POOL: self.replicas})

    def scheduler(self, variant: Variant) -> SchedulerSettings:
        """What a variant begins with."""
        return begun_from(scheduler_settings(self.policy, self.fleet.routing, {}), variant.start).scheduler

    def tuner(self, variant: Variant) -> ParameterTuningSettings:
        """The tuner of a variant; that of fixed values tries nothing."""
        if variant.tuned:
            return self.tuning
        return replace(self.tuning, rollout=replace(self.tuning.rollout, mode="off"))
