"""Drift: a running system with a tuner, whose traffic changes half-way.

The production scheduler runs on simulated engines beside the loop that tunes live schedulers, with its
searches in the twin, its slices, roll-backs and pauses. Time is simulated.

Traffic is the paper's mix as a Poisson stream whose share of long requests changes half-way at constant load.
The rate follows the mix: a request takes some seconds of the whole fleet, and the load is the busy share of
the time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from operator import call
from typing import Any

from experiments.common.experiment import Cell, Context, Experiment, Measurement, play_cells
from experiments.common.provenance import generated
from experiments.common.tuned_simulation import TunedSimulation, counting_worker
from experiments.tuner.start import Start, TunedFleet
from serve_app.core import SchedulerSettings
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import percentile
from serve_app.core.settings_base import settings
from serve_app.lab.simulation.run import (
    Disclosure,
    FleetSettings,
    fit,
    requests_of,
    saturated_rate_of,
)
from serve_app.lab.simulation.simulation import SimulatedRequest
from serve_app.lab.workloads import LognormalLengths, Trace, TraceRequest, UniformLengths, stream
from serve_app.tuning import LearnedPartitions
from serve_app.tuning.objective import reward_of
from serve_app.tuning.parameter_loop import Result, Work
from serve_app.tuning.rollout import Audit, DecisionKind
from serve_app.tuning.settings import ParameterTuningSettings
from serve_app.tuning.study import Finding

Halves = tuple[float, float]
"""Figures of the first and the second half of the time."""

_SHORT, _LONG = UniformLengths(32, 256), UniformLengths(1_024, 4_096)
_ANSWERS = LognormalLengths(mean=100, cv=0.5, max_tokens=512)
# Number of requests from which the saturated rate of a mix is measured.
_BACKLOG = 4_000


def seconds_of(long_shares: Halves, fleet: FleetSettings) -> Halves:
    """Return the fleet's seconds per request at load 1.0; runs two simulations."""
    before, after = (1 / saturated_rate_of(fleet, _backlog(share)) for share in long_shares)
    return before, after


def traffic(long_shares: Halves, seconds: Halves, load: float, duration_s: float, seed: int) -> Trace:
    """Return the requests of one run."""
    rng = stream(seed, "arrivals and kinds")
    at = 0.0
    arrivals: list[tuple[float, bool]] = []
    while True:
        half = at > duration_s / 2
        at += float(rng.exponential(seconds[half] / load))
        if at >= duration_s:
            return mixed(arrivals, seed)
        arrivals.append((at, bool(rng.random() < long_shares[half])))


def mixed(arrivals: Sequence[tuple[float, bool]], seed: int) -> Trace:
    """Return these arrivals with lengths of the paper's mix, by kind (True is long)."""
    short, long, answers = (
        lengths.sample(len(arrivals), stream(seed, name))
        for lengths, name in ((_SHORT, "short"), (_LONG, "long"), (_ANSWERS, "answers"))
    )
    requests = tuple(
        TraceRequest(
            arrival_s=at,
            prompt_tokens=int((long if is_long else short)[place]),
            output_tokens=int(answers[place]),
        )
        for place, (at, is_long) in enumerate(arrivals)
    )
    return Trace(name="drift", source=f"two kinds of requests, seed {seed}", requests=requests)


def _backlog(share: float) -> Trace:
    rng = stream(0, "backlog")
    return mixed([(float(place), bool(rng.random() < share)) for place in range(_BACKLOG)], 0)


@settings
class Variant:
    """A production.

    Attributes:
        tuned: whether the tuner changes the values.
    """

    start: Start = "good"
    tuned: bool = False


@settings
class DriftSettings(TunedFleet):
    """Settings of the part.

    Attributes:
        variants: by their names in the table.
        long_shares: share of long requests, in each half of the time.
        minutes: simulated.
        phases: shares of the time between which requests are judged, by name.
        tuning: settings of the tuner; its `profile` is the twin's, which differs from production's if the
            twin is to be wrong.
    """

    variants: Mapping[str, Variant]
    long_shares: Halves
    minutes: float
    phases: Mapping[str, tuple[float, float]]
    tuning: ParameterTuningSettings

    @property
    def duration_s(self) -> float:
        """Return the simulated duration of a run."""
        return 60.0 * self.minutes

    def scheduler(self, variant: Variant) -> SchedulerSettings:
        """Return a variant's start settings."""
        return self.tunable(variant.start).scheduler

    def tuner(self, variant: Variant) -> ParameterTuningSettings:
        """Return a variant's tuner; with fixed values it tries nothing."""
        if variant.tuned:
            return self.tuning
        return replace(self.tuning, rollout=replace(self.tuning.rollout, mode="off"))


def play(experiment: DriftSettings, context: Context) -> Iterator[Measurement]:
    """Measure every variant without a row; all get the same requests."""
    names = [name for name in experiment.variants if not context.has({"variant": name})]
    if not names:
        return
    seconds = seconds_of(experiment.long_shares, experiment.fleet)
    seeds = range(experiment.seeds)
    cells = [
        Cell(
            key={"variant": name},
            runs=[partial(_figures, experiment, experiment.variants[name], seconds, seed) for seed in seeds],
            seeds=seeds,
            traces=generated("the paper's mix, its shares changing"),
            settings=_settings(experiment, experiment.variants[name], seconds),
        )
        for name in names
    ]
    yield from play_cells("drift", cells, call, context)


def _settings(experiment: DriftSettings, variant: Variant, seconds: Halves) -> dict[str, Any]:
    shared = ("profile", "replicas", "load", "minutes", "long_shares", "phases", "pace_requests_per_s")
    return {
        **{name: getattr(experiment, name) for name in shared},
        "seconds": seconds,
        "scheduler": asdict(experiment.scheduler(variant)),
        "tuning": asdict(experiment.tuner(variant)),
    }


def _figures(experiment: DriftSettings, variant: Variant, seconds: Halves, seed: int) -> dict[str, Any]:
    """Return one run's figures: service of each phase, and the tuner's actions."""
    tuning, plans = experiment.tuner(variant), experiment.fleet.plans(isolated=True)
    carry_out = counting_worker(experiment.pace_requests_per_s)
    verdicts: list[bool] = []

    def worker(work: Work) -> tuple[Result, float]:
        result, seconds = carry_out(work)
        if isinstance(result, Finding):
            verdicts.append(result.confident)
        return result, seconds

    simulation = TunedSimulation(
        experiment.scheduler(variant), plans, tuning, worker, learner=LearnedPartitions().learner()
    )
    records = simulation.run(_requests(experiment, seconds, seed))
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


def _requests(experiment: DriftSettings, seconds: Halves, seed: int) -> list[SimulatedRequest]:
    drift = traffic(experiment.long_shares, seconds, experiment.load, experiment.duration_s, seed)
    plans = experiment.fleet.plans()
    longest = max(plan.engine.max_model_len for plan in plans)
    return list(requests_of(fit(drift, longest).trace, Disclosure(), plans[0].engine.block_size))


def _phase(
    experiment: DriftSettings, records: Sequence[RequestRecord], begin: float, end: float
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


EXPERIMENT = Experiment(settings=DriftSettings, play=play)
