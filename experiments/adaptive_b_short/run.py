"""Does a `B_short` that adapts serve a drifting mix better than a fixed one?

Traffic is made of chats and documents. A scenario says which share of the requests are documents while time
goes on; the rate follows, so that the load stays. Engines are the same for all values of `B_short`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from experiments.adaptive_b_short.settings import AdaptiveExperiment, Cell, cells_of
from experiments.common.drifting_mix import MixRates, drifting_arrivals, mix_rates, trace_of_kinds
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated
from serve_app.command import progress_bar
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.slo import slo_attainment_ratio
from serve_app.metrics.statistics import percentile
from serve_app.routing.adaptive_b_short import BShortChanged
from serve_app.scheduling import SchedulerSettings
from serve_app.scheduling.decision_log import Decision
from serve_app.simulation.batch import parallel
from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import SimulatedRequest, Simulation
from serve_app.simulation.workload import Disclosure, fit, requests_of
from serve_app.workloads.streams import stream

# The first tenth of requests is not measured.
_WARM_UP_RATIO = 0.1
_Moves = list[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Run:
    """One cell with one seed."""

    experiment: AdaptiveExperiment
    cell: Cell
    rates: MixRates
    seed: int

    @property
    def first_tokens(self) -> int:
        """`B_short` at the start."""
        return self.cell.fixed_tokens or self.experiment.adaptive_from_tokens

    @property
    def fleet(self) -> FleetSettings:
        """Its replicas."""
        return self.experiment.fleets[self.cell.fleet].fleet(self.first_tokens)

    @property
    def scheduler(self) -> SchedulerSettings:
        """Its settings, resolved."""
        changes: dict[str, object] = {}
        if self.cell.fixed_tokens is None:
            changes["routing.adaptive_b_short.enabled"] = True
        if self.cell.gated:
            changes["backpressure.tpot_gate_s"] = self.experiment.tpot_gate_s
        return scheduler_settings(self.experiment.policy, self.fleet.routing, changes)


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What came of one run.

    Attributes:
        spilled: share of requests that were served outside the pool that was their home.
        moves: of `B_short`.
        last_b_short_tokens: where it was at the end.
    """

    attainment: float
    ttft_p99_s: float
    short_ttft_p99_s: float
    long_ttft_p99_s: float
    tpot_p99_s: float
    spilled: float
    moves: int
    last_b_short_tokens: int
    requests: int


def play(experiment: AdaptiveExperiment, context: Context) -> Iterator[Measurement]:
    """Every cell that there is no row of yet; all values of `B_short` meet the same requests."""
    cells = [cell for cell in cells_of(experiment) if not context.has(cell.key)]
    traffic = list(dict.fromkeys((cell.fleet, cell.scenario) for cell in cells))
    measured = parallel(_rates, [(experiment, *of) for of in traffic], context.jobs)
    rates = dict(zip(traffic, measured, strict=True))
    with progress_bar("adaptive_b_short", len(cells)) as advance:
        for cell in cells:
            rate = rates[cell.fleet, cell.scenario]
            runs = [Run(experiment, cell, rate, seed) for seed in range(experiment.seeds)]
            yield _measurement(runs, list(parallel(_figures, runs, context.jobs)))
            advance()


def _measurement(runs: Sequence[Run], found: Sequence[RunFigures]) -> Measurement:
    run, experiment = runs[0], runs[0].experiment
    scenario = experiment.scenarios[run.cell.scenario]
    columns = [asdict(one) for one in found]
    return Measurement(
        key=run.cell.key,
        seeds=[one.seed for one in runs],
        traces=generated(f"documents and chats as in {scenario.mix.chats}"),
        figures={name: [one[name] for one in columns] for name in columns[0]},
        settings={
            "fleet": asdict(run.fleet),
            "load": experiment.fleets[run.cell.fleet].load,
            "scenario": asdict(scenario),
            "rates": asdict(run.rates),
            "duration_s": experiment.duration_s,
            "slo": asdict(experiment.slo),
            "short_at_tokens": experiment.short_at_tokens,
            "scheduler": asdict(run.scheduler),
        },
    )


def _rates(of: tuple[AdaptiveExperiment, str, str]) -> MixRates:
    experiment, fleet, scenario = of
    pools, traffic = experiment.fleets[fleet], experiment.scenarios[scenario]
    lengths = partial(traffic.mix.lengths, context_tokens=pools.context_tokens)
    return mix_rates(traffic.documents, lengths, pools.fleet(pools.short_context_tokens))


def _figures(run: Run) -> RunFigures:
    experiment = run.experiment
    moves: _Moves = []

    def look(decision: Decision) -> None:
        moved = (command for command in decision.commands if isinstance(command, BShortChanged))
        moves.extend((decision.now, move.b_short_tokens) for move in moved)

    simulation = Simulation(run.scheduler, run.fleet.plans(isolated=True), on_decision=look)
    records = sorted(simulation.run(_requests(run)), key=lambda record: record.arrived_at)
    records = records[round(_WARM_UP_RATIO * len(records)) :]
    ttft_s = {
        is_short: sorted(
            record.ttft_s
            for record in records
            if record.ttft_s is not None and (record.prompt_tokens <= experiment.short_at_tokens) is is_short
        )
        for is_short in (True, False)
    }
    spilled = sum(record.pool != _home(record, moves, run.first_tokens) for record in records)
    return RunFigures(
        attainment=slo_attainment_ratio(records, experiment.slo) or 0.0,
        ttft_p99_s=percentile(sorted(ttft_s[True] + ttft_s[False]), 99),
        short_ttft_p99_s=percentile(ttft_s[True], 99),
        long_ttft_p99_s=percentile(ttft_s[False], 99),
        tpot_p99_s=percentile(sorted(one.tpot_s for one in records if one.tpot_s is not None), 99),
        spilled=spilled / len(records),
        moves=len(moves),
        last_b_short_tokens=moves[-1][1] if moves else run.first_tokens,
        requests=len(records),
    )


def _requests(run: Run) -> list[SimulatedRequest]:
    experiment, cell = run.experiment, run.cell
    pools, scenario = experiment.fleets[cell.fleet], experiment.scenarios[cell.scenario]
    arrivals = drifting_arrivals(
        scenario.documents,
        run.rates,
        pools.load,
        experiment.duration_s,
        stream(run.seed, "arrivals and kinds"),
    )
    lengths = partial(scenario.mix.lengths, context_tokens=pools.context_tokens)
    trace = fit(trace_of_kinds(cell.scenario, arrivals, lengths, run.seed), pools.context_tokens).trace
    return list(requests_of(trace, Disclosure(), run.fleet.plans()[0].engine.block_size))


def _home(record: RequestRecord, moves: _Moves, first_tokens: int) -> str:
    """The pool that a request was at home in when it was dispatched."""
    at = record.dispatched_at if record.dispatched_at is not None else record.arrived_at
    b_short = next((tokens for since, tokens in reversed(moves) if since <= at), first_tokens)
    return "short" if (record.estimated_tokens or 0) <= b_short else "long"


EXPERIMENT = Experiment(settings=AdaptiveExperiment, play=play)
