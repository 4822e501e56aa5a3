"""How many replica-seconds does autoscaling save, and at what price?

Two simulated pools get traffic that changes. The production rule scales them. It is compared with Ray Serve's
default policy and two fixed fleets: our rule's peak number of replicas, and the mean number that it paid for.
Engines take half a minute, two or ten minutes to start.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.common.experiment import Context, Experiment, Measurement, over_seeds
from experiments.common.provenance import generated, trace_sources
from experiments.scaling.rules import (
    ScaledFleet,
    ScaledSimulation,
    ScalingRule,
    ServeDefault,
    fixed,
    work_rule,
)
from experiments.scaling.traffic import traffic
from serve_app.cli.command import progress_bar
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import percentile, slo_attainment_ratio
from serve_app.core.scaling import AutoscalingSettings
from serve_app.core.settings_base import settings
from serve_app.errors import Outcome
from serve_app.lab.simulation.run import (
    Disclosure,
    FleetSettings,
    SloByLength,
    parallel,
    requests_of,
    scheduler_settings,
)
from serve_app.lab.simulation.simulation import Simulation, SimulationSettings

REACTING = "work, reacting"
SERVE, PEAK, MEAN = "Serve's default", "fixed, at the peak", "fixed, at the mean"

# Replicas report five times per second; once is enough for decisions once per second, and runs faster.
_SURROUNDINGS = SimulationSettings(report_interval_s=1.0)


@settings
class Scaling:
    """Settings of the experiment.

    Attributes:
        b_short_tokens: the border of the pools.
        span_s: duration of arrivals.
        start_s: start times of an engine.
        target_ongoing_requests: of Serve's default policy.
    """

    profile: str
    b_short_tokens: int
    span_s: float
    seeds: int
    cases: tuple[str, ...]
    start_s: tuple[float, ...]
    max_replicas: int
    downscale_delay_s: float
    target_ongoing_requests: float


@dataclass(frozen=True, slots=True)
class Run:
    """One case with one start time and one seed; all rules get the same requests."""

    experiment: Scaling
    case: str
    start_s: float
    seed: int


def play(experiment: Scaling, context: Context) -> Iterator[Measurement]:
    """Measure every case, start time and rule without a row."""
    pairs = [(case, start_s) for case in experiment.cases for start_s in experiment.start_s]
    with progress_bar("scaling", len(pairs)) as advance:
        for case, start_s in pairs:
            if not context.has({"case": case, "start_s": start_s, "rule": REACTING}):
                runs = [Run(experiment, case, start_s, seed) for seed in range(experiment.seeds)]
                columns = list(parallel(_all_rules, runs, context.jobs))
                yield from (_measurement(experiment, runs[0], rule, columns) for rule in columns[0])
            advance()


def _measurement(
    experiment: Scaling, run: Run, rule: str, columns: Sequence[Mapping[str, dict[str, Any]]]
) -> Measurement:
    is_azure = run.case == "azure"
    return Measurement(
        key={"case": run.case, "start_s": run.start_s, "rule": rule},
        seeds=range(experiment.seeds),
        traces=trace_sources("azure-conv+azure-code") if is_azure else generated(run.case),
        figures=over_seeds([one[rule] for one in columns]),
    )


def _all_rules(run: Run) -> dict[str, dict[str, Any]]:
    experiment = run.experiment
    bounds = AutoscalingSettings(
        min_replicas=1,
        max_replicas=experiment.max_replicas,
        downscale_delay_s=experiment.downscale_delay_s,
    )
    pools = tuple(_kinds(experiment))
    first = dict.fromkeys(pools, 1)
    found = {REACTING: _figures(run, work_rule(pools, bounds), first)}
    serve = ServeDefault(experiment.target_ongoing_requests, bounds, first)
    found[SERVE] = _figures(run, serve, first)
    ours = found[REACTING]
    end_s = ours["end_s"]
    mean = {pool: max(1, round(ours["replica_s"][pool] / end_s)) for pool in pools}
    found[PEAK] = _figures(run, fixed, ours["peak"])
    found[MEAN] = _figures(run, fixed, mean)
    return found


def _figures(run: Run, rule: ScalingRule, first: Mapping[str, int]) -> dict[str, Any]:
    experiment = run.experiment
    fleet = _fleet(experiment)
    trace = traffic(run.case, run.seed, experiment.span_s, short_at=experiment.b_short_tokens)
    simulation = Simulation(scheduler_settings("ewsjf", fleet.routing, {}), [], _SURROUNDINGS)
    scaled = ScaledSimulation(
        simulation,
        ScaledFleet(kinds=_kinds(experiment), first=first, rule=rule, start_s=run.start_s),
    )
    scaled.run(list(requests_of(trace, Disclosure(queue_timeout_s=600.0), 16)))
    records = simulation.records
    short = [one for one in records if one.prompt_tokens < experiment.b_short_tokens]
    long = [one for one in records if one.prompt_tokens >= experiment.b_short_tokens]
    pools = tuple(fleet.replicas)
    return {
        "requests": len(records),
        "not_completed": sum(one.outcome is not Outcome.COMPLETED for one in records),
        "attained": _attained(records, experiment),
        "short_attained": _attained(short, experiment),
        "long_attained": _attained(long, experiment),
        "short_ttft_p99_s": _p99(short),
        "long_ttft_p99_s": _p99(long),
        "replica_s": scaled.replica_seconds(),
        "all_replica_s": sum(scaled.replica_seconds().values()),
        "peak": {pool: max(size.paid for size in scaled.sizes if size.pool == pool) for pool in pools},
        "end_s": simulation.timeline.now,
    }


def _attained(records: Sequence[RequestRecord], experiment: Scaling) -> float | None:
    return slo_attainment_ratio(records, SloByLength(short_at_tokens=experiment.b_short_tokens))


def _p99(records: Sequence[RequestRecord]) -> float | None:
    """Return the P99 of TTFT; a request without a first token counts with its whole time."""
    times = sorted(
        one.ttft_s if one.ttft_s is not None else one.finished_at - one.arrived_at for one in records
    )
    return percentile(times, 99) if times else None


def _fleet(experiment: Scaling) -> FleetSettings:
    return FleetSettings(
        profile=experiment.profile,
        replicas={"short": 1, "long": 1},
        b_short_tokens=experiment.b_short_tokens,
    )


def _kinds(experiment: Scaling) -> dict[str, Any]:
    return {plan.pool: plan for plan in _fleet(experiment).plans(isolated=True)}


EXPERIMENT = Experiment(settings=Scaling, play=play)
