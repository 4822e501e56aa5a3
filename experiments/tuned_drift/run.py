"""What does tuning gain for a running system whose traffic changes half-way, and what does it risk?

The production scheduler runs on simulated engines beside the loop that tunes live schedulers, with its
searches in the twin, its slices, roll-backs and pauses. Time is simulated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.common.experiment import Cell, Context, Experiment, Measurement, play_cells
from experiments.common.provenance import generated
from experiments.common.tuned_simulation import TunedSimulation, counting_worker
from experiments.common.tuning_starts import BAD_START, DEFAULTS, begun_from
from experiments.tuned_drift.traffic import Halves, seconds_of, traffic
from serve_app.core import SchedulerSettings
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import percentile
from serve_app.core.settings_base import settings
from serve_app.lab.simulation.run import (
    ONE_POOL,
    Disclosure,
    FleetSettings,
    fit,
    requests_of,
    scheduler_settings,
)
from serve_app.lab.simulation.simulation import SimulatedRequest
from serve_app.tuning import LearnedPartitions
from serve_app.tuning.objective import reward_of
from serve_app.tuning.parameter_loop import Result, Work
from serve_app.tuning.rollout import Audit, DecisionKind
from serve_app.tuning.settings import ParameterTuningSettings
from serve_app.tuning.study import Finding


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


@dataclass(frozen=True, slots=True)
class Run:
    """One variant with one seed.

    Attributes:
        seconds: of the whole fleet per request, in each half of the time.
    """

    experiment: DriftExperiment
    variant: Variant
    seconds: Halves
    seed: int


def play(experiment: DriftExperiment, context: Context) -> Iterator[Measurement]:
    """Measure every variant without a row; all get the same requests."""
    names = [name for name in experiment.variants if not context.has({"variant": name})]
    if not names:
        return
    seconds = seconds_of(experiment.long_shares, experiment.fleet)
    cells = []
    for name in names:
        runs = [Run(experiment, experiment.variants[name], seconds, seed) for seed in range(experiment.seeds)]
        cells.append(
            Cell(
                key={"variant": name},
                runs=runs,
                seeds=range(experiment.seeds),
                traces=generated("the paper's mix, its shares changing"),
                settings=_settings(runs[0]),
            )
        )
    yield from play_cells("tuned_drift", cells, _figures, context)


def _settings(run: Run) -> dict[str, Any]:
    experiment = run.experiment
    shared = ("profile", "replicas", "load", "minutes", "long_shares", "phases", "pace_requests_per_s")
    return {
        **{name: getattr(experiment, name) for name in shared},
        "seconds": run.seconds,
        "scheduler": asdict(experiment.scheduler(run.variant)),
        "tuning": asdict(experiment.tuner(run.variant)),
    }


def _figures(run: Run) -> dict[str, Any]:
    """Return one run's figures: service of each phase, and the tuner's actions."""
    experiment = run.experiment
    tuning, plans = experiment.tuner(run.variant), experiment.fleet.plans(isolated=True)
    carry_out = counting_worker(experiment.pace_requests_per_s)
    verdicts: list[bool] = []

    def worker(work: Work) -> tuple[Result, float]:
        result, seconds = carry_out(work)
        if isinstance(result, Finding):
            verdicts.append(result.confident)
        return result, seconds

    simulation = TunedSimulation(
        experiment.scheduler(run.variant), plans, tuning, worker, learner=LearnedPartitions().learner()
    )
    records = simulation.run(_requests(run))
    audit = simulation.loop.rollout.audit
    acts = [each.kind for each in audit]
    return {
        "requests": len(records),
        "phases": {
            name: _phase(experiment, records, begin, end) for name, (begin, end) in experiment.phases.items()
        },
        "searches": len(verdicts),
        "without_winner": verdicts.count(False),
        "tried": acts.count(DecisionKind.STARTED),
        "adopted": acts.count(DecisionKind.ADOPTED),
        "rolled_back": acts.count(DecisionKind.ROLLED_BACK),
        "pairs": pairs(audit),
        "last_values": dict(simulation.loop.rollout.incumbent),
    }


def _requests(run: Run) -> list[SimulatedRequest]:
    experiment = run.experiment
    drift = traffic(experiment.long_shares, run.seconds, experiment.load, experiment.duration_s, run.seed)
    plans = experiment.fleet.plans()
    longest = max(plan.engine.max_model_len for plan in plans)
    return list(requests_of(fit(drift, longest).trace, Disclosure(), plans[0].engine.block_size))


def _phase(
    experiment: DriftExperiment, records: Sequence[RequestRecord], begin: float, end: float
) -> dict[str, Any]:
    """Return the service of requests that arrived between two shares of the time."""
    first_s, last_s = begin * experiment.duration_s, end * experiment.duration_s
    arrived = [record for record in records if first_s <= record.arrived_at < last_s]
    objective = experiment.tuning.objective
    ttfts: dict[str, list[float]] = {}
    for record in arrived:
        if record.completed and record.ttft_s is not None and objective.targets.is_attributable(record):
            ttfts.setdefault(objective.targets.class_of(record), []).append(record.ttft_s)
    return {
        "reward": reward_of(arrived, objective).value,
        "classes": {
            name: {"ttft_p50_s": percentile(sorted(each), 50), "ttft_p99_s": percentile(sorted(each), 99)}
            for name, each in ttfts.items()
        },
    }


def pairs(audit: Sequence[Audit]) -> list[float]:
    """Return each pair's difference in reward, candidate less current values."""
    return [each.figures["difference"] for each in audit if each.kind is DecisionKind.JUDGED]


EXPERIMENT = Experiment(settings=DriftExperiment, play=play)
