"""Settings of the experiment: production variants, traffic and tuner."""

from collections.abc import Mapping
from dataclasses import replace

from experiments.common.tuning_starts import BAD_START, DEFAULTS, begun_from
from experiments.tuned_drift.traffic import Halves
from serve_app.core import SchedulerSettings
from serve_app.core.settings_base import settings
from serve_app.lab.simulation.run import ONE_POOL, FleetSettings, scheduler_settings
from serve_app.tuning.settings import ParameterTuningSettings


@settings
class Variant:
    """A production.

    Attributes:
        bad_start: start with `tuning_starts.BAD_START` instead of the defaults.
        tuned: whether the tuner changes the values.
    """

    bad_start: bool = False
    tuned: bool = False

    @property
    def start(self) -> Mapping[str, object]:
        """Return the start values."""
        return BAD_START if self.bad_start else DEFAULTS


@settings
class DriftExperiment:
    """Settings of the experiment.

    Attributes:
        variants: by their names in the table.
        long_shares: share of long requests, in each half of the time.
        load: 1.0 is the rate at which the same replicas finish a backlog of the mix under FCFS.
        minutes: simulated.
        phases: shares of the time between which requests are judged, by name.
        tuning: settings of the tuner; its `profile` is the twin's, which differs from production's if the
            twin is to be wrong.
        pace_requests_per_s: requests that the twin simulates per CPU second.
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
        """Return the simulated duration of a run."""
        return 60.0 * self.minutes

    @property
    def fleet(self) -> FleetSettings:
        """Return a fleet with all replicas in one pool."""
        return FleetSettings(profile=self.profile, replicas={ONE_POOL: self.replicas})

    def scheduler(self, variant: Variant) -> SchedulerSettings:
        """Return a variant's start settings."""
        return begun_from(scheduler_settings(self.policy, self.fleet.routing, {}), variant.start).scheduler

    def tuner(self, variant: Variant) -> ParameterTuningSettings:
        """Return a variant's tuner; with fixed values it tries nothing."""
        if variant.tuned:
            return self.tuning
        return replace(self.tuning, rollout=replace(self.tuning.rollout, mode="off"))
