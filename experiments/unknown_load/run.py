"""How well is an engine served whose load nobody can see?

One engine is simulated with its metrics, and without: then a limit of requests in flight decides what it is
sent. Ours moves with the latency of answers. Beside it: two others that do, and fixed limits that are too low
and too high. In some cases the engine becomes slower or faster in the middle.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated
from experiments.unknown_load.limiters import FixedLimit, Gradient2Limit, VegasLimit
from serve_app.command import progress_bar
from serve_app.metrics.summary import SummaryRules, summarise
from serve_app.routing.observed.concurrency import ConcurrencyLimit, InFlightLimit
from serve_app.scheduling.events import ReplicaJoined
from serve_app.settings_base import settings
from serve_app.simulation.batch import parallel
from serve_app.simulation.fleet import ONE_POOL, EngineChanges, FleetSettings
from serve_app.simulation.load import saturated_rate_per_s
from serve_app.simulation.run import SloByLength
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import SimulatedRequest, Simulation
from serve_app.simulation.timeline import Rank
from serve_app.simulation.workload import Disclosure, TraceChoice, choose_trace, requests_of
from serve_app.workloads.transform import scale_to_rate

_WARM_UP_RATIO = 0.1
METRICS = "with its metrics"
LIMITS: Mapping[str, Callable[[], InFlightLimit]] = {
    "ours": ConcurrencyLimit,
    "gradient2": Gradient2Limit,
    "vegas": VegasLimit,
    "fixed 8": partial(FixedLimit, 8),
    "fixed 256": partial(FixedLimit, 256),
}


@settings
class EngineCase:
    """An engine and its traffic.

    Attributes:
        max_num_seqs: the size of its batch, which it does not tell.
        load: share of the rate that saturates it at its first speed.
        slower: its steps take so many times as long from the middle of the run on.
        streamed: whether answers are streamed.
    """

    name: str
    max_num_seqs: int
    load: float
    requests: int
    slower: float = 1.0
    streamed: bool = True


@settings
class UnknownLoad:
    """What is played."""

    profile: str
    trace: str
    seeds: int
    cases: tuple[EngineCase, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One case with one seed."""

    experiment: UnknownLoad
    case: EngineCase
    seed: int


def play(experiment: UnknownLoad, context: Context) -> Iterator[Measurement]:
    """Every case and limit that there is no row of yet; all limits meet the same requests."""
    with progress_bar("unknown_load", len(experiment.cases)) as advance:
        for case in experiment.cases:
            runs = [Run(experiment, case, seed) for seed in range(experiment.seeds)]
            if any(not context.has({"case": case.name, "limit": limit}) for limit in (METRICS, *LIMITS)):
                columns = list(parallel(_all_limits, runs, context.jobs))
                yield from (_measurement(experiment, case, limit, columns) for limit in (METRICS, *LIMITS))
            advance()


def _measurement(
    experiment: UnknownLoad, case: EngineCase, limit: str, columns: Sequence[Mapping[str, dict[str, Any]]]
) -> Measurement:
    of_limit = [one[limit] for one in columns]
    return Measurement(
        key={"case": case.name, "limit": limit},
        seeds=range(experiment.seeds),
        traces=generated(experiment.trace),
        figures={name: [one[name] for one in of_limit] for name in of_limit[0]},
    )


def _all_limits(run: Run) -> dict[str, dict[str, Any]]:
    # In one process, which measures the rate of saturation once.
    return {limit: _figures(run, limit) for limit in (METRICS, *LIMITS)}


def _figures(run: Run, limit: str) -> dict[str, Any]:
    case = run.case
    fleet = FleetSettings(
        profile=run.experiment.profile,
        replicas={ONE_POOL: 1},
        engine=EngineChanges(max_num_seqs=case.max_num_seqs),
        tells_load=limit == METRICS,
    )
    simulation = Simulation(scheduler_settings("ewsjf", fleet.routing, {}), fleet.plans(isolated=True))
    if limit != METRICS:
        simulation.scheduler.ledger.make_in_flight_limit = LIMITS[limit]
        for replica in simulation.replicas.values():
            simulation.feed(ReplicaJoined(replica.spec))
    requests = _requests(run, fleet)
    if case.slower != 1.0:
        middle = requests[len(requests) // 2].request.arrived_at
        simulation.timeline.at(middle, Rank.ARRIVAL, partial(_slow_down, simulation, case.slower))
    records = sorted(simulation.run(requests), key=lambda record: record.arrived_at)
    measured = records[round(_WARM_UP_RATIO * len(records)) :]
    summary = summarise(measured, SummaryRules(slo=SloByLength()))
    limits = [state.in_flight_limit for state in simulation.scheduler.ledger]
    return {
        "goodput_per_s": summary.goodput_per_s,
        "tokens_per_s": summary.throughput_tokens_per_s,
        "ttft_p50_s": summary.ttft_s.all.p50,
        "ttft_p99_s": summary.ttft_s.all.p99,
        "completed": summary.completed,
        "last_limit": limits[0],
    }


def _requests(run: Run, fleet: FleetSettings) -> list[SimulatedRequest]:
    chosen = TraceChoice(name=run.experiment.trace, requests=run.case.requests)
    rate = run.case.load * saturated_rate_per_s(fleet, chosen, run.seed)
    trace = scale_to_rate(choose_trace(chosen, run.seed), rate)
    disclosure = Disclosure(streamed=run.case.streamed)
    return list(requests_of(trace, disclosure, fleet.plans()[0].engine.block_size))


def _slow_down(simulation: Simulation, factor: float) -> None:
    for replica in simulation.replicas.values():
        replica.model.step_time = replica.model.step_time.scaled(factor)


EXPERIMENT = Experiment(settings=UnknownLoad, play=play)
