"""How well does a scheduler that only observes forecast what scheduling then does?

Production is simulated twice on the same requests: once every request passes at once to the replica with the
fewest, and once all are scheduled. Beside the first runs the tuner's twin, which begins without a profile and
fits its engines to what it sees. Its last forecast of both ways is held against what either run measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated
from serve_app.command import progress_bar
from serve_app.metrics.first_tokens import first_token_figures
from serve_app.metrics.record import RequestRecord
from serve_app.settings_base import settings
from serve_app.simulation.batch import parallel
from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.workload import Disclosure, TraceChoice, choose_trace, requests_of
from serve_app.tuning import LearnedPartitions
from serve_app.tuning.online.parameter_search import ParameterTuningSettings
from serve_app.tuning.online.rollout_settings import RolloutSettings
from serve_app.tuning.online.tuned_simulation import TunedSimulation, counting_search
from serve_app.workloads.transform import scale_to_rate

_PACE = 2_000.0
_BLOCK_TOKENS = 16


@settings
class ObserveExperiment:
    """What is played.

    Attributes:
        measured: the last requests, of which the figures are.
        replicas: of one pool.
    """

    requests: int
    measured: int
    replicas: int
    profile: str
    trace: str
    rates_per_s: tuple[float, ...]
    seeds: int


@dataclass(frozen=True, slots=True)
class Run:
    """One rate with one seed."""

    experiment: ObserveExperiment
    rate_per_s: float
    seed: int


def play(experiment: ObserveExperiment, context: Context) -> Iterator[Measurement]:
    """Every rate that there is no row of yet."""
    rates = [rate for rate in experiment.rates_per_s if not context.has({"rate_per_s": rate})]
    with progress_bar("observe", len(rates)) as advance:
        for rate in rates:
            runs = [Run(experiment, rate, seed) for seed in range(experiment.seeds)]
            columns = list(parallel(_figures, runs, context.jobs))
            yield Measurement(
                key={"rate_per_s": rate},
                seeds=range(experiment.seeds),
                traces=generated(experiment.trace),
                figures={name: [one[name] for one in columns] for name in columns[0]},
            )
            advance()


def _figures(run: Run) -> dict[str, Any]:
    observing, observed = _production(run, active_share=0.0)
    _, scheduled = _production(run, active_share=1.0)
    forecast = observing.loop.document()["forecast"] or {}
    return {
        "forecast_scheduled": forecast.get("scheduled"),
        "forecast_passed": forecast.get("passed"),
        "note": forecast.get("note"),
        "scheduled": _last(scheduled, run.experiment.measured),
        "passed": _last(observed, run.experiment.measured),
    }


def _production(run: Run, active_share: float) -> tuple[TunedSimulation, Sequence[RequestRecord]]:
    experiment = run.experiment
    fleet = FleetSettings(profile=experiment.profile, replicas={"all": experiment.replicas})
    chosen = TraceChoice(name=experiment.trace, requests=experiment.requests)
    trace = scale_to_rate(choose_trace(chosen, run.seed), run.rate_per_s)
    scheduler = replace(scheduler_settings("ewsjf", fleet.routing, {}), active_share=active_share)
    # The side that is scheduled is not tuned: a forecast is of the values in force.
    tuning = ParameterTuningSettings(rollout=RolloutSettings(mode="on" if active_share < 1 else "off"))
    production = TunedSimulation(
        scheduler,
        fleet.plans(isolated=True),
        tuning,
        counting_search(tuning, _PACE),
        learner=LearnedPartitions().learner(),
    )
    requests = list(requests_of(trace, Disclosure(), _BLOCK_TOKENS))
    return production, sorted(production.run(requests), key=lambda record: record.arrived_at)


def _last(records: Sequence[RequestRecord], count: int) -> dict[str, dict[str, Any]]:
    return first_token_figures(
        (record.prompt_tokens, record.ttft_s) for record in records[-count:] if record.ttft_s is not None
    )


EXPERIMENT = Experiment(settings=ObserveExperiment, play=play)
