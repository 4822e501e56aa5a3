"""What is played: variants of a production, its traffic, and how its tuner is set."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from experiments.common.drifting_mix import MixPoints
from experiments.common.tuning_starts import BAD_START, DEFAULTS, begun_from
from serve_app.core import SchedulerSettings
from serve_app.core.settings_base import settings
from serve_app.lab.simulation.fleet import ONE_POOL, FleetSettings
from serve_app.lab.simulation.scheduler_settings import scheduler_settings
from serve_app.lab.workloads.generators import LognormalLengths, UniformLengths, stream
from serve_app.tuning.settings import ParameterTuningSettings

_SHORT, _LONG = UniformLengths(32, 256), UniformLengths(1_024, 4_096)
_ANSWERS = LognormalLengths(mean=100, cv=0.5, max_tokens=512)


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
        long_shares: share of long requests over time.
        load: 1.0 is the rate at which the same replicas finish a backlog of the mix under FCFS.
        minutes: simulated.
        phases: shares of the time between which requests are judged, by name.
        tuning: how the tuner is set; its `profile` is the twin's, another one than that of production when
            the twin is to be wrong.
        pace_requests_per_s: that the twin plays in a CPU second.
    """

    variants: Mapping[str, Variant]
    long_shares: MixPoints
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


def mixed_lengths(kinds: Sequence[bool], seed: int) -> Iterator[tuple[int, int]]:
    """Prompt and output tokens of the paper's mix, each of its kind (True is long)."""
    short, long = (
        lengths.sample(len(kinds), stream(seed, name))
        for lengths, name in ((_SHORT, "short"), (_LONG, "long"))
    )
    answers = _ANSWERS.sample(len(kinds), stream(seed, "answers"))
    for place, is_long in enumerate(kinds):
        yield int((long if is_long else short)[place]), int(answers[place])
